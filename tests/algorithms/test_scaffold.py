"""SCAFFOLD against Algorithm 1 of its paper, written out with option II."""

import jax
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.scaffold import control, control_mean, scaffold
from fedjax_graph.core.local import local_steps
from tests.algorithms import quadratic
from tests.algorithms.quadratic import (
    KEYS,
    NUM_CLIENTS,
    PARAMS,
    QuadraticTask,
    Twin,
    assert_rows,
    run,
    to_rows,
)

TASK = QuadraticTask()
FOUR_KEYS = (*KEYS, jax.random.key(8))
WEIGHTS = {"equal": (1, 1, 1, 1, 1), "unequal": (2, 1, 5, 3, 4)}


def controls_of(state):
    """c_i, [K, 5]."""
    return to_rows({"params": state.memories})


def scaffold_round(twin, x, c, controls, key):
    """Lines 3 to 17 with server step size 1 -> (x, c, all c_i, loss)."""
    trained, loss = twin.train(
        np.tile(x, (NUM_CLIENTS, 1)), key, lambda i, v: c - controls[i]
    )
    new, rate = controls.copy(), TASK.num_steps * TASK.learning_rate
    for i, y in trained.items():
        new[i] = controls[i] - c + (x[PARAMS] - y[PARAMS]) / rate
    sampled = list(trained)
    change = np.mean(new[sampled] - controls[sampled], axis=0)
    c = c + len(sampled) / NUM_CLIENTS * change
    return twin.mean(trained), c, new, loss


@pytest.mark.parametrize(
    "participation, weights", [(1.0, "unequal"), (0.6, "equal"), (0.2, "unequal")]
)
def test_rounds_are_those_of_algorithm_1(quick_jit, participation, weights):
    data = quadratic.make_data(WEIGHTS[weights])
    twin = Twin(data, TASK, participation)
    algorithm = scaffold(FedAvgConfig(TASK, participation))
    (state, _), *later = run(algorithm, data, quick_jit, FOUR_KEYS)
    x, c = to_rows(state.models)[0], np.zeros(5)
    controls = np.zeros((NUM_CLIENTS, 5))
    npt.assert_array_equal(controls_of(state), controls)
    for key, (state, metrics) in zip(FOUR_KEYS, later, strict=True):
        x, c, controls, loss = scaffold_round(twin, x, c, controls, key)
        assert_rows(state.models, x)
        npt.assert_allclose(controls_of(state), controls, rtol=1e-5, atol=1e-5)
        npt.assert_allclose(controls_of(state).mean(axis=0), c, rtol=1e-5, atol=1e-5)
        npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-5)
    assert np.abs(c).max() > 0.05


def test_the_servers_control_is_the_mean_of_all_controls(quick_jit):
    """What line 17 keeps, whoever takes part: c is not stored here."""
    data, config = quadratic.make_data(), FedAvgConfig(TASK, 0.6)
    twin, c = Twin(data, TASK, 0.6), np.zeros(5)
    (before, _), *later = run(scaffold(config), data, quick_jit, FOUR_KEYS)
    for key, (state, _) in zip(FOUR_KEYS, later, strict=True):
        sampled = list(twin.cohort(key))
        change = (controls_of(state) - controls_of(before))[sampled]
        c = c + len(sampled) / NUM_CLIENTS * change.mean(axis=0)
        (found,) = control_mean(config, state.memories, data)
        assert np.abs(change).max() > 0.05
        npt.assert_allclose(np.hstack([found["base"], found["head"]]), c, atol=1e-5)
        before = state


def test_the_first_round_is_that_of_fed_avg(quick_jit):
    """All controls are 0; in the second they are not."""
    data, config = quadratic.make_data(), FedAvgConfig(TASK)
    ours = run(scaffold(config), data, quick_jit, KEYS[:2])
    average = run(fed_avg(config), data, quick_jit, KEYS[:2])
    first, second = (to_rows(average[t][0].models) for t in (1, 2))
    assert_rows(ours[1][0].models, first, 1e-6)
    assert np.abs(to_rows(ours[2][0].models) - second).max() > 0.01


def test_who_is_not_sampled_keeps_its_control(quick_jit):
    data = quadratic.make_data()
    _, (before, _), (after, _) = run(
        scaffold(FedAvgConfig(TASK, 0.6)), data, quick_jit, KEYS[:2]
    )
    sampled = Twin(data, TASK, 0.6).cohort(KEYS[1])
    is_kept = np.all(controls_of(before) == controls_of(after), axis=1)
    assert set(np.flatnonzero(~is_kept)) == set(sampled)


def test_a_control_is_the_mean_of_the_gradients_before_the_correction():
    gradients = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    correction = np.array([1.0, -2.0, 0.5], np.float32)
    add = control(correction)
    state = add.init(np.zeros(3, np.float32))
    for gradient in gradients:
        corrected, state = add.update(gradient, state)
        npt.assert_allclose(corrected, gradient + correction, rtol=1e-6)
    npt.assert_allclose(state.mean_gradient, gradients.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9, nesterov=True),
        optax.sgd(optax.linear_schedule(0.3, 0.01, 4)),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    ],
)
def test_a_control_does_not_depend_on_what_the_optimizer_makes_of_it(optimizer):
    """The gradient of 1/2 v^2 is v: the control is the mean of the iterates."""

    def loss(params, stats, batch):
        del batch
        return params**2 / 2, stats

    iterates, v, state = [], np.float32(2.0), optimizer.init(np.float32(2.0))
    for _ in range(4):
        iterates.append(v)
        updates, state = optimizer.update(v + 0.3, state, v)
        v = v + updates
    steps = local_steps(loss, optax.chain(control(np.float32(0.3)), optimizer))
    result = steps({"params": np.float32(2), "batch_stats": {}}, np.zeros(4))
    npt.assert_allclose(result.opt_state[0].mean_gradient, np.mean(iterates), rtol=1e-5)
    npt.assert_allclose(result.model["params"], v, rtol=1e-5)
