"""Persistence and historical average against loops over readings."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.cnfgnn.naive import (
    NaiveConfig,
    historical_average,
    persistence,
)
from fedjax_graph.data.traffic import windows

CONFIG = NaiveConfig(eval_batch_size=7)
DEAD, EMPTY_SLOT = 2, 100  # a sensor without any reading; a slot of the day without any


@pytest.fixture(scope="module")
def days(train):
    """Three days and a bit of three sensors, from a Saturday on; 1/4 is missing.

    Training windows start a little after the first reading and end before the last.
    """
    rng, num_steps = np.random.default_rng(0), 3 * 288 + 40
    stamps = np.datetime64("2012-03-03T00:00", "ns")
    stamps = stamps + windows.FIVE_MINUTES * np.arange(num_steps)
    speed = rng.uniform(10, 70, (3, num_steps)).astype(np.float32)
    speed[rng.random(speed.shape) < 0.25] = 0
    slots = windows.week_slots(stamps)
    speed[:, slots % 288 == EMPTY_SLOT] = 0
    speed[DEAD] = 0
    return train._replace(
        speed=jnp.asarray(speed),
        clock=jnp.asarray(windows.time_of_day(stamps)),
        week_slot=jnp.asarray(slots),
        starts=jnp.arange(5, 700, dtype=jnp.int32),
        client_ids=jnp.arange(3),
        client_weights=jnp.ones(3),
    )


def mean_or(values, fallback):
    return np.mean(values, dtype=np.float64) if len(values) else fallback


def looped_table(data):
    """{(sensor, slot of the week): forecast} by definition."""
    first, last = int(data.starts[0]), int(data.starts[-1]) + 23
    slots = np.asarray(data.week_slot)[first : last + 1]
    table = np.zeros((len(data.speed), 2016))
    for sensor, series in enumerate(np.asarray(data.speed)):
        series = series[first : last + 1]
        seen = series != 0
        overall = mean_or(series[seen], float(data.mean))
        for slot in range(2016):
            of_day = series[seen & (slots % 288 == slot % 288)]
            of_week = series[seen & (slots == slot)]
            table[sensor, slot] = mean_or(of_week, mean_or(of_day, overall))
    return table


def test_the_historical_average_is_a_loop_over_readings(days):
    algorithm = historical_average(CONFIG)
    table = algorithm.init(jax.random.key(0), days)
    expected = looped_table(days)
    npt.assert_allclose(table, expected, rtol=1e-5)
    later = days._replace(starts=jnp.arange(700, 880, dtype=jnp.int32))
    forecasts = algorithm.predict(table, later)
    assert forecasts.shape == (180, 3, 12)
    for index, start in enumerate(range(700, 880)):
        for step in range(12):
            slot = int(days.week_slot[start + 12 + step])
            npt.assert_allclose(forecasts[index, :, step], expected[:, slot], rtol=1e-5)


def test_fallbacks(days):
    table = np.asarray(historical_average(CONFIG).init(jax.random.key(0), days))
    saturday, wednesday = 5 * 288, 2 * 288
    by_day = [table[0, day * 288 + 50] for day in range(7)]
    assert len(set(by_day)) > 2  # days seen differ
    assert by_day[1] == by_day[2] == by_day[3]  # days never seen share the day's slot
    assert table[0, saturday + EMPTY_SLOT] == table[0, wednesday + EMPTY_SLOT]
    npt.assert_allclose(table[DEAD], float(days.mean))


def test_readings_after_the_training_part_are_not_read(days):
    init = historical_average(CONFIG).init
    last = int(days.starts[-1]) + 23
    for step, is_read in ((last, True), (last + 1, False), (4, False), (5, True)):
        altered = days._replace(speed=days.speed.at[0, step].set(500))
        changed = not np.array_equal(init(None, days), init(None, altered))
        assert changed == is_read


def test_persistence_repeats_the_last_reading(splits, network):
    algorithm, data = persistence(NaiveConfig(eval_batch_size=3)), splits["test"]
    state = algorithm.init(jax.random.key(0), data)
    forecasts = algorithm.predict(state, data)
    assert forecasts.shape == (7, 5, 12)
    for index, start in enumerate(np.asarray(data.starts)):
        last = network.speed[start + 11]  # missing or not
        npt.assert_array_equal(forecasts[index], np.tile(last[:, None], 12))
    assert (np.asarray(forecasts) == 0).any()


def test_persistence_scores_by_definition(splits, network):
    algorithm, data = persistence(NaiveConfig(eval_batch_size=3)), splits["validation"]
    scores = algorithm.evaluate(algorithm.init(jax.random.key(0), data), data)
    errors, present = [], []
    for start in np.asarray(data.starts):
        for step in range(12):
            truth = network.speed[start + 12 + step]
            errors.append(network.speed[start + 11] - truth)
            present.append(truth != 0)
    errors, present = np.array(errors), np.array(present)
    npt.assert_allclose(scores["rmse"], np.sqrt(np.mean(errors**2)), rtol=1e-5)
    npt.assert_allclose(
        scores["masked"]["all"]["mae"], np.abs(errors[present]).mean(), rtol=1e-5
    )


@pytest.mark.parametrize("factory", [persistence, historical_average])
def test_a_round_leaves_the_state_as_it_is(splits, factory):
    algorithm = factory(CONFIG)
    state = algorithm.init(jax.random.key(0), splits["train"])
    after, metrics = algorithm.round(state, splits["train"], jax.random.key(1))
    npt.assert_array_equal(after, state)
    assert float(metrics["train_loss"]) == 0
