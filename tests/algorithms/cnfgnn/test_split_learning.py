"""SL, SL + FedAvg and GRU + GN against loops over clients, and against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.cnfgnn.cnfgnn import HalvesConfig, SplitConfig
from fedjax_graph.algorithms.cnfgnn.split_learning import (
    SplitLearningFedAvgConfig,
    gru_gn,
    split_learning,
    split_learning_fedavg,
)
from fedjax_graph.core import aggregation, graphs
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models import graph_network, seq2seq
from tests.algorithms import oracle

pytestmark = pytest.mark.usefixtures("rolled_scans")

HIDDEN, MLP = 4, (6, 6)
SETTINGS = {
    "hidden_size": HIDDEN,
    "gn_mlp_sizes": MLP,
    "gn_layers": 1,
    "server_batch_size": 12,  # 26 windows: the last batch is ragged
    "client_optimizer": OptimizerConfig("adam", 0.01),
    "server_optimizer": OptimizerConfig("adam", 0.005),
    "sampling_decay": 5.0,
}
CONFIG = SplitConfig(**SETTINGS)
FED_AVG = SplitLearningFedAvgConfig(**SETTINGS)
STRATEGIES = {  # name -> (algorithm, when the models of the loops are merged)
    "SL": (split_learning(CONFIG), "never"),
    "SL + FedAvg": (split_learning_fedavg(FED_AVG), "round"),
    "SL + FedAvg, every step": (
        split_learning_fedavg(
            SplitLearningFedAvgConfig(**SETTINGS, average_every_step=True)
        ),
        "step",
    ),
    "centralized": (gru_gn(HalvesConfig(**SETTINGS)), "one"),
}
KEYS = (jax.random.key(20), jax.random.key(21))


@pytest.fixture(scope="module")
def loop(quick_jit):
    model = seq2seq.Seq2Seq(HIDDEN, HIDDEN)
    gn = graph_network.GraphNetwork(HIDDEN, HIDDEN, MLP, num_layers=1)
    return oracle.Joint(
        model,
        gn,
        CONFIG.client_optimizer.learning_rate,
        CONFIG.server_optimizer.learning_rate,
        quick_jit,
    )


def first_state(algorithm, data, draw_params):
    """A first state whose weights are large enough for effects to be seen."""
    state = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        jax.eval_shape(algorithm.init, jax.random.key(0), data),
    )
    one = jax.tree.map(lambda x: x[0], state.client_params)
    client_params = draw_params(lambda key: one, seed=1)
    server_params = draw_params(lambda key: state.server_params, seed=2)
    rows = aggregation.num_models(state.client_params)
    stacked = jax.tree.map(lambda x: jnp.asarray(x[None]), client_params)
    return state._replace(
        client_params=aggregation.broadcast(stacked, rows),
        server_params=jax.tree.map(jnp.asarray, server_params),
    ), (client_params, server_params)


@pytest.mark.parametrize("name", STRATEGIES)
def test_rounds_are_those_of_loops(name, train, draw_params, loop, quick_jit):
    algorithm, merged = STRATEGIES[name]
    state, params = first_state(algorithm, train, draw_params)
    round_ = quick_jit(algorithm.round)
    rounds = oracle.joint_rounds(loop, params, train, KEYS, CONFIG, merged)
    for key, (rows, server_params, loss) in zip(KEYS, rounds, strict=True):
        state, metrics = round_(state, train, key)
        ours = aggregation.broadcast(state.client_params, 5), state.server_params
        theirs = jax.tree.map(lambda *x: np.stack(x), *rows), server_params
        jax.tree.map(lambda a, b: npt.assert_allclose(a, b, atol=5e-5), ours, theirs)
        npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-4)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), theirs, params)
    assert all(max(jax.tree.leaves(part)) > 1e-2 for part in moved)
    assert int(state.num_steps) == 2 * 3
    spread = max(np.ptp(x, axis=0).max() for x in jax.tree.leaves(theirs[0]))
    assert (spread > 1e-2) == (name == "SL")


def one_client(data, client):
    index = np.array([client])
    return data._replace(
        speed=data.speed[index],
        client_ids=data.client_ids[index],
        client_weights=data.client_weights[index],
        graph=graphs.from_adjacency(np.zeros((1, 1), np.float32)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("client", [0, 3])
def test_split_learning_of_one_client_is_the_centralized_model_of_its_node(
    client, train, draw_params, quick_jit
):
    data = one_client(train, client)
    states = []
    for name in STRATEGIES:
        algorithm, _ = STRATEGIES[name]
        state, _ = first_state(algorithm, data, draw_params)
        round_ = quick_jit(algorithm.round)
        history = []
        for key in KEYS:
            state, metrics = round_(state, data, key)
            history.append((state, metrics))
        states.append(history)
    for history in states[:-1]:
        jax.tree.map(
            functools.partial(npt.assert_allclose, rtol=1e-5, atol=1e-6),
            history,
            states[-1],
        )
