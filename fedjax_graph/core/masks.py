"""Means over, and the lowest of, the entries that a mask marks."""

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of values [L] where the mask [L] is 1; 0 if it is 0 everywhere.

    Raises:
      InputError: if the two have not the same shape.
    """
    arrays.check_same_shape(values=values, mask=mask)
    return jnp.sum(mask * values) / jnp.maximum(jnp.sum(mask), 1)


def mean_where(values: jax.Array, is_meant: jax.Array) -> jax.Array:
    """Mean of the values [...] that are meant, whatever the others are; 0 of none.

    Args:
      values: of which the others may be infinite or NaN.
      is_meant: bool, of the same shape.

    Returns:
      [].
    """
    total = jnp.sum(jnp.where(is_meant, values, 0))
    return total / jnp.maximum(jnp.sum(is_meant), 1)


def lowest(values: jax.Array, is_real: jax.Array, number: jax.Array) -> jax.Array:
    """Marks the `number` lowest of the real ones among values [K]: [K] bool."""
    order = jnp.lexsort((values, ~is_real))  # real ones first, infinite ones too
    rank = jnp.argsort(order)
    return is_real & (rank < number)
