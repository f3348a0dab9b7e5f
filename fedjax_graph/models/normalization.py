"""Normalisation of activations and of rows."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays

STATISTICS_RATE = 0.1  # share of a batch in the running statistics


VARIANCE_FLOOR = 1e-5


class BatchNorm(nn.Module):
    """Normalises batches, in which padded examples have no part.

    Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by
    Reducing Internal Covariate Shift", ICML 2015. Running variances are of the batch as
    it is (divided by n), as flax has it; torch divides by n - 1.
    """

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalises each channel.

        Args:
          x: [B, H, W, C].
          mask: [B], 0 for padding: normalises by the statistics of the other examples
            and updates the running ones. None, or all padding: normalises by the
            running statistics, which stay as they are.

        Returns:
          [B, H, W, C].
        """
        size = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, size)
        bias = self.param("bias", nn.initializers.zeros, size)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, size)
        running_var = self.variable("batch_stats", "var", jnp.ones, size)
        mean, var = running_mean.value, running_var.value
        running_types = mean.dtype, var.dtype
        if mask is not None:
            has_any = jnp.any(mask > 0)
            batch_mean, batch_var = masked_moments(x, mask)
            mean = jnp.where(has_any, batch_mean, mean)
            var = jnp.where(has_any, batch_var, var)
            for running, new in ((running_mean, mean), (running_var, var)):
                moved = running.value + STATISTICS_RATE * (new - running.value)
                running.value = moved.astype(jnp.result_type(running.value, x))
        factor = scale * jax.lax.rsqrt(var + VARIANCE_FLOOR)
        outputs = x * factor + (bias - mean * factor)
        return outputs.astype(jnp.result_type(x, scale, bias, *running_types))


def masked_moments(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes mean and variance [C] of those of x [B, H, W, C] that mask [B] keeps.

    Both are 0 where it keeps none, and in at least float32.

    Raises:
      InputError: if the mask is not [B].
    """
    arrays.check_shape("mask", mask, x.shape[:1])
    x, mask = arrays.precise(x), arrays.precise(mask)
    height, width = x.shape[1:3]
    shares = mask / (jnp.maximum(jnp.sum(mask), 1) * height * width)
    shares = shares[:, None, None, None]
    mean = jnp.sum(shares * x, axis=(0, 1, 2))
    var = jnp.sum(shares * (x - mean) ** 2, axis=(0, 1, 2))
    return mean, var


def unit_rows(matrix: jax.Array) -> jax.Array:
    """Divides rows by their Euclidean norms; a row of zeros stays one."""
    squares = jnp.sum(arrays.precise(matrix) ** 2, axis=1, keepdims=True)
    units = matrix * jnp.where(
        squares > 0, jax.lax.rsqrt(jnp.where(squares > 0, squares, 1)), 0
    )
    return units.astype(arrays.float_type(matrix.dtype))


def cosines(vectors: jax.Array) -> jax.Array:
    """Computes the cosines between the rows of [C, M]: [C, C], 0 with one of zeros."""
    units = unit_rows(vectors)
    return jnp.matmul(units, units.T, precision=jax.lax.Precision.HIGHEST)
