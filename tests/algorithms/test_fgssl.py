"""FGSSL's terms against loops over nodes, and its rounds against FedAvg's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms import fgssl as methods
from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.algorithms.fgssl import FGSSLConfig, fgssl
from fedjax_graph.core.communication import bytes_per_round
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.nodes import NodeTask
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests import client_graphs, nodes
from tests.client_graphs import NUM_CLASSES, NUM_FEATURES, alone

KEY, TAU = jax.random.key(3), 0.3
SGD = OptimizerConfig("sgd", 0.1)
TASK = SubgraphTask(NUM_FEATURES, NUM_CLASSES, optimizer=SGD, local_steps=2)


@pytest.fixture(scope="module")
def train():
    return client_graphs.make_splits()["train"]


@pytest.fixture(scope="module")
def embeddings(train):
    """(h, h^g) [2, N, D] of client 0, of which node 0 has no edge."""
    return np.random.default_rng(0).normal(size=(2, train.features.shape[1], 4))


def cosine(x, y):
    return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


def softmax(x):
    return np.exp(x) / np.sum(np.exp(x))


def test_nodes_of_one_class_attract(embeddings):
    h, taught = embeddings
    labels = np.array([0, 1, 0, 1, 2, 0, 0, 1])
    trained = np.array([1, 1, 1, 0, 1, 0, 0, 0])
    nodes, losses = np.flatnonzero(trained), []
    for i in nodes:
        e = {j: np.exp(cosine(h[i], taught[j]) / TAU) for j in nodes}
        others = sum(e[k] for k in nodes if labels[k] != labels[i])
        alike = [e[p] for p in nodes if labels[p] == labels[i]]
        losses.append(np.mean([-np.log(x / (x + others)) for x in alike]))
    found = methods.contrast(h, taught, labels, trained.astype(float), TAU)
    npt.assert_allclose(found, np.mean(losses), rtol=1e-4)


def test_a_client_of_one_class_has_nothing_to_contrast(embeddings):
    def loss(h):
        return methods.contrast(h, h, jnp.zeros(8, int), jnp.ones(8), TAU)

    value, slope = jax.value_and_grad(loss)(jnp.asarray(embeddings[0]))
    assert value == 0 and not np.any(slope)


def test_the_similarities_of_neighbours_are_distilled(train, embeddings):
    own, (h, taught) = alone(train, 0), embeddings
    divergences = []
    for i in np.unique(own.receivers):
        near = own.senders[own.receivers == i]
        q, theirs = (
            softmax(np.array([cosine(x[i], x[j]) for j in near]) / TAU)
            for x in (h, taught)
        )
        divergences.append(np.sum(theirs * np.log(theirs / q)))
    padded = jax.tree.map(lambda x: x[0], train)
    found = methods.similarity_distance(h, taught, padded, TAU)
    npt.assert_allclose(found, np.mean(divergences), rtol=1e-4)
    grad = jax.grad(methods.similarity_distance)(jnp.zeros_like(h), h, padded, TAU)
    assert np.isfinite(grad).all()


def test_the_differences_along_edges_are_distilled(train, embeddings):
    own, (h, taught) = alone(train, 0), embeddings
    divergences = []
    for i, j in zip(own.senders, own.receivers, strict=True):
        q, theirs = (softmax(np.abs(x[i] - x[j]) / TAU) for x in (h, taught))
        divergences.append(np.sum(theirs * np.log(theirs / q)))
    padded = jax.tree.map(lambda x: x[0], train)
    found = methods.edge_distance(h, taught, padded, TAU)
    npt.assert_allclose(found, np.mean(divergences), rtol=1e-4)


def test_shares_of_edges_and_of_whole_features_are_dropped(train):
    own = jax.tree.map(lambda x: x[0], train)
    own = own._replace(edge_weights=jnp.ones(4000), features=jnp.ones((3, 2000)))
    changed = methods.augment(KEY, own, 0.8, 0.5)
    npt.assert_allclose(jnp.mean(changed.edge_weights), 0.2, atol=0.03)
    npt.assert_allclose(jnp.mean(changed.features), 0.5, atol=0.05)
    npt.assert_array_equal(changed.features[0], changed.features[2])
    same = methods.augment(KEY, own, 0.0, 0.0)
    npt.assert_array_equal(same.edge_weights, own.edge_weights)


def test_without_its_terms_it_is_fed_avg_bit_for_bit(train, quick_jit):
    task = dataclasses.replace(TASK, dropout=0.5)
    ours = fgssl(FGSSLConfig(task, contrast_weight=0.0, structure_weight=0.0))
    plain = fed_avg(FedAvgConfig(task))
    states = [
        quick_jit(a.round)(a.init(KEY, train), train, KEY)[0] for a in (ours, plain)
    ]
    jax.tree.map(npt.assert_array_equal, *(state.models for state in states))


def test_a_round_exchanges_what_fed_avg_does(train):
    costs = [
        bytes_per_round(a.round, a.init(KEY, train), train, KEY)
        for a in (fgssl(FGSSLConfig(TASK)), fed_avg(FedAvgConfig(TASK)))
    ]
    assert costs[0] == costs[1]


def test_a_task_without_graphs_is_refused():
    train = nodes.make_splits()["train"]
    algorithm = fgssl(FGSSLConfig(NodeTask(nodes.NUM_FEATURES, nodes.NUM_CLASSES)))
    state = algorithm.init(KEY, train)
    with pytest.raises(InputError, match="fgssl: clients of the task 'nodes' hold no"):
        jax.eval_shape(algorithm.round, state, train, KEY)
