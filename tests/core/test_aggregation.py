"""Aggregators against NumPy, and the properties that every mean has."""

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import aggregation, aggregators, graphs, trees
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.errors import InputError


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


@pytest.mark.parametrize("weights", [[3, 1, 2, 5], [4, 1, 0, 2], [0, 0, 7, 0]])
def test_the_median_is_that_of_numpy_over_who_takes_part(weights):
    weights = np.array(weights, np.float32)
    stacked = stacked_params(4)
    for x in stacked.values():
        x[weights == 0] = np.nan
    merged = aggregation.median(stacked, cohort_of(weights))
    for name, x in stacked.items():
        expected = np.median(x[weights > 0], axis=0, keepdims=True)
        npt.assert_allclose(merged[name], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "aggregate, expected",
    [
        (aggregation.weighted_mean, 0),
        (aggregation.median, 0),
        (aggregation.attention({"w": np.full((1, 2), 5.0)}), 5),
        (lambda x, cohort: aggregation.client_mean(x, cohort.weights), 0),
    ],
)
def test_nobodys_mean_is_zero_or_what_there_was(aggregate, expected):
    models = {"w": np.ones((3, 2), np.float32)}
    merged = aggregate(models, cohort_of(np.zeros(3, np.float32)))
    npt.assert_array_equal(merged["w"], np.broadcast_to(expected, merged["w"].shape))


def test_aggregators_have_names():
    assert aggregators.AGGREGATORS.look_up("weighted_mean") is aggregation.weighted_mean
    assert aggregators.AGGREGATORS.look_up("median") is aggregation.median


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


# --- Attention, graphs, noise ---------------------------------------------------------


@pytest.mark.parametrize("step_size", [1.0, 0.3])
def test_attention_is_a_softmax_of_distances_layer_by_layer(step_size):
    server, stacked = stacked_params(1, seed=1), stacked_params(4)
    weights = np.array([3, 1, 0, 7])  # how many does not count, only whether
    merged = aggregation.attention(server, step_size)(stacked, cohort_of(weights))
    for name, rows in stacked.items():
        w, rows = server[name][0].astype(float), rows[weights > 0]
        scores = [np.exp(np.abs(w - row).sum()) for row in rows]
        moves = [a * (row - w) for a, row in zip(scores, rows, strict=True)]
        expected = w + step_size * np.sum(moves, axis=0) / np.sum(scores)
        assert merged[name].shape == (1, *w.shape)
        npt.assert_allclose(merged[name][0], expected, rtol=1e-5, atol=1e-6)


def test_attention_to_distant_clients_is_finite():
    far = {"w": jnp.array([[0.0], [1e4], [2e4]])}
    merged = aggregation.attention({"w": jnp.zeros((1, 1))})(far, cohort_of([1, 1, 1]))
    npt.assert_allclose(merged["w"], [[2e4]])


def random_adjacency(num_clients=5):
    rng = np.random.default_rng(3)
    adjacency = rng.uniform(0.1, 1, (num_clients, num_clients)).astype(np.float32)
    adjacency[rng.random(adjacency.shape) < 0.4] = 0
    adjacency[2] = 0  # takes nothing, not even from itself
    return adjacency


def convolved(adjacency, rows, num_steps, alpha, indices):
    """u = alpha A^m V + (1 - alpha) V in NumPy, A the cohort's with rows of sum 1."""
    A = adjacency[np.ix_(indices, indices)].astype(float)
    for i, row in enumerate(A):
        A[i] = row / row.sum() if row.any() else np.eye(len(A))[i]
    V = rows.reshape(len(rows), -1).astype(float)
    U = alpha * np.linalg.matrix_power(A, num_steps) @ V + (1 - alpha) * V
    return U.reshape(rows.shape)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("alpha", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("indices", [[0, 1, 2, 3, 4], [0, 2, 3]])
def test_a_graph_convolution_is_a_power_of_the_cohorts_graph(num_steps, alpha, indices):
    adjacency, stacked = random_adjacency(), stacked_params(len(indices))
    cohort = Cohort(jnp.array(indices), jnp.ones(len(indices)))
    aggregate = aggregation.graph_convolution(adjacency, num_steps, alpha)
    merged = aggregate(stacked, cohort)
    for name, rows in stacked.items():
        expected = convolved(adjacency, rows, num_steps, alpha, indices)
        npt.assert_allclose(merged[name], expected, rtol=1e-5, atol=1e-5)
    alone = aggregate({"kernel": stacked["kernel"]}, cohort)  # as one of several leaves
    npt.assert_array_equal(alone["kernel"], merged["kernel"])


def test_a_graph_convolution_is_one_product_for_each_leaf():
    """The power is of a [C, C] matrix: products with V do not grow with m or C."""

    def products(num_clients, num_steps):
        aggregate = aggregation.graph_convolution(
            jnp.ones((num_clients, num_clients)), num_steps
        )
        cohort = Cohort(jnp.arange(num_clients), jnp.ones(num_clients))
        stacked = {name: jnp.ones((num_clients, 7, 3)) for name in ("a", "b")}
        program = str(jax.make_jaxpr(aggregate)(stacked, cohort))
        lines = [line for line in program.splitlines() if "dot_general" in line]
        return sum(f"f32[{num_clients},7,3]" in x or "21]" in x for x in lines)

    assert products(5, 1) == products(5, 3) == products(40, 7) == 2


def test_from_clients_of_weight_zero_nothing_is_taken():
    adjacency, weights = random_adjacency(), np.array([1, 0, 2, 3, 0])
    real = np.flatnonzero(weights)
    stacked = stacked_params(5)
    merged = aggregation.graph_convolution(adjacency)(stacked, cohort_of(weights))
    for name, rows in stacked.items():
        expected = convolved(adjacency, rows[real], 3, 1.0, real)
        npt.assert_allclose(merged[name][real], expected, rtol=1e-5, atol=1e-5)


def test_the_adjacency_of_a_cohort_is_its_rows_and_columns():
    adjacency = random_adjacency()
    cohort = Cohort(jnp.array([1, 3, 4]), jnp.array([2.0, 0.0, 1.0]))
    part = np.asarray(aggregation.cohort_adjacency(jnp.asarray(adjacency), cohort))
    npt.assert_array_equal(part[:, [0, 2]], adjacency[np.ix_([1, 3, 4], [1, 4])])
    npt.assert_array_equal(part[:, 1], 0)


def test_a_uniform_graph_is_the_mean():
    graph = graphs.from_adjacency(np.ones((4, 4), np.float32))
    stacked, everybody = stacked_params(4), cohort_of([1.0] * 4)
    for num_steps in (1, 3):
        mixed = aggregation.graph_convolution(graphs.dense_adjacency(graph), num_steps)(
            stacked, everybody
        )
        mean = aggregation.weighted_mean(stacked, everybody)
        for name in stacked:
            expected = np.concatenate([mean[name]] * 4)
            npt.assert_allclose(mixed[name], expected, atol=1e-6)


def test_noise_is_normal_and_apart_for_each_leaf_and_key():
    stacked = {"a": np.zeros((2, 3000), np.float32), "b": np.ones((2, 3000), "f")}
    cohort = cohort_of([1.0, 3.0])

    def drawn(seed, scale=0.01):
        aggregate = aggregation.with_noise(
            aggregation.weighted_mean, jax.random.key(seed), scale
        )
        merged = aggregate(stacked, cohort)
        return np.stack([merged["a"][0], merged["b"][0] - 1]) / 0.01

    noise = np.concatenate([drawn(0), drawn(1)])
    npt.assert_allclose(noise.mean(axis=1), 0, atol=0.08)  # four standard errors
    npt.assert_allclose(noise.std(axis=1), 1, atol=0.06)
    correlation = np.corrcoef(noise) - np.eye(4)
    assert np.abs(correlation).max() < 0.08
    assert np.mean(np.abs(noise) < 1) == pytest.approx(0.683, abs=0.02)
    npt.assert_array_equal(drawn(0), drawn(0))
    npt.assert_allclose(drawn(0, scale=0.03), 3 * drawn(0), rtol=1e-3, atol=1e-3)


def test_without_noise_the_aggregator_is_itself():
    aggregate = aggregation.with_noise(aggregation.none, jax.random.key(0), 0.0)
    assert aggregate is aggregation.none


# --- Part of a model ------------------------------------------------------------------

TREE = {"params": {"head": 1, "base": {"kernel": 2}}, "batch_stats": {"head": 3}}


def is_head(path):
    return path[0].key == "params" and path[1].key == "head"


def test_split_takes_apart_what_join_puts_together():
    shared, personal = trees.partition(TREE, is_head)
    assert jax.tree.leaves(shared) == [3, 2]
    assert jax.tree.leaves(personal) == [1]
    assert trees.combine(shared, personal) == TREE
    for is_personal in (lambda path: True, lambda path: False):
        assert trees.combine(*trees.partition(TREE, is_personal)) == TREE


def test_a_partial_aggregator_sees_the_shared_leaves_alone():
    stacked, cohort = stacked_params(4), cohort_of([1.0, 2, 0, 5])
    seen = []

    def mean(shared, cohort):
        seen.append(sorted(name for name, x in shared.items() if x is not None))
        return aggregation.weighted_mean(shared, cohort)

    merged = aggregation.partial(mean, lambda path: path[0].key == "bias")(
        stacked, cohort
    )
    assert seen == [["kernel", "scale"]]
    whole = aggregation.weighted_mean(stacked, cohort)
    for name, expected in (whole | {"bias": stacked["bias"]}).items():
        npt.assert_array_equal(merged[name], expected)


def test_the_client_mean_counts_real_clients_once():
    stacked, weights = stacked_params(4), np.array([1, 20, 0, 5], np.float32)
    mean = aggregation.client_mean(stacked, weights)
    for name, rows in stacked.items():
        expected = rows[[0, 1, 3]].astype(float).mean(axis=0)
        assert mean[name].shape == rows.shape[1:]
        npt.assert_allclose(mean[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 4), (2, 2), (4,), (4, 4, 1)])
def test_an_adjacency_that_does_not_fit_is_refused(shape):
    cohort, stacked = cohort_of(np.ones(3)), stacked_params(3)
    aggregate = aggregation.graph_convolution(jnp.ones(shape))
    for call in (jax.eval_shape, lambda f, *args: f(*args)):
        with pytest.raises(InputError) as raised:
            call(aggregate, stacked, cohort)
        assert str(raised.value) == (
            f"adjacency has shape {shape}, expected a square of the clients, of which "
            "3 take part"
        )


def test_noise_is_no_part_of_counts():
    stacked = {"w": jnp.ones((3, 2)), "counts": jnp.arange(3)[:, None]}
    noisy = aggregation.with_noise(aggregation.none, jax.random.key(0), 1.0)
    found = noisy(stacked, cohort_of([1, 1, 1]))
    npt.assert_array_equal(found["counts"], stacked["counts"])
    assert not np.any(found["w"] == 1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_models_keep_their_precision(dtype):
    rows = np.random.default_rng(0).normal(size=(3, 4))
    stacked = {"w": jnp.asarray(rows, dtype)}
    for aggregate in (aggregation.weighted_mean, aggregation.median):
        merged = aggregate(stacked, cohort_of([1, 2, 5]))
        assert merged["w"].dtype == dtype
    mean = np.average(np.asarray(stacked["w"], float), axis=0, weights=[1, 2, 5])
    found = aggregation.weighted_mean(stacked, cohort_of([1, 2, 5]))["w"][0]
    npt.assert_allclose(np.asarray(found, float), mean, rtol=0.01, atol=0.01)
