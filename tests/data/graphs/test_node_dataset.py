import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csgraph

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import datasets as citation
from fedjax_graph.data.graphs import node_dataset as node_graphs
from tests.data.graphs.toy_graph import EDGES, FEATURES, LABELS, dense


@pytest.fixture
def toy():
    return node_graphs.NodeDataset(
        "toy",
        scipy.sparse.csr_array(FEATURES),
        np.array(EDGES, np.int32),
        np.array(LABELS, np.int32),
        ("art", "law", "war"),
        {
            "train": np.array([0, 2]),
            "validation": np.array([3]),
            "test": np.array([4, 6]),
        },
    )


@pytest.mark.parametrize(
    ("name", "nodes", "edges"), [("cora", 2485, 5069), ("citeseer", 2110, 3668)]
)
def test_published_largest_components(data_dir, name, nodes, edges):
    largest = node_graphs.largest_component(citation.load(name, data_dir))
    assert (len(largest.labels), len(largest.edges)) == (nodes, edges)
    parts = csgraph.connected_components(node_graphs.adjacency(largest))[0]
    assert parts == 1
    assert (largest.labels >= 0).all()
    assert f"{nodes} of" in largest.notes[-1]


def test_adjacency(toy):
    matrix = node_graphs.adjacency(toy)
    expected = np.zeros((7, 7), np.float32)
    for first, second in EDGES:
        expected[first, second] = expected[second, first] = 1
    np.testing.assert_array_equal(matrix.toarray(), expected)
    assert matrix.dtype == np.float32 and matrix.has_sorted_indices


def test_largest_component_and_statistics(toy):
    largest = node_graphs.largest_component(toy)
    assert largest.edges.tolist() == [[0, 1], [0, 3], [1, 2], [2, 3]]
    np.testing.assert_array_equal(dense(largest), FEATURES[:4])
    assert {name: nodes.tolist() for name, nodes in largest.splits.items()} == {
        "train": [0, 2],
        "validation": [3],
        "test": [],
    }
    assert largest.notes == ("largest of 3 components: 4 of 7 nodes",)
    assert node_graphs.largest_component(largest) is largest
    assert node_graphs.statistics(toy) == {
        "name": "toy",
        "num_nodes": 7,
        "num_edges": 5,
        "num_features": 3,
        "num_nonzero_features": 8,
        "num_classes": 3,
        "class_names": ["art", "law", "war"],
        "class_sizes": [3, 2, 2],
        "unlabelled_nodes": 0,
        "isolated_nodes": 1,
        "largest_degree": 2,
        "num_components": 3,
        "largest_component_nodes": 4,
        "largest_component_edges": 4,
        "train_nodes": 2,
        "validation_nodes": 1,
        "test_nodes": 2,
        "notes": [],
    }


def test_absent_nodes_are_in_no_component(toy):
    # node 3 has no features; without a label it is absent, and links 0 and 2 no more
    edges = np.array([(0, 3), (1, 2), (2, 3), (4, 5)], np.int32)

    def unlabelled(node):
        labels = np.where(np.arange(7) == node, -1, toy.labels)
        return toy._replace(edges=edges, labels=labels, splits={})

    dataset = unlabelled(3)
    largest = node_graphs.largest_component(dataset)
    np.testing.assert_array_equal(dense(largest), FEATURES[[1, 2]])
    assert node_graphs.statistics(dataset)["num_components"] == 4
    assert node_graphs.statistics(dataset)["largest_component_edges"] == 1
    dataset = unlabelled(1)  # which has features: it stays
    assert len(node_graphs.largest_component(dataset).labels) == 4


@pytest.mark.parametrize("is_sparse", [True, False])
def test_binarised(toy, is_sparse):
    features = -FEATURES
    features[0, 2] = 2
    kept = scipy.sparse.csr_array(features) if is_sparse else features
    result = node_graphs.binarised(toy._replace(features=kept))
    expected = np.zeros((7, 3))
    expected[0, 2] = 1
    np.testing.assert_array_equal(dense(result), expected)
    assert result.features.dtype == np.float32
    assert "binarised" in result.notes[-1]


def test_small_classes_lose_their_labels(toy):
    labels = np.array([0, 1, 1, 2, 2, 2, -1], np.int32)
    dataset = toy._replace(labels=labels, class_names=("a", "b", "c"))
    result = node_graphs.without_small_classes(dataset, 2)
    assert result.labels.tolist() == [-1, 0, 0, 1, 1, 1, -1]
    assert result.labels.dtype == np.int32
    assert result.class_names == ("b", "c")
    assert result.notes[-1].endswith("count as unlabelled: a")
    assert node_graphs.without_small_classes(dataset, 1) is dataset


@pytest.mark.parametrize(
    ("nodes", "words"), [([0, 7], "has 7, expected 0 to"), ([1, 1], "node twice")]
)
def test_a_subset_that_cannot_be(toy, nodes, words):
    with pytest.raises(InputError, match=words):
        node_graphs.subset(toy, nodes)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_subset_is_the_induced_subgraph(data):
    number = data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dataset = _random(rng, number)
    nodes = rng.permutation(number)[: data.draw(st.integers(0, number))]
    part = node_graphs.subset(dataset, nodes)
    whole = node_graphs.adjacency(dataset).toarray()
    np.testing.assert_array_equal(
        node_graphs.adjacency(part).toarray(), whole[np.ix_(nodes, nodes)]
    )
    assert part.edges.tolist() == sorted(part.edges.tolist())
    assert (part.edges[:, 0] < part.edges[:, 1]).all()
    np.testing.assert_array_equal(part.labels, dataset.labels[nodes])
    np.testing.assert_array_equal(part.features, dataset.features[nodes])
    kept = set(dataset.splits["train"].tolist()) & set(nodes.tolist())
    assert set(nodes[part.splits["train"]].tolist()) == kept


def _random(rng, number):
    upper = np.triu(rng.random((number, number)) < 0.3, 1)
    return node_graphs.NodeDataset(
        "random",
        rng.random((number, 2)).astype(np.float32),
        np.argwhere(upper).astype(np.int32),
        rng.integers(0, 2, number).astype(np.int32),
        ("a", "b"),
        {"train": np.flatnonzero(rng.random(number) < 0.5).astype(np.int32)},
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 15), st.integers(0, 2**32 - 1))
def test_the_largest_component_is_what_a_search_finds(number, seed):
    dataset = _random(np.random.default_rng(seed), number)
    neighbours = node_graphs.adjacency(dataset).toarray() > 0
    components = []
    for node in range(number):
        if any(node in component for component in components):
            continue
        found, frontier = {node}, [node]
        while frontier:
            new = set(np.flatnonzero(neighbours[frontier.pop()])) - found
            found |= new
            frontier += new
        components.append(sorted(found))
    best = max(components, key=len)
    largest = node_graphs.largest_component(dataset)
    np.testing.assert_array_equal(largest.features, dataset.features[best])
    assert node_graphs.statistics(dataset)["num_components"] == len(components)
