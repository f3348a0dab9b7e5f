"""GRU encoder-decoder for forecasting, with room for an embedding from elsewhere.

Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical
Machine Translation", EMNLP 2014, as CNFGNN uses it (Eqs. 1 and 2). The gates are those
of cuDNN and torch: two biases, and the reset gate after the recurrent product.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_graph.core.local import Params
from fedjax_graph.models.gru import GRUCell, gru_step
from fedjax_graph.models.linear import Linear, over_time

NUM_FEATURES = 2  # normalised speed, time of day


class Seq2Seq(nn.Module):
    """Encodes and forecasts one client's series: 64K parameters by default.

    With `embedding_size = 0` it is the plain GRU of the baselines.
    """

    hidden_size: int = 64
    embedding_size: int = 64
    num_layers: int = 1

    def setup(self) -> None:
        state_size = self.hidden_size + self.embedding_size
        inputs = [NUM_FEATURES] + [self.hidden_size] * (self.num_layers - 1)
        self.encoder = [GRUCell(size, self.hidden_size) for size in inputs]
        inputs = [NUM_FEATURES] + [state_size] * (self.num_layers - 1)
        self.decoder = [GRUCell(size, state_size) for size in inputs]
        self.head = Linear(state_size, 1)

    def encode(self, inputs: jax.Array) -> jax.Array:
        """Encodes readings as h_c (Eq. 1).

        Args:
          inputs: [12, B, 2] normalised speed and time of day.

        Returns:
          [B, L H], the last states of all layers.
        """
        last_states, sequence = [], inputs
        for cell in self.encoder:
            sequence, last = cell(sequence)
            last_states.append(last)
        return jnp.concatenate(last_states, axis=-1)

    def decode(
        self,
        hidden: jax.Array,
        embedding: jax.Array,
        last: jax.Array,
        targets: jax.Array,
        feed_truth: jax.Array,
    ) -> jax.Array:
        """Forecasts from h_c and h_G (Eq. 2), one step feeding the next.

        Args:
          hidden: [B, L H] from `encode`.
          embedding: [B, E], h_G; every layer starts from `[h_c; h_G]`.
          last: [B, 2] last observed frame.
          targets: [T, B, 2]; the clocks are known, the values are used where
            `feed_truth` says so.
          feed_truth: [T] bool, whether the step after t is fed the true value of t.

        Returns:
          [T, B] normalised speed.
        """
        cells = [cell.weights for cell in self.decoder]
        head_kernel, head_bias = self.head.kernel[:, 0], self.head.bias[0]
        value_row, clock_row = cells[0].input_kernel
        clocks = jnp.concatenate([last[None, :, 1:], targets[:-1, :, 1:]])
        clocks, project = over_time(clocks, clock_row[None], cells[0].input_bias)

        def step(carry, now):
            states, value = carry
            clock, truth, feed = now
            projected = project(clock) + value[:, None] * value_row  # [B, 3H]
            new_states = []
            for depth, (cell, state) in enumerate(zip(cells, states, strict=True)):
                if depth:
                    projected = new_states[-1] @ cell.input_kernel + cell.input_bias
                new_states.append(gru_step(cell, state, projected))
            output = new_states[-1] @ head_kernel + head_bias
            return (new_states, jnp.where(feed, truth, output)), output

        states = [
            jnp.concatenate([state, embedding], axis=-1)
            for state in jnp.split(hidden, self.num_layers, axis=-1)
        ]
        steps = (clocks, targets[..., 0], feed_truth)
        _, outputs = jax.lax.scan(step, (states, last[:, 0]), steps, unroll=True)
        return outputs

    def __call__(self, inputs, embedding, targets, feed_truth) -> jax.Array:
        """Forecasts from the readings themselves: `decode` after `encode`."""
        hidden = self.encode(inputs)
        return self.decode(hidden, embedding, inputs[-1], targets, feed_truth)


def init_params(model: Seq2Seq, key: jax.Array) -> Params:
    """Draws fresh parameters, whose shapes depend neither on batch nor on window."""
    return model.init(
        key,
        jnp.zeros((1, 1, NUM_FEATURES)),
        jnp.zeros((1, model.embedding_size)),
        jnp.zeros((1, 1, NUM_FEATURES)),
        jnp.zeros(1, bool),
    )["params"]
