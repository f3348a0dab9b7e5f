"""Aggregators that withstand a minority of arbitrary models.

Like `aggregation.median`, which is one of them, they count clients alike, as who lies
about a model lies about its examples. Distances are over all leaves together. Clients
of weight 0 are left out, whatever their models hold; of nobody the result is 0.

With n clients that take part, `tolerance` says how many of them, f = floor(tolerance
n), may send anything at all.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays, trees
from fedjax_graph.core.aggregation import (
    Stacked,
    check_cohort,
    checked,
    client_mean,
    median,
)
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.masks import lowest

TOLERANCE = 0.2
WEISZFELD_STEPS = 30
SMALLEST_DISTANCE = 1e-6  # nu of the smoothed Weiszfeld algorithm, relative


def trimmed_mean(
    stacked: Stacked, cohort: Cohort, tolerance: float = TOLERANCE
) -> Stacked:
    """The mean of each coordinate without its f smallest and its f largest values.

    Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards
    Optimal Statistical Rates", ICML 2018, Definition 2.

    Args:
      stacked: pytree of [C, ...].
      cohort: who takes part.
      tolerance: beta, below 1/2.

    Returns:
      Pytree of [1, ...].
    """
    is_real, num_real, num_trimmed = _sizes(stacked, cohort, tolerance)
    rank = jnp.arange(len(is_real))
    is_kept = (rank >= num_trimmed) & (rank < num_real - num_trimmed)

    def of_leaf(x: jax.Array) -> jax.Array:
        ordered = jnp.sort(jnp.where(trees.expand_like(is_real, x), x, jnp.inf), axis=0)
        kept = jnp.where(trees.expand_like(is_kept, x), ordered, 0)
        total = jnp.sum(kept, axis=0, keepdims=True)
        return total / jnp.maximum(jnp.sum(is_kept), 1)

    return jax.tree.map(of_leaf, stacked)


def krum(stacked: Stacked, cohort: Cohort, tolerance: float = TOLERANCE) -> Stacked:
    """The model whose n - f - 2 nearest others are nearest (Krum).

    Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries:
    Byzantine Tolerant Gradient Descent", NeurIPS 2017, Section 4. At least one other
    counts, where there is one.

    Args:
      stacked: pytree of [C, ...].
      cohort: who takes part.
      tolerance: f / n; the paper's guarantee holds where 2 f + 2 < n.

    Returns:
      Pytree of [1, ...], the model of one client.
    """
    is_real, scores = krum_scores(stacked, cohort, tolerance)
    chosen = jnp.argmax(lowest(scores, is_real, jnp.int32(1)))
    return jax.tree.map(
        lambda x: jnp.where(is_real[chosen], x[chosen], 0)[None], stacked
    )


def multi_krum(
    stacked: Stacked, cohort: Cohort, tolerance: float = TOLERANCE
) -> Stacked:
    """The mean of the n - f models with the lowest scores of Krum; see `krum`.

    Args:
      stacked: pytree of [C, ...].
      cohort: who takes part.
      tolerance: f / n.

    Returns:
      Pytree of [1, ...].
    """
    is_real, scores = krum_scores(stacked, cohort, tolerance)
    num_kept = jnp.sum(is_real) - _num_tolerated(jnp.sum(is_real), tolerance)
    is_kept = lowest(scores, is_real, num_kept)
    mean = client_mean(trees.kept_rows(stacked, is_kept), is_kept)
    return trees.one_row(mean)


def krum_scores(
    stacked: Stacked, cohort: Cohort, tolerance: float
) -> tuple[jax.Array, jax.Array]:
    """Who takes part [C] bool, and Krum's scores [C], infinite for the others.

    A score is the sum of the squared distances to the n - f - 2 nearest others, and
    infinite where that is not finite.
    """
    is_real, num_real, num_tolerated = _sizes(stacked, cohort, tolerance)
    num_near = jnp.maximum(num_real - num_tolerated - 2, 1)
    rows = trees.kept_rows(stacked, is_real)
    size = len(is_real)

    def score(client: jax.Array) -> jax.Array:
        squares = _squared_distances(rows, jax.tree.map(lambda x: x[client], rows))
        is_other = is_real & (jnp.arange(size) != client)
        nearest = jnp.sort(jnp.where(is_other, squares, jnp.inf))
        counts = jnp.arange(size) < jnp.minimum(num_near, num_real - 1)
        return jnp.sum(jnp.where(counts, nearest, 0))

    scores = jax.lax.map(score, jnp.arange(size))
    return is_real, jnp.where(is_real & jnp.isfinite(scores), scores, jnp.inf)


def geometric_median(stacked: Stacked, cohort: Cohort) -> Stacked:
    """The model of the least sum of Euclidean distances to those of the clients.

    By the smoothed Weiszfeld algorithm of Pillutla, Kakade, Harchaoui, "Robust
    Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 2, of which this takes
    `WEISZFELD_STEPS` from the median of each coordinate. Differences: clients count
    alike, nu is a millionth of the mean distance, and who is at no finite distance has
    no pull.

    Args:
      stacked: pytree of [C, ...].
      cohort: who takes part.

    Returns:
      Pytree of [1, ...].
    """
    exact = jax.tree.map(arrays.precise, stacked)
    first = median(exact, cohort)
    is_real = cohort.weights > 0
    rows = trees.kept_rows(exact, is_real)

    def step(_: jax.Array, centre: Any) -> Any:
        row = jax.tree.map(lambda x: x[0], centre)
        distances = jnp.sqrt(_squared_distances(rows, row))
        pulls_it = is_real & jnp.isfinite(distances)
        distances = jnp.where(pulls_it, distances, 0)
        mean = jnp.sum(distances) / jnp.maximum(jnp.sum(pulls_it), 1)
        near = jnp.maximum(distances, SMALLEST_DISTANCE * mean)
        pulls = jnp.where(pulls_it, 1 / jnp.where(near > 0, near, 1), 0)
        shares = pulls / jnp.maximum(jnp.sum(pulls), jnp.finfo(pulls.dtype).tiny)
        moved = jax.tree.map(
            lambda x: jnp.tensordot(
                shares[None], x, axes=1, precision=jax.lax.Precision.HIGHEST
            ),
            trees.kept_rows(rows, pulls_it),
        )
        stays = ~jnp.any(pulls_it)
        return jax.tree.map(lambda x, new: jnp.where(stays, x, new), centre, moved)

    return checked(stacked, jax.lax.fori_loop(0, WEISZFELD_STEPS, step, first))


def _sizes(
    stacked: Stacked, cohort: Cohort, tolerance: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Who takes part [C] bool, n, and f."""
    check_cohort(stacked, cohort)
    arrays.check_weights("tolerance", tolerance)
    if arrays.is_known(tolerance) and tolerance >= 0.5:
        raise InputError(f"tolerance={tolerance}: expected less than 0.5, a minority")
    is_real = cohort.weights > 0
    num_real = jnp.sum(is_real)
    return is_real, num_real, _num_tolerated(num_real, tolerance)


def _num_tolerated(num_real: jax.Array, tolerance: float) -> jax.Array:
    """f = floor(tolerance n), where 0.2 x 5 is 1 in float32 too; always a minority."""
    num_tolerated = jnp.floor(tolerance * num_real + 1e-4).astype(jnp.int32)
    return jnp.clip(num_tolerated, 0, jnp.maximum(num_real - 1, 0) // 2)


def _squared_distances(rows: Stacked, row: Any) -> jax.Array:
    """Of rows [C, ...] to one [...], over all leaves: [C]."""

    def of_leaf(x: jax.Array, centre: jax.Array) -> jax.Array:
        return jnp.sum(((x - centre) ** 2).reshape(len(x), -1), axis=1)

    parts = jax.tree.leaves(jax.tree.map(of_leaf, rows, row))
    return jnp.sum(jnp.stack(parts), axis=0)
