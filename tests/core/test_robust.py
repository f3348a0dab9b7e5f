"""Robust aggregators against loops in NumPy over clients and coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
import scipy.optimize

from fedjax_graph.core import aggregation, aggregators, robust
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError
from tests import tables

NAMES = ("geometric_median", "krum", "median", "multi_krum", "trimmed_mean")
WEIGHTS = [3, 1, 0, 5, 2, 0, 4, 1, 1]  # seven take part


def stacked_params(num_clients, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (3, 2), "bias": (2,), "scale": ()}
    return {
        name: rng.normal(size=(num_clients, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def cohort_of(weights):
    return Cohort(jnp.arange(len(weights)), jnp.asarray(weights, jnp.float32))


def as_rows(stacked):
    """[C, P] doubles."""
    leaves = jax.tree.leaves(stacked)
    return np.hstack([np.asarray(x, float).reshape(len(x), -1) for x in leaves])


def trimmed_mean_of(rows, tolerance):
    num_trimmed = int(tolerance * len(rows) + 1e-9)
    columns = [sorted(column)[num_trimmed:] for column in rows.T]
    return [np.mean(c[: len(c) - num_trimmed]) for c in columns]


def krum_order(rows, tolerance):
    """Clients from the best score to the worst."""
    num_near = max(len(rows) - int(tolerance * len(rows) + 1e-9) - 2, 1)
    scores = []
    for i, row in enumerate(rows):
        others = [np.sum((row - x) ** 2) for j, x in enumerate(rows) if j != i]
        scores.append(sum(sorted(others)[:num_near]))
    return np.argsort(scores, kind="stable")


def krum_of(rows, tolerance):
    return rows[krum_order(rows, tolerance)[0]]


def multi_krum_of(rows, tolerance):
    num_kept = len(rows) - int(tolerance * len(rows) + 1e-9)
    return np.mean(rows[krum_order(rows, tolerance)[:num_kept]], axis=0)


LOOPS = {
    robust.trimmed_mean: trimmed_mean_of,
    robust.krum: krum_of,
    robust.multi_krum: multi_krum_of,
}


@pytest.mark.parametrize("tolerance", [0.0, 0.2, 0.3, 0.45])
@pytest.mark.parametrize("aggregate", LOOPS)
def test_those_that_are_told_how_many_to_withstand_are_loops(aggregate, tolerance):
    stacked = stacked_params(len(WEIGHTS))
    rows = as_rows(stacked)[np.array(WEIGHTS) > 0]
    merged = aggregate(stacked, cohort_of(WEIGHTS), tolerance)
    expected = LOOPS[aggregate](rows, tolerance)
    npt.assert_allclose(as_rows(merged)[0], expected, rtol=1e-5, atol=1e-6)
    assert {x.shape[0] for x in jax.tree.leaves(merged)} == {1}


def test_the_geometric_median_has_the_least_sum_of_distances():
    stacked = stacked_params(len(WEIGHTS))
    rows = as_rows(stacked)[np.array(WEIGHTS) > 0]

    def total(x):
        return np.sum(np.linalg.norm(rows - x, axis=1))

    merged = as_rows(robust.geometric_median(stacked, cohort_of(WEIGHTS)))[0]
    best = scipy.optimize.minimize(total, rows.mean(axis=0), tol=1e-10)
    assert total(merged) <= best.fun * (1 + 1e-5)


def test_where_most_models_are_equal_that_is_the_geometric_median():
    values = {"w": np.array([[1.0, 2], [1, 2], [1, 2], [7, -5], [9, 0]], np.float32)}
    merged = robust.geometric_median(values, cohort_of([1] * 5))
    npt.assert_allclose(merged["w"], [[1, 2]], atol=1e-4)


@pytest.mark.parametrize("large", [1e30, np.inf])
def test_krum_takes_a_model_that_came_where_no_distance_is_finite(large):
    """Not that of a client which sent nothing, as a model of zeros."""
    values = {"w": np.array([[9.0], [1], [large]], np.float32)}
    cohort = cohort_of([0, 1, 1])
    assert robust.krum(values, cohort)["w"].tolist() == [[1]]


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing_whatever_it_holds(name, quick_jit):
    aggregate = quick_jit(aggregators.AGGREGATORS.look_up(name))
    real = np.array(WEIGHTS) > 0
    stacked = stacked_params(len(WEIGHTS))
    alone = aggregate(
        jax.tree.map(lambda x: x[real], stacked), cohort_of(np.array(WEIGHTS)[real])
    )
    for x in stacked.values():
        x[~real] = np.nan
    padded = aggregate(stacked, cohort_of(WEIGHTS))
    npt.assert_allclose(as_rows(padded), as_rows(alone), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("taking_part", [0, 1, 2])
def test_of_few_it_is_their_mean_and_of_nobody_zero(name, taking_part):
    """Krum chooses one of two."""
    weights = [1] * taking_part + [0] * (3 - taking_part)
    values = {"w": np.array([[1.0, 2], [3, 4], [9, 9]], np.float32)}
    merged = aggregators.AGGREGATORS.look_up(name)(values, cohort_of(weights))
    expected = {0: [0, 0], 1: [1, 2], 2: [1, 2] if name == "krum" else [2, 3]}
    npt.assert_allclose(merged["w"], [expected[taking_part]], atol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, "weighted_mean"])
def test_a_minority_moves_the_mean_alone(name):
    rng = np.random.default_rng(1)
    honest = rng.normal(3, 0.1, (8, 4)).astype(np.float32)
    values = {"w": np.concatenate([honest, np.full((2, 4), -1e4, np.float32)])}
    aggregate = aggregators.named(name, 0.2)
    merged = np.asarray(aggregate(values, cohort_of([1] * 10))["w"])
    assert (np.abs(merged - 3).max() < 0.3) == (name != "weighted_mean")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e20, -3e38])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_minority_sends_the_model_is_near_the_others(name, value):
    rng = np.random.default_rng(1)
    honest = rng.normal(3, 0.1, (8, 4)).astype(np.float32)
    values = {"w": np.concatenate([np.full((2, 4), value, np.float32), honest])}
    aggregate = aggregators.named(name, 0.2)
    merged = np.asarray(aggregate(values, cohort_of([1] * 10))["w"])
    assert np.abs(merged - 3).max() < 0.3


def test_only_those_that_ask_are_told():
    assert aggregators.named("median", 0.4) is aggregation.median
    told = aggregators.named("krum", 0.4)
    assert told.keywords == {"tolerance": 0.4}
    asking = [name for name in NAMES if aggregators.takes_tolerance(name)]
    assert sorted(asking) == ["krum", "multi_krum", "trimmed_mean"]
    assert set(asking) == set(aggregators.tolerant_names().split(", "))
    aggregators.NamedAggregator(aggregator="krum", tolerance=0.4)
    with pytest.raises(InputError, match="tolerance=0.4: aggregator='median' takes no"):
        aggregators.NamedAggregator(aggregator="median", tolerance=0.4)


def test_an_aggregator_of_ones_own_may_ask_too():
    def own(stacked, cohort, tolerance=0.1):
        return jax.tree.map(lambda x: x[:1] * tolerance, stacked)

    with tables.kept():
        aggregators.register_aggregator("own", own)
        config = aggregators.NamedAggregator(aggregator="own", tolerance=0.25)
        merged = config.named_aggregator()(
            {"w": jnp.full((3, 2), 4.0)}, cohort_of([1] * 3)
        )
        plain = aggregators.named("own")
        aggregators.register_aggregator("builtin", dict.fromkeys)
        assert not aggregators.takes_tolerance("builtin")
    npt.assert_array_equal(merged["w"], np.ones((1, 2)))
    assert plain is own  # whose default is its own


def test_an_aggregator_that_has_no_tolerance_of_its_own_is_told_the_librarys():
    def own(stacked, cohort, tolerance):
        return tolerance

    with tables.kept():
        aggregators.register_aggregator("own", own)
        told = aggregators.named("own"), aggregators.named("own", 0.3)
    assert [aggregate({}, None) for aggregate in told] == [aggregators.TOLERANCE, 0.3]


@pytest.mark.parametrize("tolerance", [0.5, -0.1, float("nan")])
def test_a_majority_is_not_withstood(tolerance):
    with pytest.raises(InputError, match="tolerance"):
        robust.krum(stacked_params(4), cohort_of([1] * 4), tolerance)


@pytest.mark.parametrize("num_clients", [1, 2, 4, 10])
@pytest.mark.parametrize("tolerance", [0.4999, 0.499999])
def test_a_minority_is_never_everybody(num_clients, tolerance):
    """Rounding may not make floor(tolerance n) half of the clients: none is left."""
    stacked = {"w": jnp.full((num_clients, 2), 5.0)}
    for aggregate in (robust.trimmed_mean, robust.krum, robust.multi_krum):
        merged = aggregate(stacked, cohort_of([1] * num_clients), tolerance=tolerance)
        npt.assert_allclose(merged["w"], [[5, 5]])
