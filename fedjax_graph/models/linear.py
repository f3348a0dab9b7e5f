"""Dense layers with explicit input sizes, so that a kernel can be split by rows."""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_graph.core import mesh
from fedjax_graph.core.masked_rows import MaskedRows
from fedjax_graph.core.sparse_rows import SparseRows

THIN = 2  # rows of a kernel


def fan_in_uniform(fan_in: int) -> nn.initializers.Initializer:
    """Draws from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as CNFGNN's released code does.

    For a GRU the fan is the hidden size, for every kernel and bias of it.
    """
    bound = fan_in**-0.5

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Linear(nn.Module):
    """Computes `x W + b` on the last axis; operands are flattened to 2-D.

    The weight gradient of a product with more axes is several times slower on CPU.
    """

    input_size: int
    output_size: int

    def setup(self) -> None:
        init = fan_in_uniform(self.input_size)
        self.kernel = self.param("kernel", init, (self.input_size, self.output_size))
        self.bias = self.param("bias", init, (self.output_size,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return matmul(x, self.kernel) + self.bias


class MLP(nn.Module):
    """Stacks linear layers with ReLU between; the caller does their first product.

    The first layer acts on a concatenation, `W [a; b] = W_a a + W_b b`: the caller
    multiplies each part where it has the fewest rows, adds, and calls `finish`.
    """

    input_sizes: Sequence[int]  # widths of the concatenated parts
    layer_sizes: Sequence[int]

    def setup(self) -> None:
        sizes = (sum(self.input_sizes), *self.layer_sizes)
        self.layers = [Linear(i, o) for i, o in zip(sizes[:-1], sizes[1:], strict=True)]

    def first_kernels(self) -> list[jax.Array]:
        """Splits the first kernel into the rows for each part of the input."""
        bounds, total = [], 0
        for size in self.input_sizes[:-1]:
            total += size
            bounds.append(total)
        return jnp.split(self.layers[0].kernel, bounds)

    def first_bias(self) -> jax.Array:
        """Returns the bias of the first layer."""
        return self.layers[0].bias

    def hidden(self, first_sum: jax.Array) -> jax.Array:
        """Computes the last layer's input from the summed parts of the first layer."""
        x = nn.relu(first_sum)
        for layer in self.layers[1:-1]:
            x = nn.relu(layer(x))
        return x

    def output(self, hidden: jax.Array) -> jax.Array:
        """Applies the last layer."""
        return self.layers[-1](hidden)


def matmul(x: jax.Array | SparseRows | MaskedRows, kernel: jax.Array) -> jax.Array:
    """Computes `x W` over the last axis of x, as one 2-D product.

    Of a thin W it is a sum of multiples on an accelerator, where that becomes part of
    what reads it and nothing is written.
    """
    if isinstance(x, SparseRows | MaskedRows):
        return x @ kernel
    if is_thin(kernel):
        return sum_of_multiples(x, tuple(kernel))
    flat = x.reshape(-1, x.shape[-1]) @ kernel
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


def is_thin(kernel: jax.Array) -> bool:
    """Tells whether a product with a kernel is better a `sum_of_multiples`."""
    return len(kernel) <= THIN and mesh.backend() != "cpu"


def sum_of_multiples(x: jax.Array, rows: Sequence[jax.Array]) -> jax.Array:
    """Computes `x W` over the last axis of x of the rows of W."""
    multiples = [x[..., i : i + 1] * row for i, row in enumerate(rows)]
    return functools.reduce(jnp.add, multiples)


def over_time(
    inputs: jax.Array, kernel: jax.Array, bias: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Projects what a recurrence reads: all time steps at once, or each in its step.

    One large product before the scan, as it does not depend on the recurrence. Of a
    thin kernel on an accelerator it is part of each step, and so is its gradient, of
    which XLA makes one slow sum over all steps otherwise (BUILD_NOTES.md, 'On an
    H100').

    Args:
      inputs: [T, B, F].
      kernel: [F, H].
      bias: [H].

    Returns:
      What to scan, [T, B, ...], and what makes a step's `x W + b`, [B, H], of it.
    """
    if is_thin(kernel):
        rows = tuple(kernel)  # once, not in each step
        return inputs, lambda now: sum_of_multiples(now, rows) + bias
    is_row = len(kernel) == 1  # which needs no product
    product = inputs * kernel[0] if is_row else matmul(inputs, kernel)
    return product + bias, lambda projected: projected
