"""GRU + FMTL against loops over edges and clients, and against GRU (local)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.cnfgnn import byte_formulas
from fedjax_graph.algorithms.cnfgnn.gru_fmtl import (
    REGULARISERS,
    GRUFMTLConfig,
    gru_fmtl,
)
from fedjax_graph.algorithms.local import local_training
from fedjax_graph.core import communication, graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models import seq2seq
from fedjax_graph.tasks.traffic_seq2seq import TrafficSeq2SeqTask
from tests.algorithms import oracle

pytestmark = pytest.mark.usefixtures("rolled_scans")

TASK = TrafficSeq2SeqTask(
    hidden_size=4,
    batch_size=12,  # 26 windows: the last batch is ragged
    local_epochs=2,
    optimizer=OptimizerConfig("adam", 0.01),
    sampling_decay=5.0,
)
KEYS = (jax.random.key(10), jax.random.key(11))


def loop_over_edges(regulariser, weight, adjacency, client, params, communicated):
    """The gradient of client i's term, in float64.

    Args:
      adjacency: [K, K], [i, j] = a_ij.
      params: w_i, a pytree.
      communicated: w_j, pytree of [K, ...].
    """
    own = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    total = jax.tree.map(np.zeros_like, own)
    for other in range(len(adjacency)):
        if other == client or adjacency[client, other] == 0:
            continue
        gap = jax.tree.map(lambda x, w, j=other: x - w[j], own, communicated)
        factor = 2 * weight * float(adjacency[client, other])
        if regulariser == "frobenius":
            norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(gap)))
            factor = factor / 2 / norm if norm > 0 else 0.0
        total = jax.tree.map(lambda t, x, f=factor: t + f * x, total, gap)
    return total


def random_models(seed, num=5):
    rng = np.random.default_rng(seed)
    return {
        "kernel": rng.normal(size=(num, 3, 4)).astype(np.float32),
        "bias": rng.normal(size=(num, 5)).astype(np.float32),
    }


def pulls(regulariser, weight, params, communicated, data):
    """What each client's pull adds to a gradient of 0."""
    communicate, pull_of = REGULARISERS[regulariser]
    neighbours, shared = communicate(communicated, data)

    def one(params, neighbours):
        pull = pull_of(weight, neighbours, shared)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return pull.update(zeros, pull.init(params), params)[0]

    return jax.vmap(one)(params, neighbours)


@pytest.mark.parametrize("columns_per_chunk", [4096, 3])
@pytest.mark.parametrize("regulariser", REGULARISERS)
def test_the_pull_is_that_of_a_loop_over_edges(
    regulariser, columns_per_chunk, train, network, monkeypatch
):
    monkeypatch.setattr(graphs, "COLUMNS_PER_CHUNK", columns_per_chunk)
    params, communicated = random_models(0), random_models(1)
    ours = pulls(regulariser, 0.3, params, communicated, train)
    for client in range(5):
        expected = loop_over_edges(
            regulariser,
            0.3,
            network.adjacency,
            client,
            jax.tree.map(lambda x, i=client: x[i], params),
            communicated,
        )
        jax.tree.map(
            lambda a, b, i=client: npt.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6),
            ours,
            expected,
        )
    is_pulled = [np.any(ours["bias"][client]) for client in range(5)]
    assert is_pulled == [True, True, False, True, False]  # 0 <-> 1 -> 2 <- 3, 4 alone


@pytest.mark.parametrize("regulariser", REGULARISERS)
def test_equal_models_do_not_pull_each_other(regulariser, train):
    models = jax.tree.map(lambda x: np.repeat(x[:1], 5, axis=0), random_models(0))
    ours = pulls(regulariser, 0.3, models, models, train)
    jax.tree.map(lambda x: npt.assert_allclose(x, 0, atol=1e-6), ours)


def test_small_distances_between_large_models_have_the_right_gradient(train, network):
    """Inner products about the origin would cancel to rounding here."""
    base = jax.tree.map(lambda x: 30 * x[:1], random_models(0))
    near, nearer = (
        jax.tree.map(lambda b, x: (b + 0.05 * x).astype(np.float32), base, more)
        for more in (random_models(1), random_models(2))
    )
    ours = pulls("frobenius", 0.01, near, nearer, train)
    for client in (0, 1, 3):
        own = jax.tree.map(lambda x, i=client: x[i], near)
        expected = loop_over_edges(
            "frobenius", 0.01, network.adjacency, client, own, nearer
        )
        jax.tree.map(
            lambda a, b, i=client: npt.assert_allclose(a[i], b, rtol=1e-3, atol=1e-6),
            ours,
            expected,
        )


in_rounds = pytest.mark.parametrize(
    "regulariser",
    ["laplacian", pytest.param("frobenius", marks=pytest.mark.slow)],
)


@in_rounds
def test_rounds_are_those_of_loops(regulariser, train, network, quick_jit):
    config = GRUFMTLConfig(TASK, regulariser=regulariser, weight=0.5)
    algorithm = gru_fmtl(config)
    state, round_ = algorithm.init(jax.random.key(1), train), quick_jit(algorithm.round)
    loop = oracle.Clients(seq2seq.Seq2Seq(4, 0), 0.01, quick_jit)
    embeddings = np.zeros((5, 26, 0), np.float32)
    params = state.models["params"]
    rows = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(5)]
    for number, key in enumerate(KEYS):
        state, metrics = round_(state, train, key)
        communicated = jax.tree.map(lambda *x: np.stack(x), *rows)
        trained = [
            loop.update(
                rows[client],
                train,
                client,
                embeddings,
                oracle.draw_batches(
                    jax.random.fold_in(jax.random.split(key)[1], client),
                    26,
                    12,
                    num_epochs=2,
                    first_step=6 * number,
                    decay=5.0,
                ),
                pull=functools.partial(
                    loop_over_edges,
                    regulariser,
                    0.5,
                    network.adjacency,
                    client,
                    communicated=communicated,
                ),
            )
            for client in range(5)
        ]
        rows, losses = zip(*trained, strict=True)
        expected = jax.tree.map(lambda *x: np.stack(x), *rows)
        jax.tree.map(
            lambda a, b: npt.assert_allclose(a, b, atol=2e-4),
            state.models["params"],
            expected,
        )
        weighted = np.average(losses, weights=train.client_weights)
        npt.assert_allclose(metrics["train_loss"], weighted, rtol=1e-3)
        assert int(state.num_rounds) == number + 1


@in_rounds
def test_without_weight_it_is_local_training(regulariser, train, quick_jit):
    algorithms = [
        gru_fmtl(GRUFMTLConfig(TASK, regulariser=regulariser, weight=0.0)),
        local_training(FederatedConfig(TASK)),
    ]
    states = []
    for algorithm in algorithms:
        state = algorithm.init(jax.random.key(0), train)
        round_ = quick_jit(algorithm.round)
        for key in KEYS:
            state, _ = round_(state, train, key)
        states.append(state)
    jax.tree.map(functools.partial(npt.assert_allclose, atol=1e-6), *states)


def largest_array(jaxpr):
    sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars]
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                sizes.append(largest_array(value.jaxpr))
    return max(sizes)


def test_the_neighbour_sum_never_holds_a_row_for_each_edge():
    num_nodes, width = 30, 100_000
    graph = graphs.from_adjacency(np.ones((num_nodes, num_nodes), np.float32))
    assert len(graph.neighbours) == num_nodes * (num_nodes - 1)
    program = jax.make_jaxpr(graphs.neighbour_sum)(
        graph, jax.ShapeDtypeStruct((num_nodes, width), jnp.float32)
    )
    chunk = graphs.COLUMNS_PER_CHUNK
    most = max(num_nodes * (width + chunk), len(graph.neighbours) * chunk)
    assert largest_array(program.jaxpr) <= most < len(graph.neighbours) * width


@pytest.mark.parametrize("local_epochs", [1, 5])
def test_each_edge_costs_a_model_in_a_round(train, local_epochs):
    task = dataclasses.replace(TASK, local_epochs=local_epochs)
    algorithm = gru_fmtl(GRUFMTLConfig(task))
    state = jax.eval_shape(algorithm.init, KEYS[0], train)
    exchanged = communication.bytes_per_round(algorithm.round, state, train, KEYS[0])
    model = sum(4 * x.size // 5 for x in jax.tree.leaves(state.models))
    total = byte_formulas.multi_task_total(1, num_edges=4, model_bytes=model)
    assert exchanged == communication.Bytes(up=0, down=total)


def test_an_unknown_regulariser_is_refused():
    with pytest.raises(InputError, match="expected 'laplacian' or 'frobenius'"):
        GRUFMTLConfig(regulariser="ridge")
