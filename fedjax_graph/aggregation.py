"""Aggregators: stacked client parameters in, stacked parameters out.

An aggregator maps a pytree of `[C, ...]` arrays (one row a client of the cohort) and
`[C]` weights to a pytree of `[1, ...]` (one model for all) or `[C, ...]` (one model
each). As with NumPy's `keepdims`, the result broadcasts against the clients. A client
of weight 0 changes nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Stacked = Any  # pytree of [C, ...]
Aggregator = Callable[[Stacked, jax.Array], Stacked]


def weighted_mean(stacked: Stacked, weights: jax.Array) -> Stacked:
    """Sum_i (N_i / N) theta_i: federated averaging (McMahan et al., 2017).

    Args:
      stacked: pytree of [C, ...].
      weights: [C], non-negative, not all 0.

    Returns:
      Pytree of [1, ...].
    """
    shares = weights / jnp.sum(weights)

    def mean(x):  # in float32 whatever the precision of the models' products
        return jnp.tensordot(shares, x, axes=1, precision=jax.lax.Precision.HIGHEST)

    return jax.tree.map(lambda x: mean(x)[None], stacked)


def none(stacked: Stacked, weights: jax.Array) -> Stacked:
    """Every client keeps its own model (the identity graph)."""
    del weights
    return stacked


def broadcast(stacked: Stacked, num_clients: int) -> Stacked:
    """Gives each of `num_clients` a row: `[1 or C, ...]` -> `[C, ...]`."""
    return jax.tree.map(
        lambda x: jnp.broadcast_to(x, (num_clients, *x.shape[1:])), stacked
    )


def num_models(stacked: Stacked) -> int:
    """The leading size: 1 (one model for all) or the number of clients."""
    return jax.tree.leaves(stacked)[0].shape[0]


def initial(aggregate: Aggregator, params: Any, num_clients: int) -> Stacked:
    """Everybody's first model, with as many rows as the aggregator will return."""
    stacked = jax.tree.map(lambda x: x[None], params)
    everybody = broadcast(stacked, num_clients)
    rows = num_models(jax.eval_shape(aggregate, everybody, jnp.ones(num_clients)))
    return broadcast(stacked, rows)
