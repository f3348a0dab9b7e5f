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
from tests import client_graphs, dense_gcn, nodes
from tests.client_graphs import NUM_CLASSES, NUM_FEATURES, alone

KEY, TAU, RATE = jax.random.key(3), 0.3, 0.1
SGD = OptimizerConfig("sgd", RATE)
TASK = SubgraphTask(NUM_FEATURES, NUM_CLASSES, optimizer=SGD, local_steps=2)


@pytest.fixture(scope="module")
def train():
    return client_graphs.make_splits()["train"]


@pytest.fixture(scope="module")
def embeddings(train):
    """(h, h^g) [2, N, D] of client 0, of which node 0 has no edge."""
    return np.random.default_rng(0).normal(size=(2, train.features.shape[1], 4))


def cosine(x, y):
    return x @ y / (np.linalg.norm(x) * np.linalg.norm(y) or 1)


def softmax(x):
    return np.exp(x) / np.sum(np.exp(x))


def contrasted(h, taught, labels, trained):
    """Eq. 1."""
    nodes, losses = np.flatnonzero(trained), []
    for i in nodes:
        e = {j: np.exp(cosine(h[i], taught[j]) / TAU) for j in nodes}
        others = sum(e[k] for k in nodes if labels[k] != labels[i])
        alike = [e[p] for p in nodes if labels[p] == labels[i]]
        losses.append(np.mean([-np.log(x / (x + others)) for x in alike]))
    return np.mean(losses)


def distilled(h, taught, own):
    """Eqs. 2 and 3."""
    divergences = []
    for i in np.unique(own.receivers):
        near = own.senders[own.receivers == i]
        q, theirs = (
            softmax(np.array([cosine(x[i], x[j]) for j in near]) / TAU)
            for x in (h, taught)
        )
        divergences.append(np.sum(theirs * np.log(theirs / q)))
    return np.mean(divergences)


def distilled_along_edges(h, taught, own):
    divergences = []
    for i, j in zip(own.senders, own.receivers, strict=True):
        q, theirs = (softmax(np.abs(x[i] - x[j]) / TAU) for x in (h, taught))
        divergences.append(np.sum(theirs * np.log(theirs / q)))
    return np.mean(divergences)


DISTANCES = {  # structure -> ours, by hand
    "similarity": (methods.similarity_distance, distilled),
    "edges": (methods.edge_distance, distilled_along_edges),
}


def test_nodes_of_one_class_attract(embeddings):
    h, taught = embeddings
    labels = np.array([0, 1, 0, 1, 2, 0, 0, 1])
    trained = np.array([1, 1, 1, 0, 1, 0, 0, 0])
    found = methods.contrast(h, taught, labels, trained.astype(float), TAU)
    npt.assert_allclose(found, contrasted(h, taught, labels, trained), rtol=1e-4)


def test_a_client_of_one_class_has_nothing_to_contrast(embeddings):
    def loss(h):
        return methods.contrast(h, h, jnp.zeros(8, int), jnp.ones(8), TAU)

    value, slope = jax.value_and_grad(loss)(jnp.asarray(embeddings[0]))
    assert value == 0 and not np.any(slope)


@pytest.mark.parametrize("structure", DISTANCES)
def test_what_neighbours_are_to_each_other_is_distilled(train, embeddings, structure):
    (distance, by_hand), (h, taught) = DISTANCES[structure], embeddings
    padded = jax.tree.map(lambda x: x[0], train)
    found = distance(h, taught, padded, TAU)
    npt.assert_allclose(found, by_hand(h, taught, alone(train, 0)), rtol=1e-4)
    if structure == "similarity":
        grad = jax.grad(distance)(jnp.zeros_like(h), h, padded, TAU)
        assert np.isfinite(grad).all()


def test_shares_of_edges_and_of_whole_features_are_dropped(train):
    own = jax.tree.map(lambda x: x[0], train)
    own = own._replace(edge_weights=jnp.ones(4000), features=jnp.ones((3, 2000)))
    changed = methods.augment(KEY, own, 0.8, 0.5)
    npt.assert_allclose(jnp.mean(changed.edge_weights), 0.2, atol=0.03)
    npt.assert_allclose(jnp.mean(changed.features), 0.5, atol=0.05)
    npt.assert_array_equal(changed.features[0], changed.features[2])
    same = methods.augment(KEY, own, 0.0, 0.0)
    npt.assert_array_equal(same.edge_weights, own.edge_weights)


def without_first(key, own, edges, features):
    """What `augment` returns, but not at random: the first ones are dropped."""
    del key
    places = np.arange(own.senders.shape[-1]), np.arange(NUM_FEATURES)
    return own._replace(
        edge_weights=own.edge_weights * (places[0] >= 10 * edges),
        features=own.features * (places[1] >= NUM_FEATURES * features),
    )


@pytest.mark.parametrize("structure", DISTANCES)
def test_a_step_is_one_along_the_papers_loss(
    train, draw_params, quick_jit, monkeypatch, structure
):
    """Eq. 4: the server's view lacks an edge and a feature, the client's four each."""
    monkeypatch.setattr(methods, "augment", without_first)
    data = jax.tree.map(lambda x: x[:1], train._replace(is_trained=train.is_real))
    task = dataclasses.replace(TASK, hidden_size=4, local_steps=1)
    config = FGSSLConfig(
        task,
        contrast_weight=0.7,
        structure_weight=1.3,
        temperature=TAU,
        structure=structure,
        server_edges=0.1,
        server_features=0.1,
        client_edges=0.4,
        client_features=0.6,
    )
    algorithm = fgssl(config)
    before = algorithm.init(KEY, data)
    params = draw_params(lambda key: before.models["params"])
    before = before._replace(models=before.models | {"params": params})
    after, _ = quick_jit(algorithm.round)(before, data, KEY)

    own = alone(data, 0)
    weak, strong = (
        alone(without_first(None, data, *x), 0) for x in ((0.1, 0.1), (0.4, 0.6))
    )
    w, new = (dense_gcn.row(state.models["params"], 0) for state in (before, after))
    taught, _ = dense_gcn.layers(weak, w)

    def loss(params):
        h, _ = dense_gcn.layers(strong, params)
        semantic = contrasted(h, taught, own.labels, own.is_trained)
        structural = DISTANCES[structure][1](h, taught, own)
        return dense_gcn.cross_entropy(own, params) + 0.7 * semantic + 1.3 * structural

    gradient = jax.tree.map(lambda a, b: (a - b) / RATE, w, new)
    dense_gcn.assert_gradient(loss, w, gradient)


def test_the_two_views_are_drawn_apart(train, quick_jit):
    """Of one draw and one share both would be the same, with nothing to distil."""
    sides, kinds = ("client", "server"), ("edges", "features")
    shares = {f"{side}_{kind}": 0.5 for side in sides for kind in kinds}
    losses = []
    for weight in (0.0, 1.0):
        config = FGSSLConfig(
            TASK, contrast_weight=0.0, structure_weight=weight, **shares
        )
        algorithm = fgssl(config)
        state = algorithm.init(KEY, train)
        losses.append(quick_jit(algorithm.round)(state, train, KEY)[1]["train_loss"])
    assert losses[1] > losses[0] + 1e-3


def test_the_default_shares_are_those_written_down():
    config = FGSSLConfig(TASK)
    assert (config.client_edges, config.client_features) == (0.8, 0.5)
    assert (config.server_edges, config.server_features) == (0.3, 0.3)


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
