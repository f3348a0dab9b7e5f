"""CNFGNN's encoder-decoder as a task: every method, and loops over clients and steps.

GRU + FedAvg and GRU (local) are `fed_avg` and `local` on it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import REGISTRY, get_method, make_config
from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig, cnfgnn
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core import aggregation
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.traffic_seq2seq import TrafficSeq2SeqTask
from tests.algorithms import oracle
from tests.core.test_federated import cohort_of

pytestmark = pytest.mark.usefixtures("rolled_scans")

TASK = TrafficSeq2SeqTask(
    hidden_size=4,
    batch_size=12,  # 26 windows: the last batch is ragged
    local_epochs=2,
    optimizer=OptimizerConfig("adam", 0.01),
    sampling_decay=5.0,
)
KEYS = (jax.random.key(10), jax.random.key(11))
SHORT = {"scaffold"}  # which has a memory; the others run on other tasks by default
NEED_MORE = {"fed_sgd", "graphfl"}  # than any task has
OF_CLASSES_OR_GRAPHS = {
    *("ada_fgl", "fed_gcn", "fed_gta", "fed_proto", "fed_pub"),
    *("fed_sage_plus", "fed_star", "fgssl", "moon"),
}
TAKE_TASKS = {n for n, method in REGISTRY.items() if method.takes_task}
METHODS = TAKE_TASKS - NEED_MORE - OF_CLASSES_OR_GRAPHS
VALUES = {"sfl_star": {"structure": {"embedding_size": 3, "num_neighbours": 2}}}


def build(name, **values):
    return get_method(name).factory(make_config(name, {"task": TASK} | values))


# --- Every method ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluate(quick_jit):
    return quick_jit(TASK.build().evaluate)


def models_of(state):
    return aggregation.broadcast(state.models, 5)


@pytest.mark.parametrize("name", sorted(OF_CLASSES_OR_GRAPHS))
def test_methods_of_classes_or_graphs_refuse(name):
    with pytest.raises(InputError, match=f"^{name}: ") as error:
        build(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHORT else [pytest.mark.slow])
        for name in sorted(METHODS)
    ],
)
def test_a_round_of_every_method_learns(name, train, quick_jit, evaluate):
    algorithm = build(name, **VALUES.get(name, {}))
    state = algorithm.init(jax.random.key(0), train)
    before = evaluate(models_of(state), train)
    state, metrics = quick_jit(algorithm.round)(state, train, KEYS[0])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((state, metrics)))
    after = evaluate(models_of(state), train)
    assert after["loss"] < before["loss"]
    assert after["rmse"] < before["rmse"]


@pytest.mark.slow
def test_without_its_pull_fed_prox_is_fed_avg(train, quick_jit):
    states = []
    for name, values in (("fed_avg", {}), ("fed_prox", {"proximal_weight": 0.0})):
        algorithm = build(name, **values)
        state, round_ = algorithm.init(KEYS[0], train), quick_jit(algorithm.round)
        for key in KEYS:
            state, _ = round_(state, train, key)
        states.append(state)
    jax.tree.map(lambda a, b: npt.assert_allclose(a, b, atol=1e-6), *states)


# --- GRU + FedAvg and GRU (local) -----------------------------------------------------

CONFIG = FedAvgConfig(TASK, participation=0.4)
BASELINES = {"fed_avg": True, "local": False}  # name -> whether models are averaged


@pytest.fixture(
    scope="module",
    params=["fed_avg", pytest.param("local", marks=pytest.mark.slow)],
)
def system(request, train, quick_jit):
    """(name of the method, jitted round, first state)."""
    algorithm = build(request.param, participation=0.4)
    state = algorithm.init(jax.random.key(0), train)
    return request.param, quick_jit(algorithm.round), state


def test_rounds_are_those_of_loops(system, train, quick_jit):
    name, round_, state = system
    start = jax.tree.map(lambda x: np.asarray(x[0]), state.models["params"])
    rounds = oracle.fed_avg_rounds(
        oracle.Clients(TASK.model(), TASK.optimizer.learning_rate, quick_jit),
        start,
        train,
        KEYS,
        CONFIG,
        is_averaged=BASELINES[name],
    )
    for number, (key, (rows, loss)) in enumerate(zip(KEYS, rounds, strict=True)):
        state, metrics = round_(state, train, key)
        expected = jax.tree.map(lambda *x: np.stack(x), *rows)
        jax.tree.map(
            lambda a, b: npt.assert_allclose(a, b, atol=2e-5),
            models_of(state)["params"],
            expected,
        )
        npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-4)
        assert int(state.num_rounds) == number + 1
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected, start)
    assert max(jax.tree.leaves(moved)) > 1e-2


def test_unsampled_series_change_nothing(system, train):
    _, round_, state = system
    key = jax.random.key(4)
    after, _ = round_(state, train, key)
    cohort, _ = cohort_of(key, 0.4, train.client_ids, train.client_weights)
    assert len(cohort) == 2
    for client in range(5):
        speed = train.speed.at[client].add(20)
        new, _ = round_(state, train._replace(speed=speed), key)
        equal = jax.tree.map(np.array_equal, after, new)
        assert all(jax.tree.leaves(equal)) == (client not in cohort)


def test_the_aggregator_has_a_key_of_its_own():
    """None that the cohort or a client's steps have."""
    key = jax.random.key(4)
    clients_key, aggregator_key = TASK.build().round_keys(key)
    assert clients_key is key
    taken = [key, *jax.random.split(key)]
    data = [jax.random.key_data(k).tolist() for k in (*taken, aggregator_key)]
    assert data[-1] not in data[:-1]


@pytest.mark.slow
def test_without_embeddings_cnfgnn_is_fed_avg_of_the_same_model(train, quick_jit):
    """A graph network whose last layer is held at 0 gives h_G = 0."""
    cnfgnn_ = cnfgnn(
        CNFGNNConfig(
            hidden_size=4,
            sampling_decay=5.0,
            participation=0.4,
            gn_layers=1,
            gn_mlp_sizes=(6, 6),
            client_rounds=2,
            client_batch_size=12,
            server_batch_size=5,  # as many steps as the clients'
            client_optimizer=TASK.optimizer,
            server_optimizer=OptimizerConfig("adam", 0.0),
        )
    )
    task = dataclasses.replace(TASK, embedding_size=4)
    averaging = fed_avg(FedAvgConfig(task, participation=0.4))
    split = cnfgnn_.init(jax.random.key(3), train)
    split.server_params["out"] = jax.tree.map(np.zeros_like, split.server_params["out"])
    plain = averaging.init(jax.random.key(3), train)
    models = plain.models | {"params": split.client_params}
    plain = plain._replace(models=models)
    split_round, plain_round = quick_jit(cnfgnn_.round), quick_jit(averaging.round)
    for number, key in enumerate(KEYS):
        assert int(split.num_steps) == 12 * number
        plain = plain._replace(num_rounds=jnp.int32(2 * number))  # the server's as well
        split, _ = split_round(split, train, key)
        plain, _ = plain_round(plain, train, jax.random.split(key)[0])
        jax.tree.map(
            lambda a, b: npt.assert_allclose(a, b, atol=1e-6),
            split.client_params,
            plain.models["params"],
        )
    forecasts = [
        algorithm.predict(state, train)
        for algorithm, state in ((cnfgnn_, split), (averaging, plain))
    ]
    npt.assert_allclose(*forecasts, rtol=1e-5)
