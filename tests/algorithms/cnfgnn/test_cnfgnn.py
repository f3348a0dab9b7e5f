"""CNFGNN against Algorithms 1 and 2 as loops, the joint gradient, and who sees whom."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig, cnfgnn
from fedjax_graph.core import aggregation, folding, graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models import graph_network, seq2seq
from tests.algorithms import oracle

pytestmark = pytest.mark.usefixtures("rolled_scans")

HIDDEN, MLP = 4, (6, 6, 6)
MODEL = seq2seq.Seq2Seq(HIDDEN, HIDDEN)
GN = graph_network.GraphNetwork(HIDDEN, HIDDEN, MLP)
make_config = functools.partial(CNFGNNConfig, hidden_size=HIDDEN, gn_mlp_sizes=MLP)


@pytest.fixture(scope="module")
def params(draw_params):
    """Of a client's model and of the server's."""
    return (
        draw_params(functools.partial(seq2seq.init_params, MODEL), seed=1),
        draw_params(functools.partial(graph_network.init_params, GN), seed=2),
    )


@pytest.fixture(scope="module")
def first_state(train, params):
    """(algorithm, rows of client models) -> first state, of the weights `params`."""

    def make(algorithm, rows=1):
        state = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(algorithm.init, jax.random.key(0), train),
        )
        stacked = jax.tree.map(lambda x: jnp.asarray(x[None]), params[0])
        return state._replace(
            client_params=aggregation.broadcast(stacked, rows),
            server_params=jax.tree.map(jnp.asarray, params[1]),
        )

    return make


SETTINGS = {
    "client_batch_size": 12,  # 26 windows: the last batches are ragged
    "server_batch_size": 10,
    "client_rounds": 2,
    "server_rounds": 2,
    "client_optimizer": OptimizerConfig("adam", 0.01),
    "server_optimizer": OptimizerConfig("adam", 0.005),
    "sampling_decay": 5.0,
}
SYSTEMS = {
    "AT + FedAvg": (aggregation.weighted_mean, 1, {}),
    "AT, a cohort of 3": (
        aggregation.none,
        5,
        {"participation": 0.6, "client_rounds": 1, "server_rounds": 1},
    ),
}


@pytest.fixture(scope="module")
def loops(quick_jit):
    """Clients and server of the oracle."""
    return (
        oracle.Clients(MODEL, SETTINGS["client_optimizer"].learning_rate, quick_jit),
        oracle.Server(MODEL, GN, SETTINGS["server_optimizer"].learning_rate, quick_jit),
    )


@pytest.mark.parametrize(
    "system",
    ["AT + FedAvg", pytest.param("AT, a cohort of 3", marks=pytest.mark.slow)],
)
def test_rounds_are_those_of_loops(
    system, train, params, first_state, loops, quick_jit, monkeypatch
):
    """The second system keeps two windows of h_G in a row, as on a TPU."""
    if system != "AT + FedAvg":
        monkeypatch.setattr(folding, "factor", lambda size, num_rows: 2)
    aggregate, num_models, changes = SYSTEMS[system]
    config = make_config(**(SETTINGS | changes))
    algorithm = cnfgnn(config, aggregate)
    state, round_ = first_state(algorithm, num_models), quick_jit(algorithm.round)
    keys = [jax.random.key(20), jax.random.key(21)]
    rounds = oracle.cnfgnn_rounds(
        *loops,
        params,
        train,
        keys,
        config,
        is_averaged=num_models == 1,
    )
    for key, (rows, server_params, losses) in zip(keys, rounds, strict=True):
        state, metrics = round_(state, train, key)
        ours = aggregation.broadcast(state.client_params, 5), state.server_params
        theirs = jax.tree.map(lambda *x: np.stack(x), *rows), server_params
        jax.tree.map(lambda a, b: npt.assert_allclose(a, b, atol=5e-5), ours, theirs)
        for name, loss in zip(("train_loss", "server_loss"), losses, strict=True):
            npt.assert_allclose(metrics[name], loss, rtol=1e-4)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), theirs, params)
    assert all(max(jax.tree.leaves(part)) > 1e-2 for part in moved)
    assert int(state.round) == 2


@pytest.fixture(scope="module")
def one_step(train, first_state, quick_jit):
    """Jitted round of one server step on all 26 windows and padding; first state."""
    algorithm = cnfgnn(
        make_config(client_batch_size=32, server_batch_size=32, sampling_decay=1.0)
    )
    return quick_jit(algorithm.round), first_state(algorithm)


def test_the_split_gradient_is_that_of_the_joint_loss(
    train, params, one_step, quick_jit
):
    key, (round_, state) = jax.random.key(30), one_step
    state, _ = round_(state, train, key)
    adam_state = state.server_opt_state[0]
    assert int(adam_state.count) == 1
    split_gradient = jax.tree.map(lambda mean: mean / 0.1, adam_state.mu)

    inputs, targets = zip(
        *[
            [np.concatenate(part, axis=1) for part in zip(*windows, strict=True)]
            for windows in [
                [oracle.read_window(train, client, index) for index in range(26)]
                for client in range(5)
            ]
        ],
        strict=True,
    )  # of each client, [12, 26, 2]
    client_params = jax.tree.map(lambda x: x[0], state.client_params)  # averaged ones
    ((_, feed),) = oracle.draw_batches(jax.random.split(key)[1], 26, 32, 1, 1, 1.0)

    def joint_loss(server_params):
        variables = {"params": client_params}
        hidden = jnp.stack([MODEL.apply(variables, x, method="encode") for x in inputs])
        embeddings = GN.apply({"params": server_params}, train.graph, hidden)
        total = 0.0
        for x, y, embedding in zip(inputs, targets, embeddings, strict=True):
            outputs = MODEL.apply(variables, x, embedding, y, feed)
            total += jnp.mean((outputs - y[..., 0]) ** 2)
        return total

    joint_gradient = quick_jit(jax.grad(joint_loss))(params[1])
    assert max(np.abs(x).max() for x in jax.tree.leaves(joint_gradient)) > 1e-2
    jax.tree.map(
        lambda a, b: npt.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        split_gradient,
        joint_gradient,
    )


def test_the_first_round_has_no_embedding(train, one_step):
    """Then the server's weights cannot matter to the clients; later they do."""
    key, (round_, state) = jax.random.key(0), one_step
    other = state._replace(
        server_params=jax.tree.map(lambda x: 1.5 * x, state.server_params)
    )
    for number, is_equal in ((0, True), (1, False)):
        after, of_other = (
            round_(s._replace(round=jnp.int32(number)), train, key)[0].client_params
            for s in (state, other)
        )
        equal = jax.tree.leaves(jax.tree.map(np.array_equal, after, of_other))
        assert all(equal) == is_equal


# --- Who sees whose data --------------------------------------------------------------


def hold_globals_at_zero(server_params):
    """Zeroes the rows of the kernels that read the globals, whatever these hold."""
    held = jax.tree.map(np.array, server_params)
    global_size = HIDDEN
    for depth in range(GN.num_layers):
        for part in ("edge", "node"):
            held[f"layers_{depth}"][part]["layers_0"]["kernel"][-global_size:] = 0
        global_size += MLP[-1]
    return held


def sees(predict, state, data):
    """[K, K] bool: whether client i's series changes client j's forecasts at all."""
    forecasts = predict(state, data)  # [S, K, 12]
    rows = []
    for client in range(5):
        altered = data._replace(speed=data.speed.at[client].add(15))
        changed = np.asarray(predict(state, altered)) != forecasts
        rows.append(changed.any(axis=(0, 2)))
    return np.array(rows)


def reach(adjacency, hops):
    """[K, K] bool: who reaches whom along at most `hops` edges, itself included."""
    step = (adjacency != 0) | np.eye(len(adjacency), dtype=bool)
    return np.linalg.matrix_power(step.astype(int), hops) > 0


@pytest.fixture(scope="module")
def forecasts_of(splits, first_state, quick_jit):
    algorithm = cnfgnn(make_config(server_batch_size=7))
    predict = quick_jit(algorithm.predict)
    return predict, first_state(algorithm), splits["test"]


def test_without_edges_nobody_sees_anybody(forecasts_of, params):
    predict, state, data = forecasts_of
    data = data._replace(graph=graphs.from_adjacency(np.zeros((5, 5), np.float32)))
    held = state._replace(server_params=hold_globals_at_zero(params[1]))
    npt.assert_array_equal(sees(predict, held, data), np.eye(5, dtype=bool))
    # With the globals, the sum over nodes tells everybody about everybody.
    assert sees(predict, state, data).all()


def test_with_edges_data_flow_along_them_a_hop_a_layer(forecasts_of, params, network):
    predict, state, data = forecasts_of
    held = state._replace(server_params=hold_globals_at_zero(params[1]))
    expected = reach(network.adjacency, GN.num_layers)
    assert expected.sum() == 10  # 0 -> 1 -> 2 and the like, not 2 -> 1
    npt.assert_array_equal(sees(predict, held, data), expected)


def test_evaluation_never_feeds_the_truth(forecasts_of):
    predict, state, data = forecasts_of
    before = predict(state, data)
    first, last = int(data.starts[-1]) + 12, int(data.starts[-1]) + 24
    altered = data._replace(speed=data.speed.at[:, first:last].add(30))
    npt.assert_array_equal(before[-1], predict(state, altered)[-1])


@pytest.mark.parametrize("sizes", [(), (6,)])
def test_the_graph_network_has_a_hidden_layer(sizes):
    with pytest.raises(InputError, match="gn_mlp_sizes"):
        CNFGNNConfig(gn_mlp_sizes=sizes)
