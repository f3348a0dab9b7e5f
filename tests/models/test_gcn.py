"""GCN and SGC against dense algebra."""

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.models.gcn import GCN, SGC, propagate

NUM_NODES, NUM_FEATURES, NUM_CLASSES = 12, 7, 3


@pytest.fixture
def dense():
    """S of a random graph whose last node is isolated, and features."""
    rng = np.random.default_rng(2)
    adjacency = np.triu(rng.random((NUM_NODES, NUM_NODES)) < 0.3, 1).astype(float)
    adjacency[:, -1] = 0
    adjacency += adjacency.T + np.eye(NUM_NODES)
    scale = adjacency.sum(axis=1) ** -0.5
    return scale[:, None] * adjacency * scale, rng.normal(
        size=(NUM_NODES, NUM_FEATURES)
    )


def to_graph(propagation, nodes):
    receivers, senders = np.nonzero(propagation)
    return jraph.GraphsTuple(
        nodes=jnp.asarray(nodes, jnp.float32),
        edges=jnp.asarray(propagation[receivers, senders], jnp.float32),
        senders=jnp.asarray(senders),
        receivers=jnp.asarray(receivers),
        globals=None,
        n_node=jnp.array([len(nodes)]),
        n_edge=jnp.array([len(senders)]),
    )


def drawn(model, graph, draw_params):
    return draw_params(lambda key: model.init(key, graph)["params"])


def test_propagate_is_a_product(dense):
    S, X = dense
    npt.assert_allclose(propagate(to_graph(S, X)), S @ X, atol=1e-5)


def test_gcn_against_dense_algebra(dense, draw_params):
    S, X = dense
    model, graph = GCN(NUM_CLASSES, hidden_size=5), to_graph(S, S @ X)
    params = drawn(model, graph, draw_params)
    assert {k: v.shape for k, v in params["hidden"].items()} == {
        "kernel": (NUM_FEATURES, 5),
        "bias": (5,),
    }
    hidden = S @ X @ params["hidden"]["kernel"] + params["hidden"]["bias"]
    head = params["head"]
    expected = S @ np.maximum(hidden, 0) @ head["kernel"] + head["bias"]
    npt.assert_allclose(model.apply({"params": params}, graph), expected, atol=1e-5)


def test_sgc_against_dense_algebra(dense, draw_params):
    S, X = dense
    model, graph = SGC(NUM_CLASSES), to_graph(S, S @ S @ X)
    params = drawn(model, graph, draw_params)
    assert list(params) == ["head"] and list(params["head"]) == ["kernel"]
    expected = S @ S @ X @ params["head"]["kernel"]
    npt.assert_allclose(model.apply({"params": params}, graph), expected, atol=1e-5)


def test_dropout_is_of_hidden_units_in_training_alone(dense, draw_params):
    """With a head of ones, a logit is a sum of hidden units, each 0 or doubled."""
    S, X = dense
    model, graph = GCN(1, hidden_size=4), to_graph(np.eye(NUM_NODES), S @ X)
    params = drawn(model, graph, draw_params)
    params["head"] = {"kernel": np.ones((4, 1)), "bias": np.zeros(1)}
    hidden = S @ X @ params["hidden"]["kernel"] + params["hidden"]["bias"]
    hidden = np.maximum(hidden, 0)
    choices = 2 * np.array(np.meshgrid(*[[0, 1]] * 4)).reshape(4, -1)  # 16 masks

    def logits(key):
        rngs = {"dropout": key}
        return model.apply({"params": params}, graph, is_training=True, rngs=rngs)

    trained = [logits(jax.random.key(seed))[:, 0] for seed in (0, 1)]
    assert not np.allclose(*trained)
    for each in trained:
        gaps = np.abs(each[:, None] - hidden @ choices).min(axis=1)
        npt.assert_allclose(gaps, 0, atol=1e-5)
    still = model.apply({"params": params}, graph)[:, 0]
    npt.assert_allclose(still, hidden.sum(axis=1), atol=1e-5)
