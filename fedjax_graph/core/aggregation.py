"""Aggregators: stacked client models in, stacked models out.

An aggregator maps a pytree of `[C, ...]` arrays (one row a client of the cohort) and
the cohort to a pytree of `[1, ...]` (one model for all) or `[C, ...]` (one model each).
As with NumPy's `keepdims`, the result broadcasts against the clients; leaves of one
tree may differ in this. A client of weight 0 changes nothing, if its model is finite.
The mean of nobody, where all weights are 0, is 0, and `federated_round` then leaves its
models as they are.

All raise `InputError` where models and cohort are not of the same clients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays, faults, graphs, sharding
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.trees import IsPersonal, combine, expand_like, partition

Stacked = Any  # pytree of [C, ...]
Aggregator = Callable[[Stacked, Cohort], Stacked]


def weighted_mean(stacked: Stacked, cohort: Cohort) -> Stacked:
    """Sum_i (N_i / N) theta_i: federated averaging (McMahan et al., 2017).

    Args:
      stacked: pytree of [C, ...].
      cohort: its weights are N_i.

    Returns:
      Pytree of [1, ...].
    """
    check_cohort(stacked, cohort)
    shares = shares_of(cohort.weights)
    return jax.tree.map(lambda x: _product(shares[None], x), stacked)


def shares_of(weights: jax.Array) -> jax.Array:
    """Weights [C] divided by their sum; zeros where all are 0."""
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1)


def check_cohort(stacked: Stacked, cohort: Cohort) -> None:
    """Checks that models and a cohort are of the same clients.

    Raises:
      InputError: if indices or weights are not [C], or a leaf is not [C, ...], or known
        weights are negative or not finite.
    """
    if not isinstance(cohort, Cohort):
        raise InputError(
            f"cohort: expected a Cohort, found a {type(cohort).__name__}; one of other "
            "weights is cohort._replace(weights=...)"
        )
    size = len(cohort.indices)
    arrays.check_shape("cohort.indices", cohort.indices, (size,))
    arrays.check_shape("cohort.weights", cohort.weights, (size,))
    arrays.check_weights("cohort.weights", cohort.weights)
    _check_rows(stacked, size)


def _check_rows(stacked: Stacked, size: int) -> None:
    for x in jax.tree.leaves(stacked):
        if not jnp.ndim(x) or x.shape[0] != size:
            raise InputError(
                f"a leaf of the models has shape {jnp.shape(x)}, expected a row for "
                f"each of {size} clients"
            )


def median(stacked: Stacked, cohort: Cohort) -> Stacked:
    """The median of each coordinate over the cohort, in which clients count alike.

    Withstands a minority of arbitrary models: Yin, Chen, Ramchandran, Bartlett,
    "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
    2018, Definition 1.

    Args:
      stacked: pytree of [C, ...].
      cohort: clients of weight 0 are left out; of nobody it is 0.

    Returns:
      Pytree of [1, ...].
    """
    check_cohort(stacked, cohort)
    is_real = cohort.weights > 0
    num_real = jnp.sum(is_real)
    middle = jnp.array([(num_real - 1) // 2, num_real // 2])

    def of_leaf(x: jax.Array) -> jax.Array:
        rows = jnp.where(expand_like(is_real, x), x, jnp.inf)
        mean = jnp.mean(jnp.sort(rows, axis=0)[middle], axis=0, keepdims=True)
        return jnp.where(num_real > 0, mean, 0)

    return jax.tree.map(of_leaf, stacked)


def client_mean(stacked: Stacked, weights: jax.Array) -> Any:
    """The mean over the real clients, each counted once: [K, ...] -> [...], 0 of none.

    Raises:
      InputError: if weights are not [K].
    """
    arrays.check_shape("weights", weights, (None,))
    _check_rows(stacked, len(weights))
    shares = shares_of(weights > 0)
    return jax.tree.map(lambda x: _product(shares, x), stacked)


def none(stacked: Stacked, cohort: Cohort) -> Stacked:
    """Every client keeps its own model (the identity graph)."""
    del cohort
    return stacked


def attention(server: Any, step_size: float = 1.0) -> Aggregator:
    """w + step_size sum_i a_i (theta_i - w) with a = softmax_i |w - theta_i|.

    Layer-wise (each leaf has weights a of its own): Ji, Long, Pan, Zhu, Jiang, Wang,
    "Learning Private Neural Language Modeling with Attentive Aggregation", IJCNN 2019.
    The distance is the sum of absolute differences and clients count alike, as in the
    code that was released with SFL. If nobody takes part, w stays.

    Args:
      server: pytree of [1, ...], w.
      step_size: of the server, 0 or more.

    Raises:
      InputError: if the step size is no such number; by the aggregator, if a leaf of w
        is not one row of the models.
    """
    arrays.check_weights("step_size", jnp.asarray(step_size))

    def attend(w, x, weights):
        distance = jnp.sum(jnp.abs(x - w).reshape(len(x), -1), axis=1)
        distance = jnp.where(weights > 0, distance, -jnp.inf)
        moved = w + step_size * (_product(jax.nn.softmax(distance)[None], x) - w)
        return jnp.where(jnp.any(weights > 0), moved, w)

    def aggregate(stacked, cohort):
        check_cohort(stacked, cohort)
        for w, x in zip(*map(jax.tree.leaves, (server, stacked)), strict=True):
            arrays.check_shape("a leaf of server", w, (1, *x.shape[1:]))
        return jax.tree.map(lambda w, x: attend(w, x, cohort.weights), server, stacked)

    return aggregate


def graph_convolution(
    adjacency: jax.Array, num_steps: int = 3, alpha: float = 1.0
) -> Aggregator:
    """u = alpha A^m V + (1 - alpha) V: one product with a [C, C] matrix a leaf.

    SFL, Algorithm 1, lines 11 and 12 (Chen, Long, Wu, Zhou, Jiang, IJCAI 2022).

    Args:
      adjacency: [K, K], non-negative, [i, j] = what client i takes from client j. The
        rows of a cohort are normalised to sum 1; one without any keeps its own model.
      num_steps: m.
      alpha: share of what was mixed.

    Raises:
      InputError: if `num_steps` is no count or `alpha` no share; by the aggregator,
        see `cohort_adjacency`.
    """
    arrays.check_count("num_steps", num_steps, 0)
    arrays.check_share("alpha", alpha)

    def aggregate(stacked, cohort):
        check_cohort(stacked, cohort)
        rows = graphs.row_normalise(cohort_adjacency(adjacency, cohort))
        with jax.default_matmul_precision("highest"):
            steps = jnp.linalg.matrix_power(rows, num_steps)
        mixing = alpha * steps + (1 - alpha) * jnp.eye(len(steps))
        return jax.tree.map(lambda x: _mix(mixing, x), stacked)

    return aggregate


def mix_rows(stacked: Stacked, weights: jax.Array) -> Stacked:
    """Row i of the result is the mean of all models by the weights [i]: A V.

    Args:
      stacked: V, pytree of [C, ...].
      weights: [C, C], not negative; rows are normalised to sum 1, and one of zeros
        keeps its own model.

    Raises:
      InputError: if the weights are not [C, C].
    """
    _check_rows(stacked, len(weights))
    rows = graphs.row_normalise(weights)
    return jax.tree.map(lambda x: _mix(rows, x), stacked)


def cohort_adjacency(adjacency: jax.Array, cohort: Cohort) -> jax.Array:
    """The [C, C] part of a [K, K] adjacency; nobody takes from a client of weight 0.

    Raises:
      InputError: if the adjacency is not square, or has fewer rows than the cohort, or
        values that are known are negative, not finite, or indices of no rows.
    """
    shape, cohort_size = jnp.shape(adjacency), len(cohort.indices)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < cohort_size:
        raise InputError(
            f"adjacency has shape {shape}, expected a square of the clients, of which "
            f"{cohort_size} take part"
        )
    arrays.check_weights("adjacency", adjacency)
    arrays.check_indices("cohort.indices", cohort.indices, shape[0], "adjacency")
    part = jnp.asarray(adjacency)[cohort.indices][:, cohort.indices]
    return part * (cohort.weights > 0)


def with_noise(aggregate: Aggregator, key: jax.Array, scale: float) -> Aggregator:
    """Adds normal noise of standard deviation `scale` to every number of the result.

    Raises:
      InputError: if the scale is negative or not finite.
    """
    arrays.check_weights("scale", scale)
    if not scale:
        return aggregate

    def add(x, key):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x  # a count
        return x + scale * jax.random.normal(key, x.shape, x.dtype)

    def noisy(stacked, cohort):
        leaves, structure = jax.tree.flatten(aggregate(stacked, cohort))
        keys = jax.random.split(key, len(leaves))
        leaves = [add(x, own) for x, own in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(structure, leaves)

    return noisy


def partial(aggregate: Aggregator, is_personal: IsPersonal) -> Aggregator:
    """Leaves that are personal stay as they are, `aggregate` sees the others."""

    def aggregate_shared(stacked, cohort):
        shared, personal = partition(stacked, is_personal)
        if not jax.tree.leaves(shared):
            return stacked
        return combine(checked(shared, aggregate(shared, cohort)), personal)

    return aggregate_shared


def checked(stacked: Stacked, merged: Any) -> Any:
    """Checks what an aggregator returned, and gives its leaves the models' types.

    A mean of counts, which is taken in float32 and exact below 2^24, is rounded to the
    nearest one, halves to the even one.

    Args:
      stacked: what it was given, leaves [C, ...].
      merged: its result.

    Returns:
      `merged`, of the types of `stacked`.

    Raises:
      InputError: if that is another tree, a leaf is neither [1, ...] nor [C, ...], or
        it is known that a mean of counts is not finite.
    """
    given, found = jax.tree.structure(stacked), jax.tree.structure(merged)
    if given != found:
        raise InputError(
            f"aggregator returned the structure {_in_line(found)}, expected that of "
            f"the models, {_in_line(given)}"
        )
    for x, new in zip(jax.tree.leaves(stacked), jax.tree.leaves(merged), strict=True):
        one = (1, *x.shape[1:])
        if jnp.shape(new) not in (one, x.shape):
            raise InputError(
                f"aggregator returned shape {jnp.shape(new)} for a leaf {x.shape}: "
                f"expected {one} or {x.shape}"
            )
    return jax.tree.map(_in_type_of, merged, stacked)


def _in_type_of(new: Any, x: jax.Array) -> jax.Array:
    new = jnp.asarray(new)
    if new.dtype == x.dtype:
        return new
    is_real = jnp.issubdtype(new.dtype, jnp.floating)
    if is_real and not jnp.issubdtype(x.dtype, jnp.inexact):
        faults.refuse(~jnp.all(jnp.isfinite(new)), "a mean of counts is not finite")
        new = jnp.round(new)
    return new.astype(x.dtype)


def _in_line(structure: Any) -> str:
    return " ".join(str(structure).removeprefix("PyTreeDef").split())


def broadcast(stacked: Stacked, num_clients: int) -> Stacked:
    """Gives each of `num_clients` a row: `[1 or C, ...]` -> `[C, ...]`."""
    return jax.tree.map(
        lambda x: jnp.broadcast_to(x, (num_clients, *x.shape[1:])), stacked
    )


def num_models(stacked: Stacked) -> int:
    """The largest leading size: 1 (one model for all) or the number of clients."""
    return max(x.shape[0] for x in jax.tree.leaves(stacked))


def check_common(models: Any, method: str) -> None:
    """Checks that an aggregator gave one model for all clients, not one for each.

    Args:
      models: leaves [1 or K, ...], without what clients keep.
      method: that needs one, for messages.

    Raises:
      InputError: if a leaf has more rows than one.
    """
    if any(len(x) > 1 for x in jax.tree.leaves(models)):
        raise InputError(
            f"{method}: the aggregator returns a model for each client; expected one "
            "for all"
        )


def initial(aggregate: Aggregator, stacked: Stacked, num_clients: int) -> Stacked:
    """Everybody's first model, [1, ...], with the rows that `aggregate` will return."""
    everybody = Cohort(jnp.arange(num_clients), jnp.ones(num_clients))
    merged = jax.eval_shape(aggregate, broadcast(stacked, num_clients), everybody)
    return jax.tree.map(lambda x, new: jnp.broadcast_to(x, new.shape), stacked, merged)


def _product(weights: jax.Array, x: jax.Array) -> jax.Array:
    """[..., C] times [C, ...], summed in float32 whatever the models' precision."""
    total = jnp.tensordot(weights, x, axes=1, precision=jax.lax.Precision.HIGHEST)
    return total.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else total


def _mix(mixing: jax.Array, x: jax.Array) -> jax.Array:
    """[C, C] times [C, ...]; devices share out the columns, each by all rows."""

    def product(matrix, mixing):
        return _product(mixing, matrix)

    mixed = sharding.map_columns(product)(x.reshape(len(x), -1), mixing)
    return mixed.reshape(x.shape)
