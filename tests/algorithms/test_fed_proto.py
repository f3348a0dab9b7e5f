"""FedProto against prototypes by hand, its loss in NumPy, and local training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fed_proto import (
    FedProtoConfig,
    Prototypes,
    fed_proto,
    merge,
    prototypes_of,
)
from fedjax_graph.algorithms.local import local_training
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.communication import bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.task import Embedded
from fedjax_graph.tasks.subgraphs import SubgraphTask
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask
from tests import client_graphs, dense_gcn
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES, alone

RATE, KEY, WIDTH = 0.1, jax.random.key(3), 64
TASK = SubgraphTask(NUM_FEATURES, NUM_CLASSES, optimizer=OptimizerConfig("sgd", RATE))


@pytest.fixture(scope="module")
def train():
    return client_graphs.make_splits()["train"]


def test_prototypes_are_means_over_the_training_examples_of_a_class():
    seen = Embedded(
        jnp.array([[1.0, 2], [3, 6], [7, 7], [5, 1]]),
        jnp.array([0, 0, 0, 2]),
        jnp.array([1.0, 1, 0, 1]),
        jnp.ones(4),
    )
    means, counts = prototypes_of(seen, 3)
    npt.assert_allclose(means, [[2, 4], [0, 0], [5, 1]])
    npt.assert_allclose(counts, [2, 0, 1])


def test_the_server_averages_over_the_clients_that_have_a_class():
    """The third client has weight 0; of the last class nobody has an example."""
    means = jnp.array([[[1.0], [4], [9]], [[5.0], [0], [9]], [[99.0], [99], [99]]])
    counts = jnp.array([[1, 2, 0], [3, 0, 0], [9, 9, 9]])
    before = Prototypes(jnp.full((1, 3, 1), 7.0), jnp.full((1, 3), 2))
    cohort = Cohort(jnp.arange(3), jnp.array([2.0, 5, 0]))
    merged = merge(before)({"prototypes": Prototypes(means, counts)}, cohort)
    npt.assert_allclose(merged["prototypes"].means, [[[4], [4], [7]]])
    npt.assert_allclose(merged["prototypes"].counts, [[4, 2, 2]])


def class_means(z, own):
    """{class: mean} over the training nodes."""
    chosen = own.is_trained > 0
    kinds = np.unique(own.labels[chosen])
    return {k: z[chosen & (own.labels == k)].mean(axis=0) for k in kinds}


@pytest.mark.parametrize("distance", ["prototypes", "examples"])
def test_a_step_is_one_along_the_papers_loss(train, draw_params, quick_jit, distance):
    weight, known = 0.8, [1, 2]  # the server has no prototype of class 0
    config = FedProtoConfig(TASK, prototype_weight=weight, distance=distance)
    algorithm = fed_proto(config)
    init = TASK.build().init
    models = [draw_params(init, seed) for seed in range(NUM_CLIENTS)]
    targets = np.random.default_rng(1).uniform(size=(1, NUM_CLASSES, WIDTH))
    counts = np.isin(np.arange(NUM_CLASSES), known).astype(np.float32)[None]
    before = algorithm.init(KEY, train)._replace(
        models=jax.tree.map(lambda *x: jnp.stack(x), *models),
        prototypes=Prototypes(jnp.asarray(targets, jnp.float32), jnp.asarray(counts)),
    )
    after, _ = quick_jit(algorithm.round)(before, train, KEY)
    sums, totals = np.zeros((NUM_CLASSES, WIDTH)), np.zeros(NUM_CLASSES)
    for client in range(NUM_CLIENTS):
        own = alone(train, client)
        v, new = (
            dense_gcn.row(state.models["params"], client) for state in (before, after)
        )

        def loss(params, own=own):
            z, total = dense_gcn.layers(own, params)[0], 0.0
            for kind, mean in class_means(z, own).items():
                if kind in known:
                    is_kind = (own.is_trained > 0) & (own.labels == kind)
                    rows = z[is_kind] if distance == "examples" else mean[None]
                    total += np.mean((rows - targets[0, kind]) ** 2)
            return dense_gcn.cross_entropy(own, params) + weight * total

        gradient = jax.tree.map(lambda a, b: (a - b) / RATE, v, new)
        dense_gcn.assert_gradient(loss, v, gradient)
        z = dense_gcn.layers(own, new)[0]
        for kind, mean in class_means(z, own).items():
            size = np.sum((own.is_trained > 0) & (own.labels == kind))
            sums[kind], totals[kind] = sums[kind] + size * mean, totals[kind] + size
    expected = np.where(
        totals[:, None] > 0, sums / np.maximum(totals, 1)[:, None], targets[0]
    )
    npt.assert_allclose(after.prototypes.means[0], expected, rtol=1e-4, atol=1e-5)


def test_without_a_penalty_clients_train_alone_bit_for_bit(train, quick_jit):
    task = dataclasses.replace(TASK, local_steps=2, dropout=0.5)
    ours = fed_proto(FedProtoConfig(task, prototype_weight=0.0))
    alone_ = local_training(FederatedConfig(task))
    states = [
        quick_jit(a.round)(a.init(KEY, train), train, KEY)[0] for a in (ours, alone_)
    ]
    jax.tree.map(npt.assert_array_equal, *(state.models for state in states))


def test_a_round_exchanges_prototypes_and_their_counts(train):
    algorithm = fed_proto(FedProtoConfig(TASK, participation=0.6))
    cost = bytes_per_round(algorithm.round, algorithm.init(KEY, train), train, KEY)
    assert cost.up == cost.down == 3 * 4 * NUM_CLASSES * (WIDTH + 1)


def test_a_task_without_embeddings_is_refused():
    with pytest.raises(InputError, match="fed_proto: the task 'traffic_rnn' has no em"):
        fed_proto(FedProtoConfig(TrafficRNNTask()))
