"""The recurrent network of SFL's traffic task, its loss and its scores, in NumPy."""

import dataclasses

import jax
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask

pytestmark = pytest.mark.usefixtures("rolled_scans")

RATE, CLIENT = 1e-3, 2
TASK = TrafficRNNTask(
    hidden_size=3,
    batch_size=30,  # more than there are windows
    optimizer=OptimizerConfig("sgd", RATE),
    eval_batch_size=4,
)


@pytest.fixture(scope="module")
def task():
    return TASK.build()


@pytest.fixture(scope="module")
def starts(task, draw_params):
    """A model of each client."""
    return [draw_params(task.init, seed) for seed in range(5)]


@pytest.fixture(scope="module")
def models(starts):
    return jax.tree.map(lambda *x: np.stack(x), *starts)


def forecast(params, data, client, start):
    """Elman's network over one window: twelve forecasts in the data's units."""
    mean, std, state = float(data.mean), float(data.std), np.zeros(3)
    for step in range(start, start + 12):
        speed = (float(data.speed[client, step]) - mean) / std
        now = np.array([speed, data.clock[step]]) @ params["input_kernel"]
        state = np.tanh(now + params["bias"] + params["hidden_kernel"].T @ state)
    outputs = params["head"]["kernel"].T @ state + params["head"]["bias"]
    return outputs * std + mean


def errors(params, data, client):
    """(errors, truth) [S, 12] of the windows of a split, in the data's units."""
    data = jax.tree.map(np.asarray, data)
    found = [forecast(params, data, client, start) for start in data.starts]
    speed = data.speed[client].astype(float)
    truth = np.array([speed[start + 12 : start + 24] for start in data.starts])
    return np.array(found) - truth, truth


def test_forecasts_are_those_of_elmans_network(task, starts, models, splits, quick_jit):
    data = splits["test"]
    found = quick_jit(task.predict)(models, data)
    for client, model in enumerate(starts):
        error, truth = errors(model["params"], data, client)
        npt.assert_allclose(found[:, client], truth + error, rtol=1e-4)


def test_a_step_lowers_the_absolute_error_of_the_readings_that_are_there(
    task, starts, train, quick_jit
):
    """All windows in one batch; the gradient by a difference of losses of doubles."""
    start, speed = starts[CLIENT], train.speed[CLIENT]
    update = quick_jit(lambda *args: task.update(*args, None, 0))
    result = update(start, speed, jax.random.key(4), train)
    params = jax.tree.map(lambda x: x.astype(float), start["params"])
    moved = jax.tree.map(np.subtract, result.model["params"], params)

    def loss(share):
        shifted = jax.tree.map(lambda x, d: x + share * d, params, moved)
        error, truth = errors(shifted, train, CLIENT)
        assert (truth == 0).any() and abs(train.std - 1) > 1
        return np.abs(error)[truth != 0].mean()

    npt.assert_allclose(result.loss, loss(0), rtol=1e-5)
    slope = (loss(1e-3) - loss(-1e-3)) / 2e-3
    norm = sum(np.sum(x**2) for x in jax.tree.leaves(moved))
    npt.assert_allclose(slope, -norm / RATE, rtol=1e-2)


def test_a_client_makes_as_many_passes_as_the_task_says(starts, train, quick_jit):
    """All windows in one batch, so that a pass is a step."""
    once = quick_jit(lambda *args: TASK.build().update(*args, None, 0))
    twice_task = dataclasses.replace(TASK, local_epochs=2).build()
    twice = quick_jit(lambda *args: twice_task.update(*args, None, 0))
    own = train.speed[CLIENT], jax.random.key(4), train
    first = once(starts[CLIENT], *own)
    second = once(first.model, *own)
    found = twice(starts[CLIENT], *own)
    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        found.model,
        second.model,
    )
    npt.assert_allclose(found.loss, (first.loss + second.loss) / 2, rtol=1e-5)


@pytest.mark.parametrize("is_silent", [False, True])
def test_scores_are_means_of_the_clients_errors_an_hour_ahead(
    task, is_silent, starts, models, splits, quick_jit
):
    """A client without any reading an hour ahead has other readings to compare with."""
    data = splits["test"]
    last = int(data.starts[-1]) + 24
    if is_silent:
        data = data._replace(speed=data.speed.at[1, last - 7 : last].set(0))
    scores = quick_jit(task.evaluate)(models, data)
    of_clients, everywhere, squares = [], [], []
    for client, model in enumerate(starts):
        error, truth = errors(model["params"], data, client)
        ahead = [(e, t) for e, t in zip(error[:, 11], truth[:, 11], strict=True) if t]
        assert bool(ahead) != (is_silent and client == 1)
        if ahead:
            e, t = np.array(ahead).T
            size = np.abs(e)
            of_clients.append(
                (size.mean(), 100 * (size / t).mean(), np.sqrt((e**2).mean()))
            )
        everywhere += np.abs(error)[truth != 0].tolist()
        squares.append(error**2)
    expected = np.mean(of_clients, axis=0)
    npt.assert_allclose([scores[k] for k in ("mae", "mape", "rmse")], expected, 1e-4)
    npt.assert_allclose(scores["loss"], np.mean(everywhere), rtol=1e-4)
    npt.assert_allclose(scores["masked"]["all"]["mae"], np.mean(everywhere), rtol=1e-4)
    by_step = np.sqrt(np.mean(squares, axis=(0, 1)))
    npt.assert_allclose(scores["rmse_by_horizon"], by_step, rtol=1e-4)
