"""FedGCN's exchange against dense algebra on the whole graph."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.algorithms.fed_gcn import FedGCNConfig, fed_gcn
from fedjax_graph.core import client_rows, mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import client_subgraphs, node_dataset
from fedjax_graph.driver import programs
from fedjax_graph.driver.client_store import ClientStore
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
    """(method, its first state with drawn weights, its data, those of the model)."""
    method = fed_gcn(FedGCNConfig(TASK, num_hops=num_hops))
    told = quick_jit(method.prepared)(data)
    state = method.init(jax.random.key(0), told)
    params = draw_params(lambda key: state.models["params"])
    state = state._replace(models=state.models | {"params": params})
    return method, state, told, jax.tree.map(lambda x: x[0], params)


@pytest.mark.parametrize("num_hops", [1, 2])
def test_outputs_are_those_of_the_whole_graph(data, num_hops, draw_params, quick_jit):
    method, state, told, params = begun(data, num_hops, draw_params, quick_jit)
    outputs = np.asarray(quick_jit(method.predict)(state, told))
    for found, (own, expected) in zip(
        outputs, dense(data, params, num_hops), strict=True
    ):
        npt.assert_allclose(found[: len(own)], expected, rtol=1e-4, atol=1e-6)


def test_clients_train_and_are_scored_on_the_whole_graph(data, draw_params, quick_jit):
    """The loss of a round's only step is that of the weights it began with."""
    method, state, told, params = begun(data, 2, draw_params, quick_jit)
    _, metrics = quick_jit(method.round)(state, told, jax.random.key(1))
    scores = quick_jit(method.evaluate)(state, told)
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


@pytest.mark.parametrize("num_devices", [1, 2])
def test_splits_with_one_graph_share_what_clients_exchange(num_devices):
    """Clients one after another, and by devices."""
    settings = {"outside_neighbours": True, "is_linked": True}
    splits = client_graphs.make_splits(**settings)
    method = fed_gcn(FedGCNConfig(TASK, clients_per_chunk=1))
    alone = method.prepared(splits["train"])
    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:num_devices])):
        found = programs.exchange(method, client_rows.put(splits))
        ours = jax.tree.map(np.asarray, client_rows.whole(found["test"]))
    for field in ("features", "senders", "receivers", "edge_weights"):
        assert len({id(getattr(split, field)) for split in found.values()}) == 1
        pair = (getattr(x, field) for x in (ours, alone))
        jax.tree.map(lambda x, y: npt.assert_allclose(x, y, rtol=1e-6), *pair)


def test_a_store_of_clients_trains_what_they_exchanged(data, quick_jit):
    method = fed_gcn(FedGCNConfig(TASK))
    told = quick_jit(method.prepared)(data)._replace(graph=None)
    key, later = jax.random.key(0), jax.random.key(1)
    store = ClientStore(method._replace(exchange=None), told, key)
    everybody = np.arange(len(told.client_ids))
    metrics = store.round(everybody, later)
    state, expected = quick_jit(method.round)(method.init(key, told), told, later)
    npt.assert_allclose(metrics["train_loss"], expected["train_loss"], rtol=1e-6)
    found = store.gather(everybody)[0].models["params"]
    jax.tree.map(
        lambda x, y: npt.assert_allclose(x, y, atol=1e-6), found, state.models["params"]
    )


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
        data = method.prepared(data)
        return method.predict(method.init(jax.random.key(0), data), data)

    npt.assert_allclose(outputs(longer), outputs(data), rtol=1e-4, atol=1e-6)


def test_clients_that_do_not_know_of_others_are_refused():
    alone = client_graphs.make_splits()["train"]
    with pytest.raises(InputError, match="outside_neighbours"):
        fed_gcn(FedGCNConfig(TASK)).prepared(alone)


def test_clients_that_did_not_exchange_or_did_twice_are_refused(data, quick_jit):
    method, key = fed_gcn(FedGCNConfig(TASK)), jax.random.key(0)
    told = quick_jit(method.prepared)(data)
    state = jax.eval_shape(method.init, key, told)
    alone = client_graphs.make_splits()["train"]
    for other in (data, alone, client_subgraphs.with_spread_features({"": alone})[""]):
        calls = [
            (method.init, key, other),
            (method.round, state, other, key),
            (method.evaluate, state, other),
            (method.predict, state, other),
        ]
        for call in calls:
            with pytest.raises(InputError, match="did not exchange"):
                jax.eval_shape(*call)
    with pytest.raises(InputError, match="outside_neighbours"):
        method.prepared(told)
