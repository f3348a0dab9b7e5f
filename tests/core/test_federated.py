"""Rounds of local updates and averages against loops over clients."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import aggregation, aggregators, clients, faults
from fedjax_graph.core.algorithm import NO_LOSS
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import federated_round

IDS = np.array([3, 1, 4, 15, 9])
WEIGHTS = np.array([2.0, 1, 5, 3, 4], np.float32)
READINGS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
AGGREGATORS = {"weighted_mean": aggregation.weighted_mean, "none": aggregation.none}


def drift(params, client, key):
    """A toy update: towards the client's readings, with noise of its own."""
    noise = jax.random.normal(key, (3,))
    return {"w": 0.5 * params["w"] + client["x"] + noise}, jnp.sum(client["x"])


def drift_of(row, index, key, ids=IDS, readings=READINGS):
    noise = np.asarray(jax.random.normal(jax.random.fold_in(key, ids[index]), (3,)))
    return 0.5 * row + readings[index] + noise


def cohort_of(key, participation, ids=IDS, weights=WEIGHTS):
    """Places of the clients that take part, and the key of their updates."""
    cohort_key, update_key = jax.random.split(key)
    indices, _ = clients.sample_cohort(cohort_key, ids, weights, participation)
    return np.asarray(indices), update_key


def toy_round(key, rows=1, readings=READINGS, ids=IDS, weights=WEIGHTS, **settings):
    start = {"w": jnp.arange(3.0 * rows).reshape(rows, 3)}
    aggregate = AGGREGATORS[settings.pop("aggregate", "weighted_mean")]
    round_ = federated_round(drift, aggregate, **settings)
    params, loss = round_(start, {"x": jnp.asarray(readings)}, ids, weights, key)
    return np.asarray(params["w"]), float(loss)


def test_one_model_becomes_a_row_for_each_client_that_keeps_its_own():
    """Who does not take part keeps the one that all began with."""
    key = jax.random.key(2)
    rows, _ = toy_round(key, aggregate="none", participation=0.4)
    cohort, update_key = cohort_of(key, 0.4)
    expected = np.tile(np.arange(3.0), (5, 1))
    for k in cohort:
        expected[k] = drift_of(expected[k], k, update_key)
    npt.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("participation", [1.0, 0.4])
@pytest.mark.parametrize("aggregate", AGGREGATORS)
@pytest.mark.parametrize("clients_per_chunk", [None, 1, 2])
def test_a_round_is_a_loop_over_the_cohort(participation, aggregate, clients_per_chunk):
    key, rows = jax.random.key(2), 1 if aggregate == "weighted_mean" else 5
    params, loss = toy_round(
        key,
        rows,
        aggregate=aggregate,
        participation=participation,
        clients_per_chunk=clients_per_chunk,
    )
    start = np.arange(3.0 * rows).reshape(rows, 3)
    cohort, update_key = cohort_of(key, participation)
    assert len(cohort) == (5 if participation == 1 else 2)
    moved = {k: drift_of(start[k % rows], k, update_key) for k in cohort}
    weights = WEIGHTS[cohort]
    if rows == 1:
        mean = np.average(list(moved.values()), axis=0, weights=weights)
        npt.assert_allclose(params, mean[None], atol=1e-6)
    else:
        for client in range(5):
            expected = moved.get(client, start[client])
            npt.assert_allclose(params[client], expected, atol=1e-6)
    npt.assert_allclose(
        loss, np.average(READINGS[cohort].sum(1), weights=weights), rtol=1e-5
    )


@pytest.mark.parametrize("aggregate, rows", [("weighted_mean", 1), ("none", 5)])
@pytest.mark.parametrize("seed", range(3))
def test_only_sampled_clients_count(seed, aggregate, rows):
    key = jax.random.key(seed)
    settings = {"rows": rows, "aggregate": aggregate, "participation": 0.4}
    params, loss = toy_round(key, **settings)
    cohort, _ = cohort_of(key, 0.4)
    for client in range(5):
        altered = READINGS.copy()
        altered[client] += 7
        new_params, new_loss = toy_round(key, readings=altered, **settings)
        is_same = np.array_equal(params, new_params) and loss == new_loss
        assert is_same == (client not in cohort)


def test_a_round_keeps_the_types_of_the_models():
    """Counts too, whose mean is rounded, so that rounds can be scanned."""
    counts = jnp.array([1, 2, 2, 9, 9], jnp.int32)
    stacked = {"w": jnp.ones((5, 3), jnp.bfloat16), "n": counts}
    cohort = clients.Cohort(jnp.arange(5), jnp.array([1.0, 1, 1, 0, 0]))
    for name in ("weighted_mean", "median", "trimmed_mean", "geometric_median"):
        merged = aggregators.AGGREGATORS.look_up(name)(stacked, cohort)
        found = aggregation.checked(stacked, merged)
        types = {key: x.dtype for key, x in found.items()}
        assert types == {"w": jnp.bfloat16, "n": jnp.int32}
        assert found["n"][0] == 2  # of 5 / 3


def test_a_mean_of_counts_that_is_no_number_is_refused():
    counts = {"n": jnp.array([1, 2], jnp.int32)}
    with pytest.raises(InputError, match="a mean of counts is not finite"):
        aggregation.checked(counts, {"n": jnp.array([jnp.nan])})
    kept = aggregation.checked(counts, {"n": np.array([True])})
    assert kept["n"].dtype == jnp.int32 and kept["n"][0] == 1
    keys = {"key": jax.random.split(jax.random.key(0), 2)}
    one = jax.tree.map(lambda x: x[:1], keys)
    assert aggregation.checked(keys, one)["key"] is one["key"]


@pytest.mark.parametrize(
    "aggregate, message",
    [
        (
            lambda stacked, cohort: {"w": jnp.mean(stacked["w"], axis=0)},
            "aggregator returned shape (3,) for a leaf (5, 3): expected (1, 3) or "
            "(5, 3)",
        ),
        (
            lambda stacked, cohort: {"w": stacked["w"][:2]},
            "aggregator returned shape (2, 3) for a leaf (5, 3): expected (1, 3) or "
            "(5, 3)",
        ),
        (
            lambda stacked, cohort: (stacked["w"],),
            "aggregator returned the structure ((*,)), expected that of the models, "
            "({'w': *})",
        ),
    ],
)
def test_an_aggregators_wrong_result_is_one_line(aggregate, message):
    start, data = {"w": jnp.zeros((1, 3))}, {"x": jnp.asarray(READINGS)}
    round_ = federated_round(drift, aggregate)
    with pytest.raises(InputError) as raised:
        jax.eval_shape(round_, start, data, IDS, WEIGHTS, jax.random.key(0))
    assert str(raised.value) == message
    first = aggregation.partial(aggregate, lambda path: False)
    with pytest.raises(InputError) as raised:
        aggregation.initial(first, start, len(IDS))
    assert str(raised.value) == message


def test_cohorts_change_from_round_to_round():
    drawn = {tuple(cohort_of(jax.random.key(s), 0.4)[0]) for s in range(20)}
    assert len(drawn) > 3


@pytest.mark.parametrize("participation", [1.0, 0.4])
@pytest.mark.parametrize("aggregate, rows", [("weighted_mean", 1), ("none", 5)])
def test_the_order_of_clients_does_not_matter(participation, aggregate, rows):
    order, key = np.array([4, 2, 0, 1, 3]), jax.random.key(7)
    settings = {"aggregate": aggregate, "participation": participation}
    start = {"w": jnp.arange(3.0 * rows).reshape(rows, 3)}
    round_ = federated_round(drift, AGGREGATORS[settings.pop("aggregate")], **settings)
    params, loss = round_(start, {"x": READINGS}, IDS, WEIGHTS, key)
    indices = order if rows == 5 else np.array([0])
    permuted, permuted_loss = round_(
        {"w": start["w"][indices]},
        {"x": READINGS[order]},
        IDS[order],
        WEIGHTS[order],
        key,
    )
    npt.assert_allclose(permuted["w"], params["w"][indices], atol=1e-6)
    npt.assert_allclose(permuted_loss, loss, rtol=1e-5)


PADDED = {
    "ids": np.array([100, *IDS, 101, 102]),
    "weights": np.array([0, *WEIGHTS, 0, 0], np.float32),
    "readings": np.concatenate([[[9.0] * 3], READINGS, [[8.0] * 3] * 2]),
}


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_padded_clients_change_nothing(participation):
    key = jax.random.key(3)
    params, loss = toy_round(key, participation=participation)
    padded, padded_loss = toy_round(key, participation=participation, **PADDED)
    npt.assert_allclose(padded, params, atol=1e-6)
    npt.assert_allclose(padded_loss, loss, rtol=1e-5)


def test_clients_of_weight_zero_change_nothing():
    weights, altered = WEIGHTS.copy(), READINGS.copy()
    weights[2], altered[2] = 0, 1e3
    params, loss = toy_round(jax.random.key(0), weights=weights)
    new_params, new_loss = toy_round(
        jax.random.key(0), weights=weights, readings=altered
    )
    npt.assert_array_equal(params, new_params)
    assert loss == new_loss


@pytest.mark.parametrize("aggregate, rows", [("weighted_mean", 1), ("none", 5)])
def test_padding_that_diverges_changes_nothing(aggregate, rows):
    weights, broken = WEIGHTS.copy(), READINGS.copy()
    weights[2], broken[2] = 0, np.nan
    settings = {"rows": rows, "aggregate": aggregate, "weights": weights}
    params, loss = toy_round(jax.random.key(0), **settings)
    new_params, new_loss = toy_round(jax.random.key(0), readings=broken, **settings)
    npt.assert_array_equal(params, new_params)
    assert loss == new_loss and np.isfinite(loss)


@pytest.mark.parametrize("participation", [1.0, 0.4])
@pytest.mark.parametrize("aggregate", ["weighted_mean", "none"])
def test_a_round_of_nobody_leaves_the_models(aggregate, participation):
    settings = {"aggregate": aggregate, "participation": participation}
    rows = 1 if aggregate == "weighted_mean" else 5
    params, loss = toy_round(jax.random.key(0), rows, weights=0 * WEIGHTS, **settings)
    npt.assert_array_equal(params, np.arange(3.0 * rows).reshape(rows, 3))
    assert loss == NO_LOSS


def test_the_gradient_of_a_round_of_nobody_is_zero():
    start = {"params": jnp.ones((1, 3)), "batch_stats": jnp.ones((1, 2))}
    round_ = federated_round(
        lambda model, client, key: (jax.tree.map(lambda x: x + 1, model), 0.0),
        aggregation.weighted_mean,
        is_gradient=True,
    )
    for weights, params, stats in ((WEIGHTS, 2, 2), (0 * WEIGHTS, 0, 1)):
        found, _ = round_(start, {"x": READINGS}, IDS, weights, jax.random.key(0))
        npt.assert_allclose(found["params"], np.full((1, 3), params), rtol=1e-6)
        npt.assert_allclose(found["batch_stats"], np.full((1, 2), stats), rtol=1e-6)


def head(path):
    return path[0].key == "head"


def grow(params, client, key):
    del key
    step = jnp.mean(client["x"]) * jnp.ones(1)
    return jax.tree.map(lambda x: x + step, params), step[0]


@pytest.mark.parametrize("participation", [1.0, 0.4, 0.2])
def test_what_a_cohort_of_one_keeps_for_itself_is_nobody_elses(participation):
    start = {"base": jnp.zeros((1, 1)), "head": jnp.zeros((1, 1))}
    mean = aggregation.weighted_mean
    settings = {"participation": participation, "is_personal": head}
    round_ = federated_round(grow, mean, **settings)
    key, x = jax.random.key(3), {"x": jnp.asarray(READINGS)}
    models, _ = round_(start, x, IDS, WEIGHTS, key)
    cohort, _ = cohort_of(key, participation)
    means, expected = READINGS.mean(axis=1), np.zeros(5)
    expected[cohort] = means[cohort]
    npt.assert_allclose(models["head"][:, 0], expected, atol=1e-6)
    base = np.average(means[cohort], weights=WEIGHTS[cohort])
    npt.assert_allclose(models["base"], [[base]], atol=1e-6)


@pytest.mark.parametrize("participation", [0.4, 0.2])
def test_rows_of_all_become_one_model_for_all(participation):
    start = {"base": jnp.arange(5.0)[:, None]}
    mean = aggregation.weighted_mean
    round_ = federated_round(grow, mean, participation=participation)
    key, x = jax.random.key(3), {"x": jnp.asarray(READINGS)}
    models, _ = round_(start, x, IDS, WEIGHTS, key)
    cohort, _ = cohort_of(key, participation)
    after = np.arange(5) + READINGS.mean(axis=1)
    base = np.average(after[cohort], weights=WEIGHTS[cohort])
    npt.assert_allclose(models["base"], [[base]], atol=1e-6)


def test_a_round_that_shares_nothing_asks_no_aggregator():
    def refuse(stacked, cohort):
        raise AssertionError("nothing was sent")

    settings = {"is_personal": lambda path: True}
    round_ = federated_round(grow, refuse, **settings)
    start, x = {"head": jnp.zeros((1, 1))}, {"x": jnp.asarray(READINGS)}
    models, _ = round_(start, x, IDS, WEIGHTS, jax.random.key(0))
    npt.assert_allclose(models["head"][:, 0], READINGS.mean(axis=1), atol=1e-6)


@pytest.mark.parametrize("clients_per_chunk", [1, None])
def test_who_is_left_out_keeps_its_own_and_counts_for_nothing(clients_per_chunk):
    found = []
    watch = faults.Watch(lambda *report: found.append(report[3]), skips=True)
    start = {"base": jnp.zeros((1, 1)), "head": jnp.arange(5.0)[:, None]}
    x = READINGS.copy()
    x[2, 0] = np.nan

    def update(model, client, key):
        return grow(model, client, key)[0], 0.0  # a plain number

    settings = {"is_personal": head, "clients_per_chunk": clients_per_chunk}
    round_ = federated_round(update, aggregation.weighted_mean, **settings)
    with faults.watching(watch, jnp.int32(1)):
        key = jax.random.key(0)
        models, _ = round_(start, {"x": jnp.asarray(x)}, IDS, WEIGHTS, key)
    jax.effects_barrier()
    is_kept = (WEIGHTS > 0) & (np.arange(5) != 2)
    means = np.where(is_kept, READINGS.mean(axis=1), 0)
    npt.assert_array_equal(np.concatenate(found), np.arange(5) != 2)
    npt.assert_allclose(models["head"][:, 0], np.arange(5) + means, atol=1e-6)
    base = np.average(means, weights=WEIGHTS * is_kept)
    npt.assert_allclose(models["base"], [[base]], atol=1e-6)
