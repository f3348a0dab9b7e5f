"""Models of weights times masks, whose small entries are pruned in use."""

import jax
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.tasks.masked_weights import MaskedWeights
from fedjax_graph.tasks.subgraphs import SubgraphTask
from tests import client_graphs, dense_gcn
from tests.client_graphs import NUM_CLASSES, NUM_CLIENTS, NUM_FEATURES, alone

TASK = SubgraphTask(NUM_FEATURES, NUM_CLASSES, hidden_size=4)
MASKED = MaskedWeights(TASK, mask_weight=0.3, pull_weight=0.5)
ENTRIES = (-0.4, -9e-4, 5e-4, 1.1e-3, -2e-3, 0.7)  # of masks, two of them are pruned


@pytest.fixture(scope="module")
def model(draw_params):
    """Whose products of weights and masks are of one size, pruned or not."""
    products = draw_params(TASK.build().init)["params"]
    rng = np.random.default_rng(0)

    def draw(x):
        return rng.choice(ENTRIES, x.shape) if x.ndim > 1 else None

    masks = jax.tree.map(draw, products)
    weights = jax.tree.map(lambda x, m: x if m is None else x / m, products, masks)
    return {"params": {"weights": weights, "masks": masks}, "batch_stats": {}}


def products(model, least=0.0):
    """Of weights and masks, where an entry of a mask is `least` or more."""
    masks, weights = model["params"]["masks"], model["params"]["weights"]
    return {
        name: {
            "bias": layer["bias"],
            "kernel": layer["kernel"]
            * np.where(abs(masks[name]["kernel"]) < least, 0, masks[name]["kernel"]),
        }
        for name, layer in weights.items()
    }


def test_small_entries_of_masks_are_pruned_when_a_model_is_used(model, quick_jit):
    task, data = MASKED.build(), client_graphs.make_splits()["test"]
    models = jax.tree.map(lambda x: np.asarray(x, np.float32)[None], model)

    def use(models, data):
        functions = task.logits, task.predict, task.evaluate
        return tuple(function(models, data) for function in functions)

    logits, outputs, scores = quick_jit(use)(models, data)
    entropies = []
    for client in range(NUM_CLIENTS):
        own = alone(data, client)
        _, expected = dense_gcn.layers(own, products(model, 1e-3))
        _, unpruned = dense_gcn.layers(own, products(model))
        assert np.abs(expected - unpruned).max() > 0.1
        npt.assert_allclose(logits[client, : len(expected)], expected, 1e-4, 1e-5)
        odds = np.exp(expected)
        shares = odds / odds.sum(axis=1, keepdims=True)
        npt.assert_allclose(outputs[client, : len(shares)], shares, 1e-4, 1e-5)
        chosen = np.flatnonzero(own.is_scored)
        entropies += (-np.log(shares[chosen, own.labels[chosen]])).tolist()
    npt.assert_allclose(scores["cross_entropy"], np.mean(entropies), rtol=1e-4)


def test_nothing_is_pruned_in_training(model, quick_jit):
    """The loss of a step from where the weights start, so without their pull."""
    task, train = MASKED.build(), client_graphs.make_splits()["train"]
    own, key = jax.tree.map(lambda x: x[0], task.client_data(train)), jax.random.key(0)
    update = quick_jit(lambda model: task.update(model, own, key, train, None, 0))
    found = update(model).loss
    entropy = dense_gcn.cross_entropy(alone(train, 0), products(model))
    masks = jax.tree.leaves(model["params"]["masks"])
    expected = entropy + 0.3 * sum(np.abs(mask).sum() for mask in masks)
    npt.assert_allclose(found, expected, rtol=1e-4)
