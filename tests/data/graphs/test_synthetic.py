import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import node_dataset as node_graphs
from fedjax_graph.data.graphs import synthetic as synthetic_graphs


def check_edges(dataset, num_edges):
    edges = dataset.edges
    assert edges.shape == (num_edges, 2) and edges.dtype == np.int32
    assert (edges[:, 0] < edges[:, 1]).all()
    assert edges.min() >= 0 and edges.max() < len(dataset.labels)
    pairs = list(map(tuple, edges.tolist()))
    assert pairs == sorted(set(pairs))


def within_share(dataset):
    ends = dataset.labels[dataset.edges]
    return (ends[:, 0] == ends[:, 1]).mean()


def test_the_standard_graph():
    dataset = synthetic_graphs.node_graph()
    check_edges(dataset, 6000)
    assert within_share(dataset) == 0.8
    assert np.bincount(dataset.labels).tolist() == [500] * 6
    assert dataset.features.shape == (3000, 300)
    assert set(dataset.features.data) == {1.0}
    words = np.diff(dataset.features.indptr)
    assert words.min() >= 1 and words.max() <= 12 and words.mean() > 9
    assert dataset.name == "synthetic" and dataset.splits == {}
    assert len(node_graphs.largest_component(dataset).labels) > 2600


@pytest.mark.parametrize("homophily", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_classes", [2, 7])
def test_homophily_and_size_are_exact(homophily, num_classes):
    dataset = synthetic_graphs.node_graph(
        301, num_classes, 40, mean_degree=6, homophily=homophily, seed=3
    )
    check_edges(dataset, 903)
    assert within_share(dataset) == pytest.approx(homophily, abs=0.5 / 903)
    sizes = np.bincount(dataset.labels)
    assert len(sizes) == num_classes and np.ptp(sizes) <= 1
    ends = dataset.labels[dataset.edges]
    steps = (ends[:, 0] - ends[:, 1]) % num_classes
    assert set(steps.tolist()) <= {0, 1, num_classes - 1}


def test_degrees_have_a_tail_and_labels_no_order():
    dataset = synthetic_graphs.node_graph(20000, 4, 20, mean_degree=20, seed=1)
    degrees = np.sort(np.bincount(dataset.edges.ravel(), minlength=20000))[::-1]
    # at place x of 1 the expected degree is 20 / (2 sqrt(x))
    for share in (0.01, 0.1, 0.5):
        expected = 10 / np.sqrt(share)
        assert degrees[int(share * 20000)] == pytest.approx(expected, rel=0.2)
    halves = np.bincount(dataset.labels[:10000], minlength=4)
    assert np.abs(halves - 2500).max() < 250


def test_features_tell_the_class_in_part():
    dataset = synthetic_graphs.node_graph()
    bags = dataset.features.toarray()
    own = nearest_by_words(bags, dataset.labels)
    adjacency = node_graphs.adjacency(dataset)
    smooth = adjacency @ (adjacency @ bags) + 2 * (adjacency @ bags) + bags
    smoothed = nearest_by_words(smooth, dataset.labels)
    assert 0.45 < own < 0.75
    assert own + 0.1 < smoothed < 0.95


def nearest_by_words(features, labels):
    """Accuracy of naive Bayes that learns from the first half."""
    half = len(labels) // 2
    counts = np.stack(
        [features[:half][labels[:half] == c].sum(axis=0) for c in range(6)]
    )
    scores = np.log((counts + 1) / (counts + 1).sum(axis=1, keepdims=True))
    found = (features[half:] @ scores.T).argmax(axis=1)
    return (found == labels[half:]).mean()


@pytest.mark.parametrize("make", ["node_graph", "large_node_graph"])
def test_the_seed_is_all_that_decides(make):
    sizes = {"num_nodes": 200, "num_classes": 3, "num_features": 30}
    if make == "large_node_graph":
        sizes["num_edges"] = 500
    first, again, other = (
        getattr(synthetic_graphs, make)(**sizes, seed=seed) for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first.edges, again.edges)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert abs(first.features - again.features).sum() == 0
    assert not np.array_equal(first.edges, other.edges)
    assert "seed 5" in first.notes[0]


def test_a_small_large_graph(monkeypatch):
    monkeypatch.setattr(synthetic_graphs, "_CHUNK", 1000)  # many of edges and nodes
    dataset = synthetic_graphs.large_node_graph(3000, 40000, 50, 5, seed=2)
    check_edges(dataset, 40000)
    assert within_share(dataset) == synthetic_graphs.LARGE_HOMOPHILY
    assert dataset.features.dtype == np.float32
    assert dataset.features.shape == (3000, 50)
    means = np.stack(
        [dataset.features[dataset.labels == c].mean(axis=0) for c in range(5)]
    )
    noise = dataset.features - means[dataset.labels]
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert means.std() == pytest.approx(synthetic_graphs.MEAN_SPREAD, rel=0.2)


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        ("node_graph", {"num_classes": 1}, "num_classes = 1"),
        ("node_graph", {"num_nodes": 11}, "num_classes = 6: expected 2 to 5"),
        ("node_graph", {"homophily": 1.1}, "homophily = 1.1"),
        ("node_graph", {"mean_degree": 0}, "num_edges = 0"),
        ("node_graph", {"mean_degree": 200}, "edges within a class"),
        ("node_graph", {"mean_degree": 900, "homophily": 0}, "and the next"),
        ("node_graph", {"words_per_node": 0}, "words_per_node = 0"),
        ("node_graph", {"seed": -1}, "seed = -1"),
        ("large_node_graph", {"num_features": 0}, "num_features = 0"),
        ("large_node_graph", {"num_nodes": 10**4}, "ask for fewer edges"),
    ],
)
def test_numbers_out_of_range(make, changes, words):
    with pytest.raises(InputError, match=words):
        getattr(synthetic_graphs, make)(**changes)
