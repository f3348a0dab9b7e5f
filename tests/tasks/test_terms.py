"""Embeddings, and what a method adds to a loss, of every task that offers them."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import optax
import pytest
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.sparse_rows import stack
from fedjax_graph.models.embeddings import apply_with_embeddings
from fedjax_graph.models.resnet import LOGIT_SCALE
from fedjax_graph.tasks.nodes import NodeTask
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests import client_graphs, nodes
from tests.tasks.test_images import CONFIG as IMAGES
from tests.tasks.test_images import careful_jit, data, models, row, task  # noqa: F401

KEY, SGD = jax.random.key(1), OptimizerConfig("sgd", 0.1)
PROBLEMS = {
    "nodes": (
        NodeTask(nodes.NUM_FEATURES, nodes.NUM_CLASSES, inner_steps=2, optimizer=SGD),
        nodes.make_splits,
    ),
    "subgraphs": (
        SubgraphTask(
            client_graphs.NUM_FEATURES,
            client_graphs.NUM_CLASSES,
            local_steps=2,
            dropout=0.5,
            optimizer=SGD,
        ),
        client_graphs.make_splits,
    ),
}


@pytest.fixture(params=PROBLEMS)
def problem(request, draw_params):
    """(config, model, own data of client 0, data)."""
    config, make_splits = PROBLEMS[request.param]
    built, train = config.build(), make_splits()["train"]
    own = jax.tree.map(lambda x: x[0], built.client_data(train))
    return config, draw_params(built.init), own, train


def decay(embed):
    del embed
    return lambda params, seen, key: sum(
        jnp.sum(x**2) / 2 for x in jax.tree.leaves(params)
    )


def same(tree, other):
    close = {"rtol": 1e-4, "atol": 1e-6}
    jax.tree.map(lambda x, y: npt.assert_allclose(x, y, **close), tree, other)


def test_a_term_of_squares_is_weight_decay(problem, quick_jit):
    config, model, own, train = problem
    update = config.build().update
    adjust = optax.add_decayed_weights(1.0)
    ours = quick_jit(lambda: update(model, own, KEY, train, None, 0, term=decay))()
    same(
        ours.model, quick_jit(lambda: update(model, own, KEY, train, adjust, 0))().model
    )


def test_a_step_reads_the_embeddings_of_the_task(problem, quick_jit):
    """Their squared distance to those of the same model has no gradient at first."""
    config, model, own, train = problem
    steps = {"nodes": "inner_steps", "subgraphs": "local_steps"}[config.kind]
    built = dataclasses.replace(config, dropout=0.0, **{steps: 1}).build()

    def distance(scale):
        def term(embed):
            fixed = embed(model)
            return lambda params, seen, key: jnp.sum(
                (seen.embeddings - scale * fixed) ** 2
            )

        return term

    def run(term):
        return quick_jit(
            lambda: built.update(model, own, KEY, train, None, 0, term=term)
        )()

    plain, near, far = run(None), run(distance(1)), run(distance(0))
    same(near, plain)
    seen = built.embed(model, own, train)
    total = jnp.sum(seen.embeddings**2)
    npt.assert_allclose(far.loss - plain.loss, total, rtol=1e-4)
    assert seen.labels.shape == seen.is_trained.shape == seen.embeddings.shape[:1]
    dropped = config.build().embed(model, own, train, key=KEY)
    assert (np.asarray(dropped.embeddings) != seen.embeddings).any()


def test_the_head_reads_the_embeddings_of_images(task, models, data):  # noqa: F811
    data = jax.device_put(data)
    probabilities = task.predict(models, data)
    for client in range(2):
        model = row(models, client)
        own = row(task.client_data(data), client)
        seen = task.embed(model, own, data)
        logits = LOGIT_SCALE * seen.embeddings @ model["params"]["head"]["kernel"]
        npt.assert_allclose(jax.nn.softmax(logits), probabilities[client], atol=1e-5)
        npt.assert_array_equal(seen.labels, data.labels[data.indices[client]])
        npt.assert_array_equal(seen.is_trained, data.mask[client])


@pytest.mark.slow
def test_a_term_of_squares_is_weight_decay_of_images(models, data):  # noqa: F811
    data = jax.device_put(data)
    # As a term weighs as much as the images of its batch: all seven in one.
    config = dataclasses.replace(IMAGES, batch_size=7, optimizer=SGD)
    own, model = row(config.build().client_data(data), 0), row(models, 0)
    update, adjust = config.build().update, optax.add_decayed_weights(1.0)
    ours = careful_jit(lambda: update(model, own, KEY, data, None, 0, term=decay))()
    plain = careful_jit(lambda: update(model, own, KEY, data, adjust, 0))()
    jax.tree.map(
        lambda x, y: npt.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
        ours.model,
        plain.model,
    )


def test_a_network_without_a_head_has_no_embeddings():
    layer = nn.Dense(2, name="last")
    with pytest.raises(InputError, match="Dense: none of its layers is called head"):
        apply_with_embeddings(layer, layer.init(KEY, jnp.ones(3)), jnp.ones(3))


def test_features_themselves_are_no_embeddings_where_they_are_sparse():
    graphs = client_graphs.make_splits()["train"]
    features = np.asarray(graphs.features)
    rows = [scipy.sparse.csr_array(x) for x in features]
    own = jax.tree.map(lambda x: x[0], graphs)
    sparse = jax.tree.map(lambda x: x[0], stack(rows, features.shape[1]))
    sizes = client_graphs.NUM_FEATURES, client_graphs.NUM_CLASSES
    sgc = SubgraphTask(*sizes, model="sgc").build()
    with pytest.raises(InputError, match="without hidden layers, whose embeddings are"):
        sgc.embed(sgc.init(KEY), own._replace(features=sparse), graphs)
    assert sgc.embed(sgc.init(KEY), own, graphs).embeddings.shape == features.shape[1:]
