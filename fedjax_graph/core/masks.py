"""Means over, and the lowest of, the entries that a mask marks."""

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of values [...] where the mask [...] is 1 or true; 0 if it is nowhere.

    The other values may be infinite or NaN; gradients that pass through what made them
    so are NaN all the same.

    Raises:
      InputError: if the two have not the same shape.
    """
    arrays.check_same_shape(values=values, mask=mask)
    total = jnp.sum(jnp.where(mask > 0, mask * values, 0))
    return total / jnp.maximum(jnp.sum(mask), 1)


def lowest(values: jax.Array, is_real: jax.Array, number: jax.Array) -> jax.Array:
    """Marks the `number` lowest of the real ones among values [K]: [K] bool."""
    order = jnp.lexsort((values, ~is_real))  # real ones first, infinite ones too
    rank = jnp.argsort(order)
    return is_real & (rank < number)
