"""Scheduled sampling, minibatches, errors and their sums, against NumPy."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import batching
from fedjax_graph.data.traffic import windows
from fedjax_graph.tasks import forecasting

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize("decay", [1.0, 60.0, 1000.0])
@pytest.mark.parametrize("step", [0, 1, 100, 5000])
def test_the_truth_is_fed_with_the_stated_probability(step, decay):
    with np.errstate(over="ignore"):
        expected = decay / (decay + np.exp(step / decay))
    probability = forecasting.sampling_probability(jnp.int32(step), decay)
    npt.assert_allclose(probability, expected, rtol=1e-4, atol=1e-30)


def test_the_probability_runs_from_nearly_one_to_zero():
    steps = jnp.array([0, 6907, 10**5, 10**9], jnp.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = np.asarray(forecasting.sampling_probability(steps, 1000.0))
    npt.assert_allclose(values[0], 1000 / 1001)
    npt.assert_allclose(values[1], 0.5, atol=1e-3)
    npt.assert_array_equal(values[2:], [0, 0])
    npt.assert_allclose(forecasting.sampling_probability(jnp.int32(0), 1.0), 0.5)
    npt.assert_array_equal(forecasting.sampling_probability(steps[1:], 1.0), [0] * 3)


make_batches = functools.partial(
    forecasting.epoch_batches, num_windows=26, batch_size=8, num_epochs=3
)


@pytest.fixture(scope="module")
def batch():
    return make_batches(
        jax.random.key(0), first_step=jnp.int32(0), sampling_decay=1000.0
    )


def test_each_pass_sees_every_window_once(batch):
    assert batch.indices.shape == batch.mask.shape == (12, 8)
    assert batch.feed_truth.shape == (12, 12)
    indices, mask = (np.reshape(x, (3, 32)) for x in (batch.indices, batch.mask))
    for one_pass, counted in zip(indices, mask, strict=True):
        assert sorted(one_pass[counted > 0]) == list(range(26))
    npt.assert_array_equal(mask.sum(1), [26] * 3)
    assert indices.min() >= 0 and indices.max() < 26


def test_each_pass_has_an_order_of_its_own(batch):
    first, second, third = np.reshape(batch.indices, (3, 32))[:, :26]
    assert not np.array_equal(first, second) and not np.array_equal(second, third)
    assert not np.array_equal(first, np.arange(26))
    other = make_batches(
        jax.random.key(1), first_step=jnp.int32(0), sampling_decay=1000.0
    )
    assert not np.array_equal(other.indices, batch.indices)
    assert batching.steps_per_epoch(26, 8) == 4
    assert batching.steps_per_epoch(24, 8) == 3


def test_feed_draws_have_the_stated_probability_at_each_step():
    keys, decay, first_step = jax.random.split(jax.random.key(2), 1000), 10.0, 15
    draws = jax.vmap(
        lambda key: (
            make_batches(key, first_step=first_step, sampling_decay=decay).feed_truth
        )
    )(keys)
    shares = np.mean(draws, axis=0)  # [12 batches, 12 decoding steps]
    steps = first_step + np.arange(12)
    expected = decay / (decay + np.exp(steps / decay))
    assert expected[0] > 0.65 and expected[-1] < 0.45
    npt.assert_allclose(shares, np.tile(expected[:, None], 12), atol=0.065)
    npt.assert_allclose(shares.mean(1), expected, atol=0.018)  # 4 deviations
    flat = np.reshape(draws, (1000, -1)) - shares.ravel()
    correlation = flat.T @ flat / 1000
    off_diagonal = correlation[~np.eye(len(correlation), dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.05  # one draw for each step and batch


@pytest.mark.parametrize("skip_missing", [False, True])
def test_target_weights_make_a_sum_the_mean_over_what_counts(skip_missing):
    rng = np.random.default_rng(0)
    truth = rng.uniform(1, 60, (12, 5)).astype(np.float32)
    truth[rng.random(truth.shape) < 0.2] = 0
    error = rng.normal(size=truth.shape)
    mask = np.array([1, 0, 1, 1, 0], np.float32)
    weights = forecasting.target_weights(truth, mask, skip_missing)
    counted = np.broadcast_to(mask > 0, truth.shape)
    if skip_missing:
        counted = counted & (truth != 0)
    npt.assert_allclose(np.sum(weights * error), np.mean(error[counted]), rtol=1e-5)
    assert np.all(forecasting.target_weights(truth, 0 * mask, skip_missing) == 0)


def expected_metrics(forecast, truth, std):
    """By definition, of [..., 12] arrays."""
    error = forecast.astype(np.float64) - truth

    def masked(steps):
        present = truth[..., steps] != 0
        if not present.any():
            return {"mae": 0, "rmse": 0, "mape": 0}
        chosen, true = error[..., steps][present], truth[..., steps][present]
        return {
            "mae": np.mean(np.abs(chosen)),
            "rmse": np.sqrt(np.mean(chosen**2)),
            "mape": 100 * np.mean(np.abs(chosen) / true),
        }

    each = tuple(range(error.ndim - 1))
    return {
        "loss": np.mean((error / std) ** 2),
        "rmse": np.sqrt(np.mean(error**2)),
        "mae": np.mean(np.abs(error)),
        "rmse_by_horizon": np.sqrt(np.mean(error**2, axis=each)),
        "masked": {
            "15": masked([2]),
            "30": masked([5]),
            "60": masked([11]),
            "all": masked(list(range(12))),
        },
    }


def assert_metrics(metrics, expected):
    assert jax.tree.structure(metrics) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=2e-5, atol=1e-5), metrics, expected
    )


@pytest.mark.parametrize("missing", ["none", "some", "a whole step", "all"])
def test_errors_follow_both_conventions(missing):
    rng = np.random.default_rng(0)
    forecast, truth = rng.uniform(5, 70, (2, 5, 9, 12)).astype(np.float32)
    if missing == "some":
        truth[rng.random(truth.shape) < 0.3] = 0
    elif missing == "a whole step":
        truth[..., 5] = 0
    elif missing == "all":
        truth[:] = 0
    sums = forecasting.error_sums(forecast, truth, np.ones((5, 9), np.float32))
    metrics = forecasting.error_metrics(sums, jnp.float32(13.0))
    assert_metrics(metrics, expected_metrics(forecast, truth, 13.0))


def test_forecasts_of_weight_zero_do_not_count():
    rng = np.random.default_rng(1)
    forecast, truth = rng.uniform(5, 70, (2, 5, 9, 12)).astype(np.float32)
    weights = (rng.random((5, 9)) < 0.5).astype(np.float32)
    sums = forecasting.error_sums(forecast, truth, weights)
    metrics = forecasting.error_metrics(sums, jnp.float32(1.0))
    counted = weights > 0
    assert_metrics(metrics, expected_metrics(forecast[counted], truth[counted], 1.0))


def wrong_by_a_wave(state, data, starts):
    """A stand-in for a model: [K, B, 12] that differ between clients and windows."""
    steps = starts[:, None] + windows.INPUT_STEPS + jnp.arange(12)
    return data.speed[:, steps] + state * jnp.sin(
        steps + data.client_ids[:, None, None]
    )


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10])
def test_evaluation_is_that_of_all_predictions_whatever_the_batch(splits, batch_size):
    data, state = splits["test"], jnp.float32(5)
    predict = forecasting.predict_forecasts(wrong_by_a_wave, batch_size)
    evaluate = forecasting.evaluate_forecasts(wrong_by_a_wave, batch_size)
    forecasts = np.asarray(predict(state, data))
    assert forecasts.shape == (7, 5, 12)
    truth = np.stack([data.speed[:, s + 12 : s + 24] for s in np.asarray(data.starts)])
    assert (truth == 0).any()
    steps = np.asarray(data.starts)[:, None, None] + 12 + np.arange(12)
    wave = 5 * np.sin(steps + np.arange(5)[:, None])
    npt.assert_allclose(forecasts, truth + wave, atol=1e-4)
    assert_metrics(evaluate(state, data), expected_metrics(forecasts, truth, data.std))


def test_clients_of_weight_zero_are_not_scored(splits):
    data = splits["test"]
    evaluate = forecasting.evaluate_forecasts(wrong_by_a_wave, 3)
    state = jnp.float32(5)
    fewer = data._replace(
        speed=data.speed[:4],
        client_ids=data.client_ids[:4],
        client_weights=data.client_weights[:4],
    )
    without = data._replace(client_weights=data.client_weights.at[4].set(0))
    assert_metrics(evaluate(state, without), evaluate(state, fewer))


@pytest.mark.parametrize("inner", [(), (12,), (3, 2)])
def test_one_model_folded_equals_a_copy_for_each_client(inner):
    rng = np.random.default_rng(0)
    one = {"kernel": rng.normal(size=(1, 2, 4)), "bias": rng.normal(size=(1, 4))}
    copies = jax.tree.map(lambda x: np.repeat(x, 5, axis=0), one)
    x, y = rng.normal(size=(5, *inner, 3, 2)), rng.normal(size=(5, *inner, 3, 4))

    def fn(params, x, y):
        return jnp.tanh(x @ params["kernel"] + params["bias"]) * y

    folded = forecasting.apply_models(fn, one, x, y)
    mapped = forecasting.apply_models(fn, copies, x, y)
    expected = np.tanh(x @ one["kernel"][0] + one["bias"][0]) * y
    assert folded.shape == (5, *inner, 3, 4)
    npt.assert_allclose(folded, expected, atol=1e-5)
    npt.assert_allclose(mapped, expected, atol=1e-5)


def test_models_of_their_own_are_applied_to_their_own_clients():
    x = np.ones((3, 4, 1), np.float32)
    scaled = forecasting.apply_models(lambda p, x: p * x, np.arange(3.0), x)
    npt.assert_array_equal(scaled, np.arange(3.0)[:, None, None] * x)


def test_all_clients_are_gathered(train):
    gathered = forecasting.gather_all(train, train.starts[3:7])
    alone = windows.gather(train, train.speed[2], train.starts[3:7])
    npt.assert_array_equal(gathered.inputs[2], alone.inputs)
    npt.assert_array_equal(gathered.targets[2], alone.targets)
