"""MOON against its loss in NumPy, and against FedAvg."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.moon import MoonConfig, contrast, moon
from fedjax_graph.core.communication import bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.subgraphs import SubgraphTask
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask
from tests import client_graphs, dense_gcn
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES, alone

RATE, KEY = 0.1, jax.random.key(3)
TASK = SubgraphTask(NUM_FEATURES, NUM_CLASSES, optimizer=OptimizerConfig("sgd", RATE))


@pytest.fixture(scope="module")
def train():
    return client_graphs.make_splits()["train"]


def start(algorithm, train, draw_params, task=TASK):
    """A state whose server's model and clients' last ones are drawn."""
    init = task.build().init
    models = [draw_params(init, seed) for seed in range(NUM_CLIENTS + 1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *models)
    return algorithm.init(KEY, train)._replace(
        models=jax.tree.map(lambda x: x[:1], stacked),
        memories=jax.tree.map(lambda x: x[1:], stacked),
    )


def cosine(x, y):
    return np.sum(x * y, axis=1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)


def l_con(z, towards, away, tau):
    near, far = (np.exp(cosine(z, other) / tau) for other in (towards, away))
    return -np.log(near / (near + far))


def test_contrast_is_that_of_the_paper():
    z, towards, away = np.random.default_rng(0).normal(size=(3, 6, 4))
    expected = l_con(z, towards, away, 0.3)
    npt.assert_allclose(contrast(z, towards, away, 0.3), expected, rtol=1e-5)
    npt.assert_allclose(contrast(z, away, away, 0.3), np.log(2), rtol=1e-6)
    slope = jax.grad(lambda z: contrast(z, towards[0], away[0], 0.3))(jnp.zeros(4))
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("examples", ["trained", "all"])
def test_a_step_is_one_along_the_papers_loss(train, draw_params, quick_jit, examples):
    mu, tau = 0.7, 0.4
    config = MoonConfig(TASK, contrast_weight=mu, temperature=tau, contrast_on=examples)
    algorithm = moon(config)
    before = start(algorithm, train, draw_params)
    after, _ = quick_jit(algorithm.round)(before, train, KEY)
    w = dense_gcn.row(before.models["params"], 0)
    for client in range(NUM_CLIENTS):
        own = alone(train, client)
        last, new = (
            dense_gcn.row(state.memories["params"], client) for state in (before, after)
        )
        fixed = [dense_gcn.layers(own, params)[0] for params in (w, last)]
        chosen = (own.is_trained if examples == "trained" else own.is_real) > 0

        def loss(params, own=own, fixed=fixed, chosen=chosen):
            z = dense_gcn.layers(own, params)[0]
            losses = l_con(*(x[chosen] for x in (z, *fixed)), tau)
            return dense_gcn.cross_entropy(own, params) + mu * np.mean(losses)

        gradient = jax.tree.map(lambda a, b: (a - b) / RATE, w, new)
        dense_gcn.assert_gradient(loss, w, gradient)


def test_without_a_contrast_it_is_fed_avg_bit_for_bit(train, quick_jit):
    task = dataclasses.replace(TASK, local_steps=2, dropout=0.5)
    ours = moon(MoonConfig(task, contrast_weight=0.0))
    plain = fed_avg(FedAvgConfig(task))
    states = [
        quick_jit(a.round)(a.init(KEY, train), train, KEY)[0] for a in (ours, plain)
    ]
    jax.tree.map(npt.assert_array_equal, *(state.models for state in states))


def test_a_round_exchanges_what_fed_avg_does(train):
    costs = [
        bytes_per_round(a.round, a.init(KEY, train), train, KEY)
        for a in (
            moon(MoonConfig(TASK, participation=0.6)),
            fed_avg(FedAvgConfig(TASK, participation=0.6)),
        )
    ]
    assert costs[0] == costs[1]
    model = jax.eval_shape(TASK.build().init, KEY)
    assert costs[0].up == 3 * 4 * sum(x.size for x in jax.tree.leaves(model))


def test_a_task_without_embeddings_is_refused():
    with pytest.raises(InputError, match="moon: the task 'traffic_rnn' has no embedd"):
        moon(MoonConfig(TrafficRNNTask()))
