"""What the last layer of a network reads, where others inside have its name."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph.core import trees
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.task import in_head
from fedjax_graph.models.decoupled import in_structure_encoder
from fedjax_graph.models.embeddings import HEADS, apply_with_embeddings
from fedjax_graph.tasks.subgraphs import in_last_layer

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Attention(nn.Module):
    """A hidden layer, with layers inside that have the names of last ones."""

    @nn.compact
    def __call__(self, x):
        for name in (*HEADS, "structure_0"):
            x = nn.Dense(2, name=name)(x)
        return x


class Network(nn.Module):
    head: str | None = "head"

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(Attention(name="attention")(x))
        return nn.Dense(5, name=self.head)(x) if self.head else x


def drawn(network):
    variables = network.init(jax.random.key(0), X)
    return jax.tree.map(np.asarray, variables)


@pytest.mark.parametrize("head", HEADS)
def test_embeddings_are_what_the_networks_own_last_layer_reads(head):
    network = Network(head)
    variables = drawn(network)
    outputs, embeddings = apply_with_embeddings(network, variables, X)
    expected = X
    for layer in (*HEADS, "structure_0"):
        weights = variables["params"]["attention"][layer]
        expected = expected @ weights["kernel"] + weights["bias"]
    expected = np.tanh(expected)
    npt.assert_allclose(embeddings, expected, rtol=1e-5, atol=1e-6)
    last = variables["params"][head]
    npt.assert_allclose(outputs, expected @ last["kernel"] + last["bias"], atol=1e-5)


def test_a_layer_inside_of_another_is_not_the_last_one():
    network = Network(None)
    with pytest.raises(InputError, match="none of its layers is called head or output"):
        apply_with_embeddings(network, drawn(network), X)


@pytest.mark.parametrize(
    ("rule", "head"),
    [(in_head, "head"), (in_last_layer, "head"), (in_last_layer, "output")],
)
def test_the_personal_layer_is_the_networks_own(rule, head):
    model = drawn(Network(head)) | {"batch_stats": {}}
    shared, personal = trees.partition(model, rule)
    names = {path[1].key for path, _ in jax.tree.leaves_with_path(personal)}
    assert names == {head}
    inside = shared["params"]["attention"]
    assert len(jax.tree.leaves(inside)) == 6  # both leaves of each of its layers


def test_no_layer_inside_encodes_structure():
    paths = [path for path, _ in jax.tree.leaves_with_path(drawn(Network()))]
    assert not any(map(in_structure_encoder, paths))
