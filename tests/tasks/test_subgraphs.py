"""Classification of whole subgraphs against dense algebra with gradients by hand."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.core.masked_rows import MaskedRows
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models.fixed_gnns import FixedGNN
from fedjax_graph.models.supernet import SuperNet
from fedjax_graph.tasks import subgraphs as tasks
from fedjax_graph.tasks.subgraphs import MONITORS, SubgraphTask
from tests import client_graphs
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES, alone

RATE, WIDTH = 0.8, 4
OF_2022 = {"space": "2022", "fusion": "leaves"}
CODE = (3, 2, 16, 5)  # GINConv, which has running statistics, and GCNConv of it
KEY = jax.random.key(3)
fitnesses = pytest.mark.parametrize("fitness", ["loss", "accuracy"])


def make_task(**changes):
    settings = {"local_steps": 3, "optimizer": OptimizerConfig("sgd", RATE)} | changes
    return SubgraphTask(NUM_FEATURES, NUM_CLASSES, **settings).build()


@pytest.fixture(scope="module")
def splits():
    return client_graphs.make_splits()


@pytest.fixture(scope="module")
def model(draw_params):
    """A model of `gcn`."""
    return draw_params(make_task().init)


def row(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def one(model):
    return jax.tree.map(lambda x: x[None], model)


def assert_trees_close(left, right, rtol=1e-4):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    close = functools.partial(npt.assert_allclose, rtol=rtol, atol=1e-5)
    jax.tree.map(close, left, right)


class Dense:
    """Two graph convolutions (`gcn`) on ONE client's subgraph, in NumPy."""

    def __init__(self, own):
        self.own = own
        adjacency = np.eye(len(own.labels))
        adjacency[own.receivers, own.senders] = 1
        scale = adjacency.sum(axis=1) ** -0.5
        self.propagation = scale[:, None] * adjacency * scale

    def layers(self, params):
        """(hidden units, logits)."""
        hidden, head = params["hidden"], params["head"]
        x = self.propagation @ self.own.features @ hidden["kernel"] + hidden["bias"]
        x = np.maximum(x, 0)
        return x, self.propagation @ x @ head["kernel"] + head["bias"]

    def probabilities(self, params):
        logits = self.layers(params)[-1]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def scores(self, params, mask):
        """(numbers of right and of all marked nodes, sum of their cross-entropies)."""
        chosen = np.flatnonzero(mask)
        own = self.probabilities(params)[chosen]
        labels = self.own.labels[chosen]
        entropies = -np.log(own[np.arange(len(own)), labels])
        return (own.argmax(axis=1) == labels).sum(), len(chosen), entropies.sum()

    def gradient(self, params):
        """Of the mean cross-entropy of the training nodes -> (loss, gradient)."""
        count = max(self.own.is_trained.sum(), 1)
        hidden, _ = self.layers(params)
        targets = np.eye(NUM_CLASSES)[self.own.labels]
        error = self.probabilities(params) - targets
        error *= self.own.is_trained[:, None] / count
        spread = self.propagation @ error
        error_hidden = (spread @ params["head"]["kernel"].T) * (hidden > 0)
        inner = self.propagation @ error_hidden
        gradient = {
            "head": {"kernel": hidden.T @ spread, "bias": error.sum(axis=0)},
            "hidden": {
                "kernel": self.own.features.T @ inner,
                "bias": error_hidden.sum(axis=0),
            },
        }
        return self.scores(params, self.own.is_trained)[2] / count, gradient


# --- Training ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loss_and_gradient(quick_jit):
    """(start, data, key, **task) -> ((losses [K], statistics), gradients)."""

    @functools.cache
    def compiled(**changes):
        task = make_task(**changes)
        take = jax.value_and_grad(task.train_loss, has_aux=True)

        def one(own, params, stats, key, data):
            return take(params, stats, own, key, data)

        return quick_jit(jax.vmap(one, (0, None, None, None, None)))

    def run(start, data, key=KEY, **changes):
        run_compiled = compiled(**changes)
        return run_compiled(data, start["params"], start["batch_stats"], key, data)

    return run


def test_the_loss_is_the_mean_over_a_clients_training_nodes(
    model, splits, loss_and_gradient
):
    (losses, stats), gradients = loss_and_gradient(model, splits["train"])
    assert stats == {}
    for client in range(NUM_CLIENTS):
        expected, gradient = Dense(alone(splits["train"], client)).gradient(
            model["params"]
        )
        npt.assert_allclose(losses[client], expected, rtol=1e-5)
        assert_trees_close(row(gradients, client), gradient)


def test_query_nodes_are_judged_by_what_the_others_train(model, splits, quick_jit):
    """Each third training node of a client; the outer loss of GraphFL reads no other.

    All nodes are trained on, and client 1 has three of them.
    """
    train = splits["train"]
    train = train._replace(is_trained=train.is_real)
    task, params = make_task(query_every=3), model["params"]

    def losses(own):
        support, _ = task.train_loss(params, {}, own, KEY, train)
        return support, task.query_loss(params, own, KEY, train)

    found = np.transpose(quick_jit(jax.vmap(losses))(task.client_data(train)))
    for client in range(NUM_CLIENTS):
        own = alone(train, client)
        is_query = np.arange(len(own.labels)) % 3 == 2
        for loss, mask in zip(found[client], (~is_query, is_query), strict=True):
            _, count, total = Dense(own).scores(params, mask)
            npt.assert_allclose(loss, total / count, rtol=1e-5)


def test_embeddings_of_query_nodes_are_not_trained_on(model, splits):
    own, task = row(splits["train"], 0), make_task(query_every=2)
    seen = task.embed(model, own, splits["train"]).is_trained
    support, query = tasks.query_halves(own, 2)
    assert jnp.any(query.is_trained)
    npt.assert_array_equal(seen, support.is_trained)


def test_a_client_without_training_nodes_has_no_loss(model, splits, loss_and_gradient):
    train = splits["train"]
    train = train._replace(is_trained=train.is_trained.at[1].set(0))
    (losses, _), gradients = loss_and_gradient(model, train)
    assert losses[1] == 0
    assert not any(np.any(x[1]) for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("decay", [None, 0.1])
def test_local_steps_are_gradient_steps_on_the_training_nodes(
    decay, splits, draw_params, quick_jit
):
    task, train = make_task(), splits["train"]
    adjust = None if decay is None else optax.add_decayed_weights(decay)
    starts = [draw_params(task.init, seed) for seed in range(NUM_CLIENTS)]
    update = jax.vmap(lambda m, own: task.update(m, own, KEY, train, adjust, 0))
    result = quick_jit(update)(stack(starts), task.client_data(train))
    for client, start in enumerate(starts):
        dense, params, losses = Dense(alone(train, client)), start["params"], []
        for _ in range(3):
            loss, gradient = dense.gradient(params)
            params = jax.tree.map(
                lambda p, g: p - RATE * (g + (decay or 0) * p), params, gradient
            )
            losses.append(loss)
        found = row(result.model, client)
        assert_trees_close(found, {"params": params, "batch_stats": {}})
        npt.assert_allclose(result.loss[client], np.mean(losses), rtol=1e-4)


def test_nothing_is_dropped_but_in_training(model, splits, loss_and_gradient):
    train = splits["train"]
    losses = [
        loss_and_gradient(model, train, jax.random.key(seed), dropout=0.5)[0][0]
        for seed in (0, 0, 1)
    ]
    npt.assert_array_equal(losses[0], losses[1])
    assert (losses[0] != losses[2]).all()
    outputs = [make_task(dropout=p).predict(one(model), train) for p in (0.0, 0.9)]
    npt.assert_array_equal(*outputs)


def test_each_local_step_drops_other_units(model, splits, loss_and_gradient, quick_jit):
    train, task = splits["train"], make_task(dropout=0.5, local_steps=2)
    update = quick_jit(lambda own: task.update(model, own, KEY, train, None, 0))
    found, start, losses = update(row(train, 0)), model, []
    for key in jax.random.split(KEY, 2):
        (loss, _), gradient = loss_and_gradient(start, train, key, dropout=0.5)
        params = jax.tree.map(lambda p, g: p - RATE * g[0], start["params"], gradient)
        start = model | {"params": params}
        losses.append(loss[0])
    assert_trees_close(found.model, start)
    npt.assert_allclose(found.loss, np.mean(losses), rtol=1e-5)


# --- Scores --------------------------------------------------------------------------


def expected_scores(models, data):
    """By client: (right nodes, scored nodes, sum of cross-entropies), [K, 3]."""
    pairs = zip(models, range(NUM_CLIENTS), strict=True)
    owns = [(model, alone(data, client)) for model, client in pairs]
    return np.array([Dense(o).scores(m["params"], o.is_scored) for m, o in owns])


@fitnesses
@pytest.mark.parametrize("num_models", [1, NUM_CLIENTS])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_accuracy_is_that_over_all_scored_nodes(
    split, num_models, fitness, splits, draw_params, quick_jit
):
    """In validation client 2 has none, and in the test client 1."""
    task, data = make_task(fitness=fitness), splits[split]
    models = [draw_params(task.init, seed) for seed in range(num_models)]
    scores = quick_jit(task.evaluate)(stack(models), data)
    everybody = models * (NUM_CLIENTS // num_models)
    right, counts, entropies = expected_scores(everybody, data).T
    assert 0 in counts
    shares = counts / counts.sum()
    accuracies = right / np.maximum(counts, 1)
    npt.assert_allclose(scores["accuracy"], 100 * shares @ accuracies, rtol=1e-5)
    entropy = entropies.sum() / counts.sum()
    npt.assert_allclose(scores["cross_entropy"], entropy, rtol=1e-5)
    monitored = {"loss": entropy, "error": 1 - right.sum() / counts.sum()}
    npt.assert_allclose(scores[task.monitor], monitored[MONITORS[fitness]], rtol=1e-5)


def test_weights_of_training_do_not_count_in_scores(model, splits, quick_jit):
    data, evaluate = splits["validation"], quick_jit(make_task().evaluate)
    others = data._replace(client_weights=jnp.array([0.0, 9, 1, 0, 3]))
    assert evaluate(one(model), data) == evaluate(one(model), others)


def test_a_client_without_scored_nodes_does_not_count(model, splits):
    """Not even if its outputs are not finite."""
    task, data = make_task(), splits["validation"]
    broken = data._replace(features=data.features.at[2].set(jnp.nan))
    for own in (data, broken):
        scores = task.evaluate(one(model), own)
        right, counts, _ = expected_scores([model] * NUM_CLIENTS, data).T
        npt.assert_allclose(
            scores["accuracy"], 100 * right.sum() / counts.sum(), rtol=1e-5
        )
        assert np.isfinite(scores["loss"])


@fitnesses
def test_a_model_that_diverged_has_no_loss(model, splits, fitness):
    diverged = jax.tree.map(lambda x: x + jnp.inf, model)
    scores = make_task(fitness=fitness).evaluate(one(diverged), splits["test"])
    assert np.isnan(scores[MONITORS[fitness]])


def test_outputs_are_probabilities(model, splits):
    outputs = make_task().predict(one(model), splits["test"])
    assert outputs.shape == (NUM_CLIENTS, client_graphs.MOST_NODES, NUM_CLASSES)
    for client in range(NUM_CLIENTS):
        expected = Dense(alone(splits["test"], client)).probabilities(model["params"])
        npt.assert_allclose(outputs[client, : len(expected)], expected, atol=1e-5)


# --- Models --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network():
    net = SuperNet(NUM_FEATURES, NUM_CLASSES, len(CODE) - 2, WIDTH, **OF_2022)
    return net.network(CODE)


@pytest.fixture(scope="module")
def code_model(draw_params):
    drawn = draw_params(make_task(model="code", code=CODE, width=WIDTH, **OF_2022).init)
    stats = drawn["batch_stats"]["layer_1"]["norm"]
    stats["var"] = np.abs(stats["var"]) + 0.1
    return jax.tree.map(jnp.asarray, drawn)


def test_the_network_of_a_code(
    network, code_model, splits, loss_and_gradient, quick_jit
):
    apply = quick_jit(functools.partial(network.apply, mutable=["batch_stats"]))
    task = make_task(model="code", code=CODE, width=WIDTH, **OF_2022)
    train = splits["train"]
    outputs = task.predict(one(code_model), train)
    (losses, stats), _ = loss_and_gradient(
        code_model, train, model="code", code=CODE, width=WIDTH, **OF_2022
    )
    for client in (0, 2):
        own = alone(train, client)
        graph = tasks.as_graph(own)
        logits, _ = apply(code_model, graph)
        npt.assert_allclose(
            outputs[client, : len(logits)], jax.nn.softmax(logits), atol=1e-5
        )
        logits, new = apply(code_model, graph, own.is_real)
        chosen = np.flatnonzero(own.is_trained)
        entropies = -jax.nn.log_softmax(logits)[chosen, own.labels[chosen]]
        npt.assert_allclose(losses[client], np.mean(entropies), rtol=1e-4)
        assert_trees_close(row(stats, client), new["batch_stats"])


def test_a_code_is_fused_and_drops_units_as_told(network, code_model, splits):
    graph = tasks.as_graph(alone(splits["train"], 0))
    settings = {"model": "code", "code": CODE, "width": WIDTH}
    config = SubgraphTask(NUM_FEATURES, NUM_CLASSES, dropout=0.3, **settings)
    assert config.module().dropout == 0.3
    outputs = config.module().apply(code_model, graph)
    net = SuperNet(NUM_FEATURES, NUM_CLASSES, 2, WIDTH)
    npt.assert_allclose(outputs, net.network(CODE).apply(code_model, graph), atol=1e-6)
    assert np.abs(outputs - network.apply(code_model, graph)).max() > 1e-3


@pytest.mark.parametrize(
    "settings",
    [{"model": "spread_gcn"}, {"model": "decoupled_gin", "structure_size": 2}],
)
def test_networks_of_methods_drop_as_many_units_as_told(settings):
    config = SubgraphTask(NUM_FEATURES, NUM_CLASSES, dropout=0.3, **settings)
    assert config.module().dropout == 0.3


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "code"}, "expected a row of integers"),
        ({"model": "code", "code": (1, 5)}, "1,5: expected 8 genes"),
        ({"model": "code", "code": (1, 0, 99, 5)}, "layer 2 is 99"),
        ({"model": "mlp"}, "unknown subgraph model 'mlp'"),
    ],
)
def test_what_is_no_network_is_refused_in_one_line(changes, match):
    with pytest.raises(InputError, match=match) as raised:
        jax.eval_shape(make_task(**changes).init, KEY)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "heads"),
    [({}, {"head"}), ({"model": "code", "code": CODE, "width": WIDTH}, {"output"})],
)
def test_the_head_is_the_last_layer(settings, heads):
    task = make_task(**settings)
    first = jax.eval_shape(task.init, KEY)
    paths, _ = jax.tree_util.tree_flatten_with_path(first)
    names = {path[1].key: task.is_head(path) for path, _ in paths}
    assert {name for name, is_head in names.items() if is_head} == heads < set(names)


@pytest.mark.parametrize("name", ["gcn", "code"])
def test_padding_changes_nothing(name, model, code_model, splits, loss_and_gradient):
    settings = {"model": name, "code": CODE, "width": WIDTH}
    own = {"gcn": model, "code": code_model}[name]
    train = splits["train"]
    longer = client_graphs.padded(train)
    assert longer.features.shape[1] > train.features.shape[1]
    assert_trees_close(
        *(loss_and_gradient(own, data, **settings) for data in (train, longer))
    )
    task = make_task(**settings)
    assert_trees_close(*(task.evaluate(one(own), data) for data in (train, longer)))


@pytest.mark.parametrize("fitness", ["loss", "accuracy"])
def test_where_no_node_is_scored_there_are_no_scores(fitness):
    data = types.SimpleNamespace(is_scored=jnp.zeros((3, 4)))
    args = jnp.ones(3), jnp.zeros(3), data, fitness
    assert all(np.isnan(x) for x in tasks.federated_scores(*args).values())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_features": NUM_FEATURES + 1}, r"features has shape .*, any, 7\)"),
        ({"num_classes": NUM_CLASSES - 1}, "labels has .* of num_classes"),
    ],
)
def test_data_of_another_task_are_refused(splits, changes, match):
    task = dataclasses.replace(SubgraphTask(NUM_FEATURES, NUM_CLASSES), **changes)
    with pytest.raises(InputError, match=match):
        task.build().client_data(splits["train"])


def test_labels_that_are_no_whole_numbers_are_refused_where_they_are_traced(splits):
    data = splits["train"]._replace(labels=splits["train"].labels + 0.5)
    with pytest.raises(InputError, match="labels has type float32"):
        jax.eval_shape(make_task().client_data, data)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "gcn"},
        {"model": "code", "code": CODE, "width": WIDTH, **OF_2022},
        {"model": "spread_gcn"},
        {"model": "decoupled_gin", "structure_size": 2},
    ],
    ids=lambda settings: settings["model"],
)
def test_masked_features_are_read_as_dense_ones(splits, draw_params, settings):
    """Also by modules that do more than multiply them."""
    train = splits["train"].by_client()
    parts = train.features[:, :3], train.features[:, 3:]
    masked = train._replace(features=MaskedRows(parts, train.is_real))
    task = make_task(**settings)
    drawn = draw_params(task.init)
    found, expected = (task.predict(one(drawn), data) for data in (masked, train))
    is_real = np.asarray(train.is_real) > 0
    npt.assert_allclose(found[is_real], expected[is_real], rtol=1e-5, atol=1e-6)
    reads_them = settings["model"] in ("gcn", "code")
    module = SubgraphTask(NUM_FEATURES, NUM_CLASSES, **settings).module()
    nodes = tasks.as_graph(row(masked, 0), module).nodes
    assert isinstance(nodes, MaskedRows) == reads_them


def test_who_extends_a_network_gets_masked_features_as_an_array(splits):
    """It may do anything with them first."""

    class Mine(FixedGNN):
        pass

    own = row(splits["train"].by_client(), 0)
    masked = own._replace(features=MaskedRows((own.features,), own.is_real))
    for network, kind in ((FixedGNN, MaskedRows), (Mine, jax.Array)):
        nodes = tasks.as_graph(masked, network("gcn", NUM_CLASSES)).nodes
        assert isinstance(nodes, kind)


def test_features_that_are_masked_are_no_embeddings(splits, draw_params):
    own = splits["train"].by_client()
    masked = own._replace(features=MaskedRows((own.features,), own.is_real))
    task = make_task(model="sgc")
    with pytest.raises(InputError, match="without hidden layers"):
        task.embed(draw_params(task.init), row(masked, 0), None)
