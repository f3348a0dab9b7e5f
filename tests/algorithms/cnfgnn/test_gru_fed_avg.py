"""GRU + FedAvg against loops over clients and steps."""

import jax
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.cnfgnn.cnfgnn import CNFGNNConfig, cnfgnn
from fedjax_graph.algorithms.cnfgnn.gru_fed_avg import GRUFedAvgConfig, gru_fed_avg
from fedjax_graph.core import aggregation
from fedjax_graph.models import seq2seq
from tests.algorithms import oracle
from tests.core.test_federated import cohort_of

pytestmark = pytest.mark.usefixtures("rolled_scans")

AGGREGATORS = {"weighted_mean": aggregation.weighted_mean, "none": aggregation.none}
CONFIG = GRUFedAvgConfig(
    hidden_size=4,
    batch_size=12,  # 26 windows: the last batch is ragged
    client_rounds=2,
    learning_rate=0.01,
    sampling_decay=5.0,
    participation=0.4,
)


@pytest.fixture(scope="module", params=AGGREGATORS)
def system(request, train, quick_jit):
    """(name of the aggregator, jitted round, first state)."""
    algorithm = gru_fed_avg(CONFIG, AGGREGATORS[request.param])
    state = algorithm.init(jax.random.key(0), train)
    return request.param, quick_jit(algorithm.round), state


def test_rounds_are_those_of_loops(system, train, quick_jit):
    name, round_, state = system
    start = jax.tree.map(lambda x: np.asarray(x[0]), state.client_params)
    model = seq2seq.Seq2Seq(CONFIG.hidden_size, 0)
    keys = [jax.random.key(10), jax.random.key(11)]
    rounds = oracle.fed_avg_rounds(
        oracle.Clients(model, CONFIG.learning_rate, quick_jit),
        start,
        train,
        keys,
        CONFIG,
        is_averaged=name == "weighted_mean",
    )
    for number, (key, (rows, loss)) in enumerate(zip(keys, rounds, strict=True)):
        state, metrics = round_(state, train, key)
        params = aggregation.broadcast(state.client_params, 5)
        expected = jax.tree.map(lambda *x: np.stack(x), *rows)
        jax.tree.map(
            lambda a, b: npt.assert_allclose(a, b, atol=2e-5), params, expected
        )
        npt.assert_allclose(metrics["train_loss"], loss, rtol=1e-4)
        assert int(state.num_steps) == 6 * (number + 1)
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


def test_without_embeddings_cnfgnn_is_fed_avg_of_the_same_model(train, quick_jit):
    """A graph network whose last layer is held at 0 gives h_G = 0."""
    shared = {"hidden_size": 4, "sampling_decay": 5.0, "participation": 0.4}
    cnfgnn_ = cnfgnn(
        CNFGNNConfig(
            **shared,
            gn_layers=1,
            gn_mlp_sizes=(6, 6),
            client_rounds=2,
            client_batch_size=12,
            client_learning_rate=0.01,
            server_learning_rate=0.0,
        )
    )
    averaging = gru_fed_avg(
        GRUFedAvgConfig(
            **shared,
            embedding_size=4,
            client_rounds=2,
            batch_size=12,
            learning_rate=0.01,
        )
    )
    split = cnfgnn_.init(jax.random.key(3), train)
    split.server_params["out"] = jax.tree.map(np.zeros_like, split.server_params["out"])
    plain = averaging.init(jax.random.key(3), train)
    plain = plain._replace(client_params=split.client_params)
    split_round, plain_round = quick_jit(cnfgnn_.round), quick_jit(averaging.round)
    for key in (jax.random.key(10), jax.random.key(11)):
        plain = plain._replace(num_steps=split.num_steps)  # the server's count as well
        split, _ = split_round(split, train, key)
        plain, _ = plain_round(plain, train, jax.random.split(key)[0])
        jax.tree.map(
            lambda a, b: npt.assert_allclose(a, b, atol=1e-6),
            split.client_params,
            plain.client_params,
        )
    forecasts = [
        algorithm.predict(state, train)
        for algorithm, state in ((cnfgnn_, split), (averaging, plain))
    ]
    npt.assert_allclose(*forecasts, rtol=1e-5)
