"""Short rows laid side by side: a TPU pads the last axis of an array to 128 numbers.

An array [..., S, F] with F = 64 would take twice its memory there. Folded, a row of 128
numbers holds two of its rows.
"""

import math

import jax
import jax.numpy as jnp

from fedjax_graph.core import mesh

_TPU_LANES = 128


def factor(size: int, num_rows: int) -> int:
    """How many rows of `size` numbers to lay side by side: 1 where nothing is padded.

    Args:
      size: F, numbers of a row.
      num_rows: what the factor has to divide.
    """
    if mesh.backend() != "tpu" or not size:
        return 1
    return math.gcd(max(_TPU_LANES // size, 1), num_rows)


def fold(rows: jax.Array, factor: int) -> jax.Array:
    """[..., S, F] as [..., S / factor, factor * F]; `factor` divides S."""
    *shape, num_rows, size = rows.shape
    return rows.reshape(*shape, num_rows // factor, factor * size)


def take(folded: jax.Array, indices: jax.Array, size: int) -> jax.Array:
    """Rows [B, F] at `indices` [B] of [S, F], from what `fold` made of it.

    Args:
      folded: [S / factor, factor * F].
      indices: [B] int32.
      size: F.
    """
    if folded.shape[-1] == size:
        return folded[indices]
    factor = folded.shape[-1] // size
    found = folded[indices // factor].reshape(len(indices), factor, size)
    is_it = jnp.arange(factor) == (indices % factor)[:, None]
    return jnp.sum(jnp.where(is_it[..., None], found, 0), axis=1)
