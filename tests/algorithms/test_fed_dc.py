"""FedDC against its equations, client by client and step by step."""

import jax
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.fed_dc import FedDCConfig, fed_dc
from fedjax_graph.core.communication import bytes_per_round
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

TASK, ALPHA = QuadraticTask(), 0.3


def fed_dc_round(twin, w, drifts, steps, key):
    """Eqs. 1 to 3 -> (w, all h_i, all g_i)."""
    scale = TASK.num_steps * TASK.learning_rate
    mean = steps.mean(axis=0)

    def extra(i, theta):
        penalty = ALPHA * (drifts[i] + theta - w[PARAMS])
        return penalty + (steps[i] - mean) / scale

    trained, _ = twin.train(np.tile(w, (NUM_CLIENTS, 1)), key, extra)
    drifts, steps = drifts.copy(), steps.copy()
    for i, theta in trained.items():
        steps[i] = theta[PARAMS] - w[PARAMS]
        drifts[i] += steps[i]
        trained[i] = theta.copy()
        trained[i][PARAMS] += drifts[i]
    return twin.mean(trained), drifts, steps


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_rounds_are_those_of_the_paper(quick_jit, participation):
    data = quadratic.make_data()
    twin = Twin(data, TASK, participation)
    config = FedDCConfig(TASK, participation, drift_weight=ALPHA)
    (state, _), *later = run(fed_dc(config), data, quick_jit)
    w = to_rows(state.models)[0]
    drifts = steps = np.zeros((NUM_CLIENTS, 5))
    for key, (state, _) in zip(KEYS, later, strict=True):
        w, drifts, steps = fed_dc_round(twin, w, drifts, steps, key)
        assert_rows(state.models, w)
        found = to_rows({"params": state.memories["drift"]})
        npt.assert_allclose(found, drifts, rtol=1e-4, atol=1e-5)
    assert np.abs(drifts).max() > 0.1


def test_it_sends_an_update_beside_a_model_both_ways():
    data = quadratic.make_data()
    costs = [
        bytes_per_round(a.round, a.init(KEYS[0], data), data, KEYS[0])
        for a in (
            fed_avg(FedAvgConfig(TASK, 0.6)),
            fed_dc(FedDCConfig(TASK, 0.6)),
        )
    ]
    params = 4 * 5
    assert costs[1].up - costs[0].up == costs[1].down - costs[0].down == 3 * params


def test_clients_of_weight_0_change_nothing(quick_jit):
    data = quadratic.make_data()
    algorithm = fed_dc(FedDCConfig(TASK))
    (start, _), *_, (state, _) = run(algorithm, data, quick_jit, KEYS[:2])
    padded = quadratic.pad_data(data), quick_jit, KEYS[:2], quadratic.pad_state(start)
    *_, (found, _) = run(algorithm, *padded)
    jax.tree.map(
        lambda x, y: npt.assert_allclose(x[: len(y)], y, rtol=1e-5, atol=1e-5),
        (found.models, found.memories),
        (state.models, state.memories),
    )
