"""Subgraph clients against sets and loops over the whole graph."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import numpy.testing as npt
import pytest
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import client_subgraphs as client_graphs
from fedjax_graph.data.graphs import datasets as citation
from fedjax_graph.data.graphs import node_dataset as node_graphs
from fedjax_graph.data.graphs import subgraphs
from fedjax_graph.data.graphs import synthetic as synthetic_graphs
from fedjax_graph.data.graphs.client_subgraphs import (
    NodeSplit,
    has_published_split,
    make_split,
    make_splits,
    planetoid_split,
)
from fedjax_graph.data.graphs.node_dataset import NodeDataset
from tests import client_graphs as small_graph

SEEDS = st.integers(0, 2**32)
by_property = hypothesis.settings(deadline=None, derandomize=True, max_examples=20)


def fails(match, function, *args, **changes):
    with pytest.raises(InputError, match=match) as raised:
        function(*args, **changes)
    assert "\n" not in str(raised.value)


def dataset_of(edges, labels, features, num_classes=3):
    return NodeDataset(
        name="small",
        features=features,
        edges=np.array(edges, np.int32).reshape(-1, 2),
        labels=np.array(labels, np.int32),
        class_names=tuple("abcdefgh"[:num_classes]),
        splits={},
    )


def drawn(num_nodes, seed, share=0.3):
    """A random graph whose node 0 has no edge, its last one no label, and a split."""
    rng = np.random.default_rng(seed)
    is_edge = np.triu(rng.random((num_nodes, num_nodes)) < share, 1)
    is_edge[0] = False
    labels = rng.integers(0, 3, num_nodes)
    labels[-1] = -1
    features = rng.integers(1, 5, (num_nodes, 4)) * (rng.random((num_nodes, 4)) < 0.6)
    dataset = dataset_of(np.argwhere(is_edge), labels, features.astype(np.float32))
    sets = np.split(rng.permutation(num_nodes - 1), [2, 4, 6])[:3]
    return dataset, NodeSplit(*(np.sort(own).astype(np.int32) for own in sets))


def cut(dataset, num_clients, overlap=0.0, seed=0):
    adjacency = node_graphs.adjacency(dataset)
    return subgraphs.parts(adjacency, num_clients, overlap, seed=seed)


def clients_of(data):
    """One dict of NumPy arrays for each client."""
    fields = {key: x for key, x in data._asdict().items() if x is not None}
    arrays = {key: np.asarray(value) for key, value in fields.items()}
    return [{k: v[i] for k, v in arrays.items()} for i in range(len(data.client_ids))]


def marked(nodes, mask):
    """The numbers in the dataset of a client's marked nodes."""
    indices = np.flatnonzero(mask)
    assert (indices < len(nodes)).all()
    return {nodes[index] for index in indices}


# --- Clients --------------------------------------------------------------------------


@by_property
@hypothesis.given(
    st.integers(1, 6),
    st.integers(8, 20),
    st.sampled_from([0, 0.3]),
    st.booleans(),
    st.booleans(),
    SEEDS,
)
def test_clients_hold_what_a_loop_gives_them(
    num_clients, num_nodes, overlap, outside_neighbours, is_sparse, seed
):
    dataset, split = drawn(num_nodes, seed)
    dense = dataset.features
    if is_sparse:
        dataset = dataset._replace(features=scipy.sparse.csr_array(dense))
    parts = cut(dataset, num_clients, overlap, seed)
    splits = make_splits(dataset, parts, split, outside_neighbours=outside_neighbours)

    joined = {(int(i), int(j)) for i, j in dataset.edges}
    joined |= {(j, i) for i, j in joined}
    trained, validated, tested = ({int(node) for node in own} for own in split)
    scored = zip(
        clients_of(splits["validation"]), clients_of(splits["test"]), strict=True
    )
    most_nodes = most_edges = 0
    for k, (client, test) in enumerate(scored):
        own = [int(node) for node in parts.nodes[k]]
        copies = sorted({j for i, j in joined if i in own} - set(own))
        nodes = own + copies if outside_neighbours else own
        expected = {
            (i, j) for i, j in joined if {i, j} <= set(nodes) and {i, j} & set(own)
        }
        most_nodes = max(most_nodes, len(nodes))
        most_edges = max(most_edges, len(expected))

        is_edge = client["edge_weights"] > 0
        ends = zip(
            client["senders"][is_edge], client["receivers"][is_edge], strict=True
        )
        edges = [(nodes[s], nodes[r]) for s, r in ends]
        assert len(edges) == len(set(edges)) and set(edges) == expected
        assert np.all(np.diff(client["receivers"]) >= 0)
        assert set(client["edge_weights"].tolist()) <= {0.0, 1.0}
        assert not client["senders"][~is_edge].any()
        assert (client["receivers"][~is_edge] == len(client["is_real"]) - 1).all()

        size = len(nodes)
        npt.assert_array_equal(
            client["is_real"], np.arange(len(client["labels"])) < size
        )
        npt.assert_array_equal(client["features"][:size], dense[nodes])
        assert not client["features"][size:].any()
        mine = {node for node in own if parts.owners[node] == k}
        labels = [max(int(dataset.labels[n]), 0) * (n in mine) for n in nodes]
        npt.assert_array_equal(client["labels"][:size], labels)
        assert not client["labels"][size:].any()

        assert marked(nodes, client["is_trained"]) == trained & mine
        assert marked(nodes, client["is_scored"]) == validated & mine
        assert marked(nodes, test["is_scored"]) == tested & mine
        assert client["client_ids"] == k
        assert client["client_weights"] == len(trained & mine)
    assert splits["train"].labels.shape == (num_clients, most_nodes)
    assert splits["train"].senders.shape == (num_clients, most_edges)


def small_splits(num_clients=3, **options):
    dataset, split = drawn(12, seed=1)
    return make_splits(dataset, cut(dataset, num_clients), split, **options)


def test_splits_share_all_arrays_but_who_is_scored():
    splits = small_splits()
    assert list(splits) == ["train", "validation", "test"]
    for name, leaf in splits["train"]._asdict().items():
        assert leaf is getattr(splits["validation"], name)
        assert (leaf is getattr(splits["test"], name)) == (name != "is_scored")
    scored = splits["validation"].is_scored * splits["test"].is_scored
    assert not np.asarray(scored).any()


def test_leaves_are_of_the_stated_types():
    train = small_splits()["train"]
    integers = {"senders", "receivers", "labels", "client_ids"}
    for name, leaf in train._asdict().items():
        if leaf is None:
            continue
        assert isinstance(leaf, jax.Array)
        assert leaf.dtype == (np.int32 if name in integers else np.float32)


def test_outside_copies_stand_behind_and_change_nothing_before_them():
    alone, joined = small_splits(), small_splits(outside_neighbours=True)
    size = alone["train"].labels.shape[1]
    assert joined["train"].labels.shape[1] > size
    for split in alone:
        for key in ("labels", "is_trained", "is_scored", "client_weights"):
            first, second = getattr(alone[split], key), getattr(joined[split], key)
            npt.assert_array_equal(
                first, second[..., :size] if first.ndim > 1 else second
            )
            assert first.sum() == second.sum()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_normalised_features_sum_to_one_or_zero(is_sparse):
    features = np.array([[1, 3], [0, 0], [2, 0], [0, 5]], np.float32)
    expected = np.array([[0.25, 0.75], [0, 0], [1, 0], [0, 1]])
    given = scipy.sparse.csr_array(features) if is_sparse else features.copy()
    dataset = dataset_of([(0, 1), (2, 3)], [0, 1, 2, 0], given)
    parts = subgraphs.Parts(
        np.array([0, 0, 0, 1], np.int32), (np.array([0, 1, 2]), np.array([3]))
    )
    split = NodeSplit(*(np.array([n], np.int32) for n in range(3)))
    data = make_splits(dataset, parts, split, normalise_features=True)["train"]
    npt.assert_allclose(data.features[0], expected[:3])
    npt.assert_allclose(data.features[1], [expected[3], [0, 0], [0, 0]])
    kept = given.toarray() if is_sparse else given
    npt.assert_array_equal(kept, features)
    plain = make_splits(dataset, parts, split)["train"]
    npt.assert_array_equal(plain.features[0], features[:3])


def test_a_client_without_trained_nodes_is_scored_all_the_same():
    dataset = dataset_of([(0, 1), (2, 3)], [0, 1, 2, 0], np.eye(4, dtype=np.float32))
    parts = subgraphs.Parts(
        np.array([0, 0, 1, 1], np.int32), (np.array([0, 1]), np.array([2, 3]))
    )
    split = NodeSplit(*(np.array(own, np.int32) for own in ([0], [1, 2], [3])))
    splits = make_splits(dataset, parts, split)
    assert splits["train"].client_weights.tolist() == [1, 0]
    assert splits["train"].is_scored.tolist() == [[0, 1], [1, 0]]
    assert splits["test"].is_scored.tolist() == [[0, 0], [0, 1]]
    assert splits["test"].is_real.tolist() == [[1, 1], [1, 1]]


def test_a_graph_without_edges():
    dataset, split = drawn(9, seed=0, share=0)
    parts = cut(dataset, 2)
    splits = make_splits(dataset, parts, split, outside_neighbours=True)
    assert splits["train"].senders.shape == (2, 0)
    statistics = client_graphs.statistics(dataset, parts, splits)
    assert statistics["edges_cut"] == 0
    assert statistics["edges_cut_share"] == statistics["padded_edges_share"] == 0


@pytest.mark.parametrize(
    "match, changes",
    [
        (r"the train split has the node 12, expected 0 to 11", {"train": [12]}),
        (r"the test split has 1 nodes, .* each with a label", {"test": [11]}),
        (r"the validation split has 0 nodes, expected at", {"validation": []}),
        (r"a node is in the split twice", {"train": [3], "test": [3]}),
    ],
)
def test_splits_that_do_not_fit(match, changes):
    dataset, split = drawn(12, seed=1)
    sets = {key: np.array(nodes, np.int32) for key, nodes in changes.items()}
    fails(match, make_splits, dataset, cut(dataset, 2), split._replace(**sets))


def test_parts_of_another_dataset():
    dataset, split = drawn(12, seed=1)
    parts = cut(drawn(13, seed=1)[0], 2)
    fails(r"parts of 13 nodes: .* the 12 of small", make_splits, dataset, parts, split)


# --- Statistics -----------------------------------------------------------------------


@pytest.mark.parametrize("outside_neighbours", [False, True])
def test_statistics_by_hand(outside_neighbours):
    """Parts 0 1 2 and 3 4; of six edges 0-3 and 2-3 lie between them."""
    edges = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (3, 4)]
    dataset = dataset_of(edges, [0, 1, 2, 0, 1], np.eye(5, dtype=np.float32))
    parts = subgraphs.Parts(
        np.array([0, 0, 0, 1, 1], np.int32), (np.array([0, 1, 2]), np.array([3, 4]))
    )
    split = NodeSplit(*(np.array(own, np.int32) for own in ([0, 1], [2], [3, 4])))
    splits = make_splits(dataset, parts, split, outside_neighbours=outside_neighbours)
    statistics = client_graphs.statistics(dataset, parts, splits)
    # Alone: 3 and 2 nodes with 6 and 2 directed edges. With copies: 4 and 4 nodes, and
    # four more directed edges each.
    padding = {"padded_nodes_share": 1 / 6, "padded_edges_share": 4 / 12}
    if outside_neighbours:
        padding = {"padded_nodes_share": 0, "padded_edges_share": 4 / 20}
    assert statistics == {
        "num_clients": 2,
        "edges": 6,
        "edges_cut": 2,
        "edges_cut_share": pytest.approx(1 / 3),
        "smallest_part": 2,
        "largest_part": 3,
        **{key: pytest.approx(value) for key, value in padding.items()},
        "train_nodes": [2, 0],
        "validation_nodes": [1, 0],
        "test_nodes": [0, 2],
        "outside_copies": [1, 2] if outside_neighbours else [0, 0],
    }
    numbers = [
        n for v in statistics.values() for n in (v if isinstance(v, list) else [v])
    ]
    assert all(type(number) in (int, float) for number in numbers)


# --- Labels ---------------------------------------------------------------------------

LABELS = np.random.default_rng(0).permutation(np.repeat([-1, 0, 1, 2], 40))


@by_property
@hypothesis.given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 30), SEEDS)
def test_planetoid_splits_have_the_sizes_asked_for(per_class, validation, test, seed):
    split = planetoid_split(
        LABELS,
        num_classes=3,
        per_class=per_class,
        num_validation=validation,
        num_test=test,
        seed=seed,
    )
    npt.assert_array_equal(np.bincount(LABELS[split.train]), [per_class] * 3)
    assert (len(split.validation), len(split.test)) == (validation, test)
    nodes = np.concatenate(split)
    assert len(set(nodes.tolist())) == len(nodes) and (LABELS[nodes] >= 0).all()
    for own in split:
        assert own.dtype == np.int32 and np.all(np.diff(own) > 0)


def drawn_small(**changes):
    sizes = dict(num_classes=3, per_class=5, num_validation=20, num_test=30)
    return planetoid_split(LABELS, **{**sizes, **changes})


def test_planetoid_splits_depend_on_the_seed_only():
    first, again, other = (drawn_small(seed=seed) for seed in (1, 1, 2))
    for own, same, different in zip(first, again, other, strict=True):
        npt.assert_array_equal(own, same)
        assert not np.array_equal(own, different)


def test_all_that_is_left_can_be_asked_for():
    split = drawn_small(per_class=40 - 17, num_validation=21, num_test=30)
    everyone = np.sort(np.concatenate(split))
    npt.assert_array_equal(everyone, np.flatnonzero(LABELS >= 0))


@pytest.mark.parametrize(
    "match, changes",
    [
        (r"labels_per_class = 41: class 0 has only 40 labelled", {"per_class": 41}),
        (
            r"num_validation = 76: 15 training and 30 test nodes leave 75",
            {"num_validation": 76},
        ),
        (r"num_test = 106: 15 training nodes leave 105", {"num_test": 106}),
        (r"labels has the label 2, expected 0 to 1", {"num_classes": 2}),
        (r"class 3 has only 0 labelled", {"num_classes": 4}),
        (r"seed = -1: expected .* at least 0", {"seed": -1}),
    ],
)
def test_planetoid_splits_name_what_is_wrong(match, changes):
    fails(match, drawn_small, **changes)


def test_the_published_split_or_a_drawn_one():
    dataset, split = drawn(12, seed=1)
    sizes = dict(per_class=1, num_validation=2, num_test=3)
    expected = planetoid_split(dataset.labels, num_classes=3, seed=4, **sizes)
    with_split = dataset._replace(splits=split._asdict())
    partial = dataset._replace(splits={"train": split.train})
    for own, published in [(with_split, False), (dataset, True), (partial, True)]:
        made = make_split(own, published=published, seed=4, **sizes)
        for nodes, wanted in zip(made, expected, strict=True):
            npt.assert_array_equal(nodes, wanted)
    for nodes, wanted in zip(make_split(with_split), split, strict=True):
        npt.assert_array_equal(nodes, wanted)
    assert has_published_split(with_split) and not has_published_split(partial)


def test_a_synthetic_graph_has_a_drawn_split():
    dataset = synthetic_graphs.node_graph(
        num_nodes=300, num_features=20, words_per_node=5
    )
    split = make_split(dataset, per_class=4, num_validation=50, num_test=100)
    splits = make_splits(dataset, cut(dataset, 4), split)
    statistics = client_graphs.statistics(dataset, cut(dataset, 4), splits)
    totals = [sum(statistics[f"{name}_nodes"]) for name in splits]
    assert totals == [4 * 6, 50, 100]


# --- Real data ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_parts_know_nothing_of_labels(seed):
    """One seed draws classes, training nodes and who holds what."""
    dataset = synthetic_graphs.node_graph(seed=seed)
    adjacency, num_clients = node_graphs.adjacency(dataset), 4
    cut = subgraphs.parts(adjacency, num_clients, 0.0, "random", seed)
    edges = cut.owners[dataset.edges]
    assert np.mean(edges[:, 0] != edges[:, 1]) == pytest.approx(3 / 4, abs=0.02)
    train = make_split(dataset, published=False, seed=seed).train
    counts = np.bincount(cut.owners[train], minlength=num_clients)
    expected = len(train) / num_clients
    assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected))
    of_class = np.bincount(dataset.labels[cut.owners == 0]) / np.bincount(
        dataset.labels
    )
    npt.assert_allclose(of_class, 1 / num_clients, atol=0.1)


def test_cora_in_three_parts(data_dir):
    pytest.importorskip("pymetis")
    dataset = citation.load("cora", data_dir)
    parts = subgraphs.parts(node_graphs.adjacency(dataset), 3, partition="metis")
    splits = make_splits(dataset, parts, make_split(dataset))
    statistics = client_graphs.statistics(dataset, parts, splits)
    totals = [sum(statistics[f"{name}_nodes"]) for name in splits]
    assert totals == [140, 500, 1000]
    train = splits["train"]
    assert train.is_real.sum() == 2708
    assert train.features.sum() == dataset.features.sum()
    assert statistics["edges"] == 5278
    assert train.edge_weights.sum() == 2 * (5278 - statistics["edges_cut"])
    assert statistics["edges_cut_share"] < 0.1
    assert statistics["padded_nodes_share"] < 0.05


def test_a_drawn_split_of_citeseer_leaves_out_nodes_without_a_label(data_dir):
    dataset = citation.load("citeseer", data_dir)
    split = make_split(dataset, published=False, seed=3)
    assert [len(own) for own in split] == [120, 500, 1000]
    npt.assert_array_equal(np.bincount(dataset.labels[split.train]), [20] * 6)
    assert (dataset.labels[np.concatenate(split)] >= 0).all()
    assert not np.array_equal(split.test, make_split(dataset).test)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, bool])
def test_sparse_features_of_any_type_are_taken(dtype):
    given = scipy.sparse.csr_array(np.eye(4, 2, dtype=dtype))
    dataset = dataset_of([(0, 1), (2, 3)], [0, 1, 2, 0], given)
    data = make_splits(dataset, *halves())["train"]
    assert data.features.dtype == np.float32
    npt.assert_array_equal(np.concatenate(data.features), given.toarray())


def halves():
    parts = subgraphs.Parts(
        np.array([0, 0, 1, 1], np.int32), (np.array([0, 1]), np.array([2, 3]))
    )
    return parts, NodeSplit(*(np.array([n], np.int32) for n in range(3)))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_negative_features_are_not_divided_by_their_sum(is_sparse):
    features = np.array([[1, -1.0001], [-1, -1], [2, 0], [0, 5]], np.float32)
    given = scipy.sparse.csr_array(features) if is_sparse else features
    dataset = dataset_of([(0, 1), (2, 3)], [0, 1, 2, 0], given)
    with pytest.raises(InputError, match="the features have negative numbers"):
        make_splits(dataset, *halves(), normalise_features=True)


def test_a_split_of_no_label_is_refused():
    with pytest.raises(InputError, match="labels: no node has one"):
        client_graphs.client_split(np.full(5, -1), np.zeros(5, int))


def test_features_spread_over_neighbours_are_sums_over_edges():
    splits = small_graph.make_splits()
    spread = client_graphs.with_spread_features(splits)
    assert spread["train"].features is spread["test"].features
    data = splits["train"]
    found = np.asarray(spread["train"].features.rows)
    for k in range(len(data.client_ids)):
        own = jax.tree.map(lambda x, k=k: np.asarray(x)[k], data.by_client())
        edges = [
            (int(i), int(j), float(w))
            for i, j, w in zip(
                own.senders, own.receivers, own.edge_weights, strict=True
            )
        ]
        degree = [
            1 + sum(w for _, j, w in edges if j == i) for i in range(len(found[k]))
        ]
        expected = np.stack([x / d for x, d in zip(own.features, degree, strict=True)])
        for i, j, weight in edges:
            expected[j] += weight * own.features[i] / np.sqrt(degree[i] * degree[j])
        npt.assert_allclose(found[k], expected, rtol=1e-5, atol=1e-6)
    for given, words in (
        (spread, "spread already"),
        (small_graph.make_splits(is_sparse=True), "are sparse"),
    ):
        with pytest.raises(InputError, match=words):
            client_graphs.with_spread_features(given)
