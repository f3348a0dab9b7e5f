"""Aggregators against NumPy, and the properties that every mean has."""

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph import aggregation
from fedjax_graph.clients import Cohort


def stacked_params(num_clients, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (3, 2), "bias": (2,), "scale": ()}
    return {
        name: rng.normal(size=(num_clients, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


finite = st.floats(-1e3, 1e3, width=32)
clients_and_weights = st.integers(1, 6).flatmap(
    lambda num: st.tuples(
        arrays.arrays(np.float32, (num, 3), elements=finite),
        arrays.arrays(np.float32, num, elements=st.integers(0, 1000)),
    )
)


def cohort_of(weights):
    return Cohort(np.arange(len(weights)), jnp.asarray(weights))


@hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
@hypothesis.given(clients_and_weights)
def test_the_weighted_mean_is_that_of_numpy_and_convex(case):
    values, weights = case
    hypothesis.assume(weights.sum() > 0)
    (mean,) = np.asarray(aggregation.weighted_mean(values, cohort_of(weights)))
    npt.assert_allclose(
        mean, np.average(values, axis=0, weights=weights), rtol=1e-5, atol=1e-3
    )
    counted = values[weights > 0]
    rounding = 1e-5 * np.abs(counted).max() + 1e-30
    assert np.all(mean <= counted.max(0) + rounding)
    assert np.all(mean >= counted.min(0) - rounding)


def test_the_weighted_mean_keeps_the_tree_and_adds_a_leading_axis_of_one():
    stacked, weights = stacked_params(4), np.array([1, 2, 0, 5], np.float32)
    merged = aggregation.weighted_mean(stacked, cohort_of(weights))
    assert jax.tree.structure(merged) == jax.tree.structure(stacked)
    for name, value in stacked.items():
        expected = sum(w * row for w, row in zip(weights, value, strict=True)) / 8
        assert merged[name].shape == (1, *value.shape[1:])
        npt.assert_allclose(merged[name][0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [[3, 1, 0], [0, 2, 5], [0, 0, 1]])
def test_clients_of_weight_zero_change_nothing(weights):
    weights = np.array(weights, np.float32)
    stacked = stacked_params(3)
    altered = {
        name: np.where(weights.reshape(-1, *[1] * (x.ndim - 1)) == 0, 1e6, x)
        for name, x in stacked.items()
    }
    merged = aggregation.weighted_mean(stacked, cohort_of(weights))
    with_altered = aggregation.weighted_mean(altered, cohort_of(weights))
    for name in stacked:
        npt.assert_array_equal(merged[name], with_altered[name])


def test_the_order_of_clients_does_not_matter():
    stacked, weights = stacked_params(4), np.array([1, 2, 3, 4], np.float32)
    order = np.array([2, 0, 3, 1])
    permuted = {name: x[order] for name, x in stacked.items()}
    merged = aggregation.weighted_mean(stacked, cohort_of(weights))
    of_permuted = aggregation.weighted_mean(permuted, cohort_of(weights[order]))
    for name in stacked:
        npt.assert_allclose(merged[name], of_permuted[name], atol=1e-6)


def test_none_is_the_identity():
    stacked = stacked_params(3)
    kept = aggregation.none(stacked, cohort_of([0.0, 1, 2]))
    for name in stacked:
        npt.assert_array_equal(kept[name], stacked[name])


@pytest.mark.parametrize("rows", [1, 4])
def test_broadcast_gives_each_client_a_row(rows):
    stacked = stacked_params(rows)
    everybody = aggregation.broadcast(stacked, 4)
    assert aggregation.num_models(stacked) == rows
    assert aggregation.num_models(everybody) == 4
    for name, value in stacked.items():
        for client in range(4):
            npt.assert_array_equal(everybody[name][client], value[client % rows])


@pytest.mark.parametrize(
    "aggregate, rows", [(aggregation.weighted_mean, 1), (aggregation.none, 4)]
)
def test_initial_has_as_many_rows_as_the_aggregator_returns(aggregate, rows):
    params = stacked_params(1)
    first = aggregation.initial(aggregate, params, 4)
    assert aggregation.num_models(first) == rows
    for name, value in params.items():
        npt.assert_array_equal(first[name], np.concatenate([value] * rows))
