"""A gated recurrent unit, with the gates of cuDNN and torch.

Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical
Machine Translation", EMNLP 2014; two biases, and the reset gate after the recurrent
product.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_graph.core import mesh
from fedjax_graph.models.linear import fan_in_uniform, over_time


class GRUWeights(NamedTuple):
    """Holds the weights of one GRU layer."""

    input_kernel: jax.Array  # [F, 3H], columns r, z, n
    hidden_kernel: jax.Array  # [H, 3H]
    input_bias: jax.Array  # [3H]
    hidden_bias: jax.Array  # [3H]


def gru_step(weights: GRUWeights, state: jax.Array, projected: jax.Array) -> jax.Array:
    """Takes one step of a GRU.

    Args:
      weights: of the cell.
      state: [B, H].
      projected: [B, 3H], the input times the input kernel plus the input bias.

    Returns:
      The next state [B, H].
    """
    recurrent = state @ weights.hidden_kernel + weights.hidden_bias
    # Three parts of one shape, so that they become one kernel on a GPU.
    r_x, z_x, n_x = jnp.split(projected, 3, axis=-1)
    r_h, z_h, n_h = jnp.split(recurrent, 3, axis=-1)
    reset, update = nn.sigmoid(r_x + r_h), nn.sigmoid(z_x + z_h)
    candidate = jnp.tanh(n_x + reset * n_h)
    return candidate + update * (state - candidate)


class GRUCell(nn.Module):
    """Holds the weights of one GRU layer."""

    input_size: int
    hidden_size: int

    def setup(self) -> None:
        init, width = fan_in_uniform(self.hidden_size), 3 * self.hidden_size
        self.weights = GRUWeights(
            self.param("input_kernel", init, (self.input_size, width)),
            self.param("hidden_kernel", init, (self.hidden_size, width)),
            self.param("input_bias", init, (width,)),
            self.param("hidden_bias", init, (width,)),
        )

    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs over [T, B, F]; returns all states [T, B, H] and the last one [B, H]."""
        weights = self.weights
        steps, project = over_time(inputs, weights.input_kernel, weights.input_bias)

        def step(state, now):
            state = gru_step(weights, state, project(now))
            return state, state

        start = mesh.varying(
            jnp.zeros((inputs.shape[1], self.hidden_size), inputs.dtype)
        )
        last, states = jax.lax.scan(step, start, steps, unroll=True)
        return states, last
