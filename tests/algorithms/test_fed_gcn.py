"""FedGCN's exchange against dense algebra on the whole graph."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fed_gcn import FedGCNConfig, fed_gcn
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import node_dataset
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests import client_graphs

HIDDEN = 4
TASK = SubgraphTask(
    client_graphs.NUM_FEATURES, client_graphs.NUM_CLASSES, hidden_size=HIDDEN
)


@pytest.fixture(scope="module")
def data():
    settings = {"outside_neighbours": True, "is_linked": True}
    return client_graphs.make_splits(**settings)["train"]


def dense(data, params, num_hops):
    """Probabilities of all nodes of the whole graph, [nodes, classes], by client."""
    dataset = client_graphs.make_dataset()
    matrix = node_dataset.adjacency(dataset).toarray() + np.eye(len(dataset.labels))
    scale = matrix.sum(axis=1) ** -0.5
    spread = scale[:, None] * matrix * scale
    hidden, head = params["hidden"], params["head"]
    x = spread @ dataset.features @ hidden["kernel"] + hidden["bias"]
    x = np.maximum(x, 0) @ head["kernel"]
    for k in range(len(data.client_ids)):
        own = data.node_ids[k][np.asarray(data.is_own[k]) > 0]
        is_read = np.isin(np.arange(len(x)), own) if num_hops == 1 else np.ones(len(x))
        logits = spread @ (x * is_read[:, None]) + head["bias"]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        yield own, (odds / odds.sum(axis=1, keepdims=True))[own]


def begun(data, num_hops, draw_params, quick_jit):
    """(method, its first state with drawn weights, those of the one model)."""
    method = fed_gcn(FedGCNConfig(TASK, num_hops=num_hops))
    state = quick_jit(method.init)(jax.random.key(0), data)
    params = draw_params(lambda key: state.server.models["params"])
    models = state.server.models | {"params": params}
    state = state._replace(server=state.server._replace(models=models))
    return method, state, jax.tree.map(lambda x: x[0], params)


@pytest.mark.parametrize("num_hops", [1, 2])
def test_outputs_are_those_of_the_whole_graph(data, num_hops, draw_params, quick_jit):
    method, state, params = begun(data, num_hops, draw_params, quick_jit)
    outputs = np.asarray(quick_jit(method.predict)(state, data))
    for found, (own, expected) in zip(
        outputs, dense(data, params, num_hops), strict=True
    ):
        npt.assert_allclose(found[: len(own)], expected, rtol=1e-4, atol=1e-6)


def test_clients_train_and_are_scored_on_the_whole_graph(data, draw_params, quick_jit):
    """The loss of a round's only step is that of the weights it began with."""
    method, state, params = begun(data, 2, draw_params, quick_jit)
    _, metrics = quick_jit(method.round)(state, data, jax.random.key(1))
    scores = quick_jit(method.evaluate)(state, data)
    trained, scored = [], []
    for k, (own, probabilities) in enumerate(dense(data, params, 2)):
        labels = client_graphs.make_dataset().labels[own]
        losses = -np.log(probabilities[np.arange(len(own)), labels])
        is_own = np.asarray(data.is_own[k]) > 0
        for kept, mask in ((trained, data.is_trained), (scored, data.is_scored)):
            kept.append(losses[np.asarray(mask[k])[is_own] > 0])
    of_each = [own.mean() for own in trained]
    expected = np.average(of_each, weights=data.client_weights)
    npt.assert_allclose(metrics["train_loss"], expected, rtol=1e-5)
    everybody = np.concatenate(scored).mean()
    npt.assert_allclose(scores["cross_entropy"], everybody, rtol=1e-5)


@pytest.mark.parametrize("num_hops", [1, 2])
def test_padded_edges_change_nothing(data, num_hops, quick_jit):
    def extend(x, fill=0):
        return jnp.pad(x, ((0, 0), (0, 3)), constant_values=fill)

    longer = data._replace(
        senders=extend(data.senders),
        receivers=extend(data.receivers, data.labels.shape[1] - 1),
        edge_weights=extend(data.edge_weights),
    )
    method = fed_gcn(FedGCNConfig(TASK, num_hops=num_hops))

    @quick_jit
    def outputs(data):
        return method.predict(method.init(jax.random.key(0), data), data)

    npt.assert_allclose(outputs(longer), outputs(data), rtol=1e-4, atol=1e-6)


def test_clients_that_do_not_know_of_others_are_refused():
    alone = client_graphs.make_splits()["train"]
    with pytest.raises(InputError, match="outside_neighbours"):
        fed_gcn(FedGCNConfig(TASK)).init(jax.random.key(0), alone)
