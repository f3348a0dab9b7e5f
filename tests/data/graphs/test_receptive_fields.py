"""Receptive fields against the whole graph in dense algebra."""

import jax
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_graph.data.graphs import label_splits, subgraphs
from fedjax_graph.data.graphs import receptive_fields as nodes
from fedjax_graph.data.graphs.label_splits import Halves, NodeSets
from fedjax_graph.models.gcn import GCN, SGC
from fedjax_graph.tasks.nodes import as_graph
from tests.nodes import (
    NUM_CLASSES,
    NUM_CLIENTS,
    NUM_NODES,
    dense_graph,
    make_draw,
    node_sets,
)

S, X = dense_graph()
GRAPHS = {"symmetric": S, "row": (S > 0) / np.sum(S > 0, axis=1, keepdims=True)}
STORED = {"dense": np.asarray, "sparse": scipy.sparse.csr_array}


def make_splits(draw, *settings, kind="symmetric", stored="dense"):
    propagation = scipy.sparse.csr_array(GRAPHS[kind])
    return nodes.make_splits(propagation, STORED[stored](X), draw, *settings)


def real(sets, *index):
    """Nodes and labels of one task, without the padding."""
    own, labels, mask = (part[index] for part in sets)
    return own[mask > 0], labels[mask > 0]


# --- Models --------------------------------------------------------------------------


def gcn_of_all(params, propagation):
    hidden, head = params["hidden"], params["head"]
    x = np.maximum(propagation @ X @ hidden["kernel"] + hidden["bias"], 0)
    return propagation @ x @ head["kernel"] + head["bias"]


def sgc_of_all(params, propagation):
    return propagation @ propagation @ X @ params["head"]["kernel"]


MODELS = {
    "gcn": (GCN(NUM_CLASSES, hidden_size=5), gcn_of_all),
    "sgc": (SGC(NUM_CLASSES), sgc_of_all),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("name", MODELS)
def test_a_field_gives_what_the_whole_graph_would(
    name, kind, stored, draw_params, quick_jit
):
    model, of_all = MODELS[name]
    hops, draw = model.num_hops, make_draw()
    splits = jax.device_get(
        make_splits(draw, NUM_CLIENTS, 2 - hops, hops, kind=kind, stored=stored)
    )
    apply = quick_jit(
        lambda params, features, field: model.apply(
            {"params": params}, as_graph(features, field)
        )
    )
    first = jax.tree.map(lambda x: x[0], splits["train"].support)
    params = draw_params(
        lambda key: model.init(key, as_graph(splits["train"].features, first))["params"]
    )
    expected = of_all(params, GRAPHS[kind])
    assert np.ptp(expected) > 0.5
    for split, data in splits.items():
        for field, sets in zip((data.support, data.query), draw[split], strict=True):
            for task in range(len(field.rows)):
                own = jax.tree.map(lambda x, t=task: x[t], field)
                logits = apply(params, data.features, own)
                numbers, labels = real(sets, task)
                num_real = int(np.sum(own.mask))
                assert num_real == len(numbers)
                npt.assert_allclose(
                    logits[:num_real], expected[numbers], rtol=1e-5, atol=1e-5
                )
                npt.assert_array_equal(own.labels[:num_real], labels)


# --- Fields --------------------------------------------------------------------------

HIDDEN = np.random.default_rng(0).normal(size=(NUM_NODES, 2))  # of any first layer


def nodes_of(data, propagated):
    """Which node each row of the features is of."""
    gaps = np.abs(np.asarray(data.features)[:, None] - propagated).max(axis=-1)
    npt.assert_allclose(gaps.min(axis=1), 0, atol=1e-6)
    found = gaps.argmin(axis=1)
    assert len(set(found)) == len(found)
    return found


def assert_field(field, sets, numbers, propagation):
    """Fields [..., L] have the labelled nodes in front and what S sums up for them."""
    for index in np.ndindex(field.mask.shape[:-1]):
        rows, senders, receivers, weights, labels, mask = (
            np.asarray(part)[index] for part in field[:6]
        )
        own, own_labels = real(sets, *index)
        npt.assert_array_equal(mask, np.arange(len(mask)) < len(own))
        npt.assert_array_equal(labels[: len(own)], own_labels)
        npt.assert_array_equal(numbers[rows[: len(own)]], own)
        assert np.all(np.diff(receivers) >= 0)
        sums = np.zeros((len(mask), 2))
        for sender, receiver, weight in zip(senders, receivers, weights, strict=True):
            if weight:  # else it is padding
                sums[receiver] += weight * HIDDEN[numbers[rows[sender]]]
        npt.assert_allclose(sums[: len(own)], propagation[own] @ HIDDEN, atol=1e-6)
        npt.assert_array_equal(sums[len(own) :], 0)
        assert np.count_nonzero(weights) == np.count_nonzero(propagation[own])


@st.composite
def draws(draw):
    """Sets of any nodes, also the same one twice, with holes and without any node."""
    lead = draw(st.sampled_from([(1,), (3,), (2, 3)]))

    def sets():
        rng = np.random.default_rng(draw(st.integers(0, 10**6)))
        shape = (*lead, draw(st.integers(0, 5)))
        share = draw(st.sampled_from([0.0, 0.5, 1.0]))
        return NodeSets(
            rng.integers(0, NUM_NODES, shape, dtype=np.int32),
            rng.integers(0, NUM_CLASSES, shape, dtype=np.int32),
            (rng.random(shape) < share).astype(np.float32),
        )

    return {split: Halves(sets(), sets()) for split in ("train", "test")}


@settings(max_examples=40, deadline=None)
@given(draw=draws(), kind=st.sampled_from(list(GRAPHS)))
def test_fields_of_any_sets(draw, kind):
    propagation = GRAPHS[kind]
    splits = make_splits(draw, 3, 1, 1, kind=kind)
    numbers = nodes_of(splits["train"], propagation @ X)
    read = {0}  # by padding
    for split, data in splits.items():
        for field, sets in zip((data.support, data.query), draw[split], strict=True):
            assert_field(field, sets, numbers, propagation)
            labelled = sets.nodes[sets.mask > 0]
            read |= set(np.nonzero(propagation[labelled])[1].tolist())
    assert set(numbers.tolist()) <= read
    assert read - set(numbers.tolist()) <= {0}


@settings(max_examples=20, deadline=None)
@given(draw=draws(), num_propagations=st.integers(0, 2))
def test_without_hops_a_field_is_its_labelled_nodes(draw, num_propagations):
    propagated = np.linalg.matrix_power(S, num_propagations) @ X
    for split, data in make_splits(draw, 3, num_propagations, 0).items():
        numbers = nodes_of(data, propagated)
        for field, sets in zip((data.support, data.query), draw[split], strict=True):
            assert field.rows.shape == field.labels.shape == sets.nodes.shape
            assert field.senders.shape[-1] == 0
            for index in np.ndindex(sets.mask.shape[:-1]):
                own, labels = real(sets, *index)
                rows = field.rows[index][: len(own)]
                npt.assert_array_equal(numbers[rows], own)
                npt.assert_array_equal(field.labels[index][: len(own)], labels)


def test_draws_of_unequal_sizes_are_stacked():
    other = make_draw() | {
        "train": Halves(
            node_sets([[7], [1, 2, 8, 15], [], [3], [4, 5]]),
            node_sets([[0], [], [12], [13], [14]]),
        )
    }
    draws = [make_draw(), other]
    splits = make_splits(label_splits.stack(draws), NUM_CLIENTS, 1, 1)
    assert splits["train"].support.labels.shape == (2, NUM_CLIENTS, 4)
    numbers = nodes_of(splits["train"], S @ X)
    for index, draw in enumerate(draws):
        for split, halves in draw.items():
            fields = (splits[split].support, splits[split].query)
            for field, sets in zip(fields, halves, strict=True):
                own = jax.tree.map(lambda x, i=index: x[i], field)
                assert_field(own, sets, numbers, S)


def test_splits_share_their_features_and_training_clients_count_alike():
    splits = make_splits(make_draw(), NUM_CLIENTS, 1, 1)
    (features,) = {id(data.features) for data in splits.values()}
    for data in splits.values():
        assert id(data.features) == features
        npt.assert_array_equal(data.client_ids, np.arange(NUM_CLIENTS))
        npt.assert_array_equal(data.client_weights, [1, 1, 0, 1, 1])  # 2 trains on none
        for leaf in jax.tree.leaves(data):
            assert isinstance(leaf, jax.Array)
            assert leaf.dtype in (np.int32, np.float32)


def test_support_sets_have_the_inner_products_of_their_features(monkeypatch):
    draw = label_splits.stack([make_draw(), make_draw()])
    data = make_splits(draw, NUM_CLIENTS, 1, 1)["train"]
    for index in np.ndindex(2, NUM_CLIENTS):
        own = np.asarray(data.features)[data.support.rows[index]]
        npt.assert_allclose(data.support.gram[index], own @ own.T, rtol=1e-5, atol=1e-5)
    assert data.query.gram is None
    monkeypatch.setattr(nodes, "MOST_GRAM_BYTES", data.support.gram.nbytes - 1)
    assert make_splits(draw, NUM_CLIENTS, 1, 1)["train"].support.gram is None


def test_few_labels_of_a_large_graph_read_few_rows():
    """A ring of 10000 nodes: two neighbours each."""
    size, rows = 10_000, np.arange(10_000)
    ring = scipy.sparse.csr_array(
        (np.ones(size, np.float32), (rows, (rows + 1) % size)), (size, size)
    )
    features = np.random.default_rng(0).normal(size=(size, 3))
    splits = nodes.make_splits(
        subgraphs.normalise(ring + ring.T), features, make_draw(), NUM_CLIENTS
    )
    assert splits["train"].features.shape == (18, 3)  # 0 to 15, and both sides
    assert splits["train"].support.gram is None  # it would be larger than the features


def test_draws_are_of_fields_and_weights():
    data = make_splits(make_draw(), NUM_CLIENTS, 1, 1)["train"]
    paths, _ = jax.tree_util.tree_flatten_with_path(data)
    drawn = {path[0].name for path, _ in paths if nodes.is_drawn(path)}
    assert drawn == {"support", "query", "client_weights"}
    assert {path[0].name for path, _ in paths} - drawn == {
        "features",
        "client_ids",
    }
