"""The plain recurrent network of SFL's traffic experiments.

Elman, "Finding Structure in Time", Cognitive Science 1990: h_t = tanh(W x_t + U h_{t-1}
+ b); the last state goes through one linear map to all steps ahead.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_graph.core import mesh
from fedjax_graph.models.linear import Linear, fan_in_uniform, over_time


class RNNForecaster(nn.Module):
    """Forecasts [output_steps, B] from [T, B, F]; 5068 parameters by default."""

    hidden_size: int = 64
    num_features: int = 2
    output_steps: int = 12

    def setup(self) -> None:
        init, size = fan_in_uniform(self.hidden_size), self.hidden_size
        self.input_kernel = self.param("input_kernel", init, (self.num_features, size))
        self.hidden_kernel = self.param("hidden_kernel", init, (size, size))
        self.bias = self.param("bias", init, (size,))
        self.head = Linear(size, self.output_steps)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        steps, project = over_time(inputs, self.input_kernel, self.bias)

        def step(state, now):
            return jnp.tanh(project(now) + state @ self.hidden_kernel), None

        start = mesh.varying(
            jnp.zeros((inputs.shape[1], self.hidden_size), inputs.dtype)
        )
        last, _ = jax.lax.scan(step, start, steps, unroll=True)
        return self.head(last).T
