"""Errors of forecasts and their sums, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.time_steps import TimeStep
from fedjax_graph.tasks import forecasting, traffic_rnn


def expected_metrics(forecast, truth, std):
    """By definition, of [..., 12] arrays."""
    error = forecast.astype(np.float64) - truth

    def masked(steps):
        present = truth[..., steps] != 0
        if not present.any():
            return {"mae": np.nan, "rmse": np.nan, "mape": np.nan}
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
    metrics = forecasting.error_metrics(sums, jnp.float32(13.0), TimeStep(300))
    assert_metrics(metrics, expected_metrics(forecast, truth, 13.0))


def test_a_loss_without_any_reading_is_no_number():
    """Else the round with nothing to compare with would be the best."""
    forecast, truth = np.full((3, 4, 12), 5, np.float32), np.zeros((3, 4, 12))
    sums = forecasting.error_sums(forecast, truth, np.ones((3, 4), np.float32))
    scales = jnp.float32(2.0), TimeStep(300)
    metrics = forecasting.error_metrics(sums, *scales, masked_loss=True)
    assert np.isnan(metrics["loss"]) and np.isnan(metrics["masked"]["all"]["rmse"])
    assert forecasting.error_metrics(sums, *scales)["loss"] == 25 / 4
    of_clients = traffic_rnn.client_metrics(sums, *scales)
    assert all(np.isnan(of_clients[key]) for key in ("loss", "mae", "rmse", "mape"))
    truth[0, 0, 0] = 3  # one reading is enough
    sums = forecasting.error_sums(forecast, truth, np.ones((3, 4), np.float32))
    metrics = forecasting.error_metrics(sums, *scales, masked_loss=True)
    assert metrics["loss"] == pytest.approx(4 / 4)
    assert traffic_rnn.client_metrics(sums, *scales)["loss"] == 2


@pytest.mark.parametrize(
    ("seconds", "keys"),
    [(30, {"1.5", "3", "6"}), (300, {"15", "30", "60"}), (3600, {"180", "360", "720"})],
)
def test_horizons_are_named_by_their_minutes(splits, seconds, keys):
    """As `evaluate` of a method names them, which has the step from the data."""
    data = splits["test"]._replace(step=TimeStep(seconds))
    evaluate = forecasting.evaluate_forecasts(wrong_by_a_wave, 3)
    scores = jax.eval_shape(evaluate, jnp.float32(5), data)
    assert scores["masked"].keys() == keys | {"all"}


def test_forecasts_of_weight_zero_do_not_count():
    rng = np.random.default_rng(1)
    forecast, truth = rng.uniform(5, 70, (2, 5, 9, 12)).astype(np.float32)
    weights = (rng.random((5, 9)) < 0.5).astype(np.float32)
    sums = forecasting.error_sums(forecast, truth, weights)
    metrics = forecasting.error_metrics(sums, jnp.float32(1.0), TimeStep(300))
    counted = weights > 0
    assert_metrics(metrics, expected_metrics(forecast[counted], truth[counted], 1.0))


@pytest.mark.parametrize("steps_ahead", [1, 3, 12])
def test_clients_with_readings_count_the_same_in_a_mean_over_clients(steps_ahead):
    """One of them has none so many steps ahead, and another one few."""
    rng = np.random.default_rng(2)
    forecast, truth = rng.uniform(5, 70, (2, 5, 9, 12)).astype(np.float32)
    truth[1, :, steps_ahead - 1] = 0
    truth[3, :7, steps_ahead - 1] = 0
    sums = forecasting.error_sums(forecast, truth, np.ones((5, 9), np.float32))
    found = forecasting.client_errors(sums, steps_ahead)
    expected = {"mae": [], "rmse": [], "mape": []}
    for client in (0, 2, 3, 4):
        true = truth[client, :, steps_ahead - 1].astype(np.float64)
        error = forecast[client, :, steps_ahead - 1] - true
        error, true = error[true > 0], true[true > 0]
        assert len(true) == (2 if client == 3 else 9)
        expected["mae"].append(np.mean(np.abs(error)))
        expected["rmse"].append(np.sqrt(np.mean(error**2)))
        expected["mape"].append(100 * np.mean(np.abs(error) / true))
    assert_metrics(found, {name: np.mean(x) for name, x in expected.items()})


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


@pytest.mark.parametrize("clients_per_chunk", [None, 1])
def test_models_of_other_clients_are_refused(clients_per_chunk):
    x, chunk = np.ones((5, 4, 1), np.float32), {"clients_per_chunk": clients_per_chunk}
    with pytest.raises(InputError, match="3 models for 5 clients, expected one for"):
        forecasting.apply_models(lambda p, x: p * x, np.arange(3.0), x, **chunk)


def test_all_clients_are_gathered(train):
    gathered = forecasting.gather_all(train, train.starts[3:7])
    alone = windows.gather(train, train.speed[2], train.starts[3:7])
    npt.assert_array_equal(gathered.inputs[2], alone.inputs)
    npt.assert_array_equal(gathered.targets[2], alone.targets)
