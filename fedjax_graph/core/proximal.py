"""Pulls towards a centre, and norms of gradients, ahead of an optimizer."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core.trees import IsPersonal

Distance = Literal["l2", "squared_l2"]
ROUNDING = 1e-6  # of float32, relative


def squared_norm(tree: Any) -> jax.Array:
    """Computes the squared Euclidean norm of a pytree, summed over all its leaves."""
    return jnp.sum(jnp.stack([jnp.sum(x**2) for x in jax.tree.leaves(tree)]))


def last_norm() -> optax.GradientTransformation:
    """Leaves gradients as they are; its state is the norm of the last ones, []."""

    def keep(gradients, state, params=None):
        del state, params
        return gradients, jnp.sqrt(squared_norm(gradients))

    return optax.GradientTransformation(lambda params: jnp.zeros(()), keep)


def pull(
    weight: jax.Array | float,
    centre: Any,
    distance: Distance = "squared_l2",
    is_personal: IsPersonal = lambda path: False,
) -> optax.GradientTransformation:
    """Adds the gradient of weight * R(v, centre) at the parameters v.

    R is `squared_l2`, |v - c|^2 / 2 (FedProx, Ditto), or `l2`, |v - c| over all leaves
    together (SFL), whose gradient at distance 0 is defined as 0. Distances below a
    millionth of |c| count as 0: they are rounding, and have no direction.

    Args:
      weight: [] factor.
      centre: a model, {"params": c, ...}.
      distance: R.
      is_personal: leaves of a model that are not pulled.
    """

    def difference(path, v, c):
        return jnp.zeros_like(v) if is_personal(path) else v - c

    def add(updates, params):
        gap = jax.tree_util.tree_map_with_path(
            difference, {"params": params}, {"params": centre["params"]}
        )["params"]
        factor = weight
        if distance == "l2":
            square = squared_norm(gap)
            is_apart = square > ROUNDING**2 * squared_norm(centre["params"])
            factor = jnp.where(
                is_apart, weight * jax.lax.rsqrt(jnp.where(is_apart, square, 1)), 0
            )
        return jax.tree.map(lambda g, x: g + factor * x, updates, gap)

    return optax.stateless(add)
