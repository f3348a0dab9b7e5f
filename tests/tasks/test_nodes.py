"""Node classification against dense algebra with gradients by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest

from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks import nodes as tasks
from fedjax_graph.tasks.nodes import NodeTask
from tests import nodes
from tests.nodes import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES

HOPS = {"gcn": 1, "sgc": 0}
RATE, HIDDEN_SIZE, FEW_FEATURES = 0.8, 3, 2  # few: less than a field has nodes
both_models = pytest.mark.parametrize("model", HOPS)


def make_task(model="gcn", num_features=NUM_FEATURES, **changes):
    optimizer = OptimizerConfig("sgd", RATE)
    settings = {"dropout": 0.0, "inner_steps": 3, "optimizer": optimizer} | changes
    return NodeTask(
        num_features, NUM_CLASSES, model=model, hidden_size=HIDDEN_SIZE, **settings
    ).build()


@pytest.fixture(scope="module")
def make_models(draw_params):
    """[{"params": ..., "batch_stats": {}}] of as many clients, from NumPy."""

    def make(number, model="gcn", num_features=NUM_FEATURES):
        init = make_task(model, num_features).init
        return [draw_params(init, seed) for seed in range(number)]

    return make


def stack(models):
    return jax.tree.map(lambda *x: jnp.stack(x), *models)


class Dense:
    """A model on the whole graph in NumPy."""

    def __init__(self, model, num_features=NUM_FEATURES):
        self.model = model
        self.propagation, features = nodes.dense_graph(num_features)
        self.x = self.propagation @ features

    def layers(self, params):
        """(active hidden units or None, what the head multiplies, logits)."""
        head, active, x = params["head"], None, self.x
        if self.model == "gcn":
            x = x @ params["hidden"]["kernel"] + params["hidden"]["bias"]
            active = x > 0
            x = np.maximum(x, 0)
        x = self.propagation @ x
        return active, x, x @ head["kernel"] + head.get("bias", 0)

    def probabilities(self, params):
        logits = self.layers(params)[-1]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def gradient(self, params, chosen, labels):
        """Of the mean cross-entropy of some nodes -> (loss, gradient)."""
        active, x, _ = self.layers(params)
        probabilities = self.probabilities(params)
        loss = -np.mean(np.log(probabilities[chosen, labels])) if len(chosen) else 0.0
        error = np.zeros_like(probabilities)
        for node, label in zip(chosen, labels, strict=True):
            target = np.arange(NUM_CLASSES) == label
            error[node] = (probabilities[node] - target) / len(chosen)
        kernel = params["head"]["kernel"]
        gradient = {"head": {"kernel": x.T @ error}}
        if self.model == "gcn":
            gradient["head"]["bias"] = error.sum(axis=0)
            error = (self.propagation.T @ error @ kernel.T) * active
            gradient["hidden"] = {
                "kernel": self.x.T @ error,
                "bias": error.sum(axis=0),
            }
        return loss, gradient

    def steps(self, params, chosen, labels, num_steps, decay=0.0):
        """Gradient steps -> (params, mean loss)."""
        losses = []
        for _ in range(num_steps):
            loss, gradient = self.gradient(params, chosen, labels)
            params = jax.tree.map(
                lambda p, g: p - RATE * (g + decay * p), params, gradient
            )
            losses.append(loss)
        return params, np.mean(losses)

    def scores(self, params, chosen, labels):
        """Share of right nodes and cross-entropy; 0 of none."""
        if not len(chosen):
            return 0.0, 0.0
        own = self.probabilities(params)[chosen]
        right = own.argmax(axis=1) == labels
        return right.mean(), -np.mean(np.log(own[np.arange(len(own)), labels]))


def real(sets, task):
    own, labels, mask = (part[task] for part in sets)
    return own[mask > 0], labels[mask > 0]


def assert_trees_close(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: npt.assert_allclose(a, b, 1e-4, 1e-5), left, right)


# --- Training ------------------------------------------------------------------------


@pytest.fixture
def update_all(quick_jit):
    """Runs each client's update: (task, models, train, adjust=None) -> results."""

    def run(task, models, train, adjust=None, seed=3):
        def one(model, own, key):
            return task.update(model, own, key, train, adjust, 0)

        keys = jax.random.split(jax.random.key(seed), len(models))
        own = task.client_data(train)
        return quick_jit(jax.vmap(one))(stack(models), own, keys)

    return run


def row(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@both_models
@pytest.mark.parametrize("num_features", [NUM_FEATURES, FEW_FEATURES])
@pytest.mark.parametrize("decay", [None, 0.1])
def test_local_steps_are_gradient_steps_on_the_support_set(
    model, num_features, decay, make_models, update_all
):
    models = make_models(NUM_CLIENTS, model, num_features)
    adjust = None if decay is None else optax.add_decayed_weights(decay)
    train = nodes.make_splits(HOPS[model], num_features)["train"]
    result = update_all(make_task(model, num_features), models, train, adjust)
    dense, (support, _) = Dense(model, num_features), nodes.make_draw()["train"]
    for client, start in enumerate(models):
        chosen = real(support, client)
        expected, loss = dense.steps(start["params"], *chosen, 3, decay or 0.0)
        found = row(result.model, client)
        assert_trees_close(found, {"params": expected, "batch_stats": {}})
        npt.assert_allclose(result.loss[client], loss, rtol=1e-5)
        kept = jax.tree.map(np.array_equal, found, start)
        no_change = decay is None and not len(chosen[0])
        assert all(jax.tree.leaves(kept)) == no_change


@both_models
@pytest.mark.parametrize("num_features", [NUM_FEATURES, FEW_FEATURES])
def test_an_adjustment_that_does_nothing_changes_nothing(
    model, num_features, make_models, update_all
):
    """With dropout; it keeps the steps from being taken in the products alone."""
    models = make_models(NUM_CLIENTS, model, num_features)
    train = nodes.make_splits(HOPS[model], num_features)["train"]
    task = make_task(model, num_features, dropout=0.5)
    plain, adjusted = (
        update_all(task, models, train, adjust) for adjust in (None, optax.identity())
    )
    assert_trees_close(plain.model, adjusted.model)
    npt.assert_allclose(plain.loss, adjusted.loss, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.9, "schedule": "linear"},
        {"name": "nesterov", "momentum": 0.9},
        {"weight_decay": 0.1},
        {"clip_norm": 0.05},
        {"name": "adam", "epsilon": 0.1},
    ],
)
def test_steps_in_the_products_are_taken_where_they_are_exact(
    changes, make_models, update_all
):
    """An adjustment, which does nothing, asks for steps in the parameters."""
    models, train = make_models(NUM_CLIENTS), nodes.make_splits()["train"]
    plain = make_task()
    task = make_task(optimizer=OptimizerConfig(**{"learning_rate": RATE} | changes))
    start, own, key = models[0], row(task.client_data(train), 0), jax.random.key(0)
    ours, other = (
        update_all(task, models, train, adjust) for adjust in (None, optax.identity())
    )
    assert_trees_close(ours.model, other.model)
    assert not np.allclose(
        ours.model["params"]["hidden"]["kernel"][0],
        plain.update(start, own, key, train, None, 0).model["params"]["hidden"][
            "kernel"
        ],
        atol=1e-4,
    )


def test_the_state_of_an_adjustment_comes_first(make_models, update_all):
    """A trace without decay holds the last gradient."""
    models, train = make_models(NUM_CLIENTS), nodes.make_splits()["train"]
    result = update_all(make_task(), models, train, optax.trace(0.0))
    dense, (support, _) = Dense("gcn"), nodes.make_draw()["train"]
    for client, start in enumerate(models):
        chosen = real(support, client)
        params, _ = dense.steps(start["params"], *chosen, 2)
        _, gradient = dense.gradient(params, *chosen)
        assert_trees_close(row(result.opt_state[0].trace, client), gradient)


def test_dropout_belongs_to_the_key(make_models, update_all):
    models, train = make_models(NUM_CLIENTS), nodes.make_splits()["train"]
    task = make_task(dropout=0.5)
    one, same, other = (update_all(task, models, train, seed=s) for s in (3, 3, 4))
    npt.assert_array_equal(one.loss, same.loss)
    has_support = np.array([0, 1, 3, 4])
    assert np.all(one.loss[has_support] != other.loss[has_support])


@both_models
def test_recomputed_steps_have_the_same_meta_gradient(model, make_models, quick_jit):
    train = nodes.make_splits(HOPS[model])["train"]
    (start,) = make_models(1, model)
    gradients = []
    for checkpoint in (False, True):
        task = make_task(model, dropout=0.5, checkpoint_inner=checkpoint)
        own = row(task.client_data(train), 0)

        def objective(params, task=task, own=own):
            model = start | {"params": params}
            key = jax.random.key(1)
            adapted = task.update(model, own, key, train, None, 0).model["params"]
            return task.query_loss(adapted, own, key, train)

        gradients.append(quick_jit(jax.grad(objective))(start["params"]))
    assert_trees_close(*gradients)
    assert all(np.any(np.abs(x) > 1e-3) for x in jax.tree.leaves(gradients[0]))


@both_models
def test_the_query_loss_is_of_the_query_set(model, make_models):
    (start,), task = make_models(1, model), make_task(model)
    train, (_, query) = (
        nodes.make_splits(HOPS[model])["train"],
        nodes.make_draw()["train"],
    )
    for client in range(NUM_CLIENTS):
        own = row(task.client_data(train), client)
        loss = task.query_loss(start["params"], own, jax.random.key(0), train)
        _, expected = Dense(model).scores(start["params"], *real(query, client))
        npt.assert_allclose(loss, expected, rtol=1e-5)


def test_the_query_loss_drops_hidden_units(make_models):
    (start,), task = make_models(1), make_task(dropout=0.5)
    train = nodes.make_splits()["train"]
    own = row(task.client_data(train), 0)
    losses = {
        float(task.query_loss(start["params"], own, jax.random.key(seed), train))
        for seed in (0, 0, 1)
    }
    assert len(losses) == 2


# --- Scores --------------------------------------------------------------------------

CASES = [  # split of so many tasks, number of models
    pytest.param("train", 1, id="1 model, K tasks"),
    pytest.param("train", NUM_CLIENTS, id="K models, K tasks"),
    pytest.param("test", 1, id="1 model, 1 task"),
    pytest.param("test", NUM_CLIENTS, id="K models, 1 task"),
]


@both_models
@pytest.mark.parametrize("adapt_steps", [0, 2])
@pytest.mark.parametrize(("split", "num_models"), CASES)
def test_scores_and_outputs_are_of_each_model_on_each_task(
    model, split, num_models, adapt_steps, make_models, quick_jit
):
    models, dense = make_models(num_models, model), Dense(model)
    data = nodes.make_splits(HOPS[model])[split]
    weights = np.array([1, 0, 3, 1, 2], np.float32)  # who counts, counts the same
    data = data._replace(client_weights=weights)
    task = make_task(model, adapt_steps=adapt_steps)
    support, query = nodes.make_draw()[split]
    num_tasks = len(query.nodes)
    num_rows = max(num_models, num_tasks)
    scores = quick_jit(task.evaluate)(stack(models), data)
    outputs = quick_jit(task.predict)(stack(models), data)
    assert outputs.shape == (num_rows, query.nodes.shape[1], NUM_CLASSES)
    npt.assert_allclose(outputs.sum(axis=-1), 1, rtol=1e-5)
    expected, is_scored = [], []
    for index in range(num_rows):
        params = models[index % num_models]["params"]
        if adapt_steps:
            learnt_from = real(support, index % num_tasks)
            params, _ = dense.steps(params, *learnt_from, adapt_steps)
        chosen, labels = real(query, index % num_tasks)
        expected.append(dense.scores(params, chosen, labels))
        is_scored.append(len(chosen) > 0)
        npt.assert_allclose(
            outputs[index, : len(chosen)],
            dense.probabilities(params)[chosen],
            rtol=1e-4,
            atol=1e-5,
        )
    counts = np.array(is_scored) & (weights > 0 if num_rows > 1 else True)
    right, entropy = np.mean(np.array(expected)[counts], axis=0)
    npt.assert_allclose(scores["accuracy"], 100 * right, rtol=1e-5)
    npt.assert_allclose(scores["error"], 1 - right, rtol=1e-5, atol=1e-6)
    npt.assert_allclose(scores["cross_entropy"], entropy, rtol=1e-4)


@pytest.mark.parametrize("num_models", [1, NUM_CLIENTS])
@pytest.mark.parametrize("split", ["train", "test"])
def test_where_nothing_is_scored_there_are_no_figures(split, num_models, make_models):
    data = nodes.make_splits()[split]
    query = data.query._replace(mask=np.zeros_like(data.query.mask))
    scores = make_task().evaluate(
        stack(make_models(num_models)), data._replace(query=query)
    )
    assert scores.keys() == {"error", "accuracy", "cross_entropy"}
    assert all(np.isnan(x) for x in scores.values())


def test_a_client_without_query_nodes_changes_no_figure(make_models):
    """Whatever its model is."""
    data, models = nodes.make_splits()["train"], stack(make_models(NUM_CLIENTS))
    (alone,) = np.flatnonzero(~np.any(np.asarray(data.query.mask) > 0, axis=1))
    data = data._replace(client_weights=np.ones(NUM_CLIENTS, np.float32))
    broken = jax.tree.map(lambda x: x.at[alone].set(jnp.nan), models)
    assert make_task().evaluate(models, data) == make_task().evaluate(broken, data)


def test_nothing_is_dropped_when_scored(make_models):
    data, models = nodes.make_splits()["test"], stack(make_models(1))
    scores = [make_task(dropout=p).evaluate(models, data) for p in (0.0, 0.9)]
    assert scores[0] == scores[1]


# --- Models --------------------------------------------------------------------------


@both_models
def test_first_models_have_the_datasets_sizes(model):
    start = make_task(model).init(jax.random.key(0))
    shapes = jax.tree.map(jnp.shape, start["params"])
    head = (HIDDEN_SIZE if model == "gcn" else NUM_FEATURES, NUM_CLASSES)
    expected = {"head": {"kernel": head}}
    if model == "gcn":
        expected["head"]["bias"] = (NUM_CLASSES,)
        expected["hidden"] = {
            "kernel": (NUM_FEATURES, HIDDEN_SIZE),
            "bias": (HIDDEN_SIZE,),
        }
    assert shapes == expected
    assert start["batch_stats"] == {}
    assert tasks.MODELS.keys() == HOPS.keys()


@pytest.mark.parametrize(("model", "base"), [("gcn", {"hidden"}), ("sgc", set())])
def test_the_head_is_the_last_layer(model, base):
    task = make_task(model)
    paths, _ = jax.tree_util.tree_flatten_with_path(task.init(jax.random.key(0)))
    layers = {path[1].key: task.is_head(path) for path, _ in paths}
    assert layers == {name: False for name in base} | {"head": True}
