"""How images are dealt to clients."""

import dataclasses

import numpy as np
import pytest

from fedjax_graph.core import batching
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.images import label_shards as partition
from tests.data.images.toy_images import toy


def sorted_indices(labels):
    return [i for label in sorted(set(labels)) for i in np.flatnonzero(labels == label)]


def test_shards_are_dealt_once_each():
    dealt = partition.shard_partition(np.zeros(120, int), 5, 4, key_seed=3)
    assert dealt.shape == (5, 4)
    assert sorted(dealt.ravel()) == list(range(20))
    assert dealt.ravel().tolist() != list(range(20))
    again = partition.shard_partition(np.ones(120, int), 5, 4, key_seed=3)
    np.testing.assert_array_equal(dealt, again)
    other = partition.shard_partition(np.zeros(120, int), 5, 4, key_seed=4)
    assert (dealt != other).any()


def test_a_shard_is_a_run_of_the_sorted_images():
    labels = np.array([1, 0, 1, 0, 2, 0])
    indices = partition.shard_indices(labels, np.array([[2], [0], [1]]))
    assert indices.tolist() == [[2, 4], [1, 3], [5, 0]]
    assert indices.dtype == np.int32


@pytest.mark.parametrize(
    ("num_clients", "shards", "words"),
    [
        (6, 3, ["6 clients x 3 shards = 18 shards", "cut 120 training", "1, 2, 5, 10"]),
        (10, 4, ["10 clients x 4 shards = 40 shards", "cut 60 test", "1, 2, 3, 6"]),
        (60, 3, ["= 180 shards, more than the 120 training", "fit 60 clients: 1"]),
        (60, 2, ["= 120 shards, more than the 60 test", "fit 60 clients: 1"]),
        (7, 1, ["cut 120 training", "clients that fit: 4, 5, 6, 10"]),
        (0, 1, ["num_clients = 0"]),
        (1, -1, ["shards = -1"]),
    ],
)
def test_shards_that_do_not_fit(num_clients, shards, words):
    with pytest.raises(InputError) as raised:
        partition.make_splits(toy(), num_clients, shards)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_a_partition_checks_its_own_numbers():
    with pytest.raises(InputError, match="39 shards.* 26 training .*: 1, 2"):
        partition.shard_partition(np.zeros(26, int), 13, 3, 0)
    with pytest.raises(InputError, match="seed = -1"):
        partition.shard_partition(np.zeros(26, int), 13, 2, -1)


def test_clients_are_linked_by_their_most_frequent_labels():
    counts = np.array(
        [
            [9, 8, 7, 6, 5, 4, 0],  # the sixth label does not count
            [0, 0, 0, 0, 0, 3, 0],
            [0, 0, 0, 0, 9, 0, 9],
            [0, 0, 0, 0, 0, 0, 1],
            [0, 0, 0, 0, 0, 0, 0],
        ]
    )
    expected = np.eye(5)
    for a, b in [(0, 2), (2, 3)]:
        expected[a, b] = expected[b, a] = 1
    links = partition.relation_graph(counts)
    np.testing.assert_array_equal(links, expected)
    assert links.dtype == np.float32
    expected[0, 1] = expected[1, 0] = 1
    np.testing.assert_array_equal(partition.relation_graph(counts, most=6), expected)


@pytest.mark.parametrize(
    ("ties", "expected"),
    [
        ("lower", [[1, 0, 1], [0, 1, 0], [1, 0, 1]]),
        ("higher", [[1, 1, 1], [1, 1, 0], [1, 0, 1]]),
    ],
)
def test_equal_counts_go_to_the_lower_or_the_higher_label(ties, expected):
    tied = np.array([[1, 1, 1], [0, 0, 1], [0, 1, 0]])
    found = partition.relation_graph(tied, most=2, ties=ties)
    np.testing.assert_array_equal(found, expected)


def test_links_count_the_labels_that_are_shared():
    counts = np.array([[3, 2, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    expected = [[3, 2, 2, 0], [2, 2, 1, 0], [2, 1, 2, 0], [0, 0, 0, 1]]
    found = partition.relation_graph(counts, weights="count")
    np.testing.assert_array_equal(found, expected)
    two = partition.relation_graph(counts, most=2, weights="count")
    expected = [[2, 1, 2, 0], [1, 2, 1, 0], [2, 1, 2, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(two, expected)


# The share of images with labels of its own in what one of 100 clients takes, by m.
OWN_LABELS = {
    ("count", 1): {2: 0.577, 5: 0.510, 10: 0.681, 20: 0.890},
    ("binary", 3): {5: 0.406, 10: 0.653, 20: 0.883},
    "uniform": {2: 0.195, 5: 0.405, 10: 0.653, 20: 0.883},
}


@pytest.mark.parametrize("shards", [2, 5, 10, 20])
def test_counts_keep_to_ones_own_labels_where_binary_links_do_not(shards):
    labels = np.repeat(np.arange(10), 200)
    found = {mixing: [] for mixing in OWN_LABELS}
    for seed in range(5):
        dealt = partition.shard_partition(labels, 100, shards, seed)
        images = labels[partition.shard_indices(labels, dealt)]
        counts = np.stack([np.bincount(own, minlength=10) for own in images])
        for mixing, shares in found.items():
            A = np.full((100, 100), 1 / 100)
            if mixing != "uniform":
                links = partition.relation_graph(counts, weights=mixing[0])
                rows = links / links.sum(axis=1, keepdims=True)
                A = np.linalg.matrix_power(rows, mixing[1])
            taken = A @ (counts / counts.sum(axis=1, keepdims=True))
            shares.append((taken * (counts > 0)).sum(axis=1).mean())
    for mixing, shares in found.items():
        if shards in OWN_LABELS[mixing]:
            assert np.mean(shares) == pytest.approx(
                OWN_LABELS[mixing][shards], abs=0.015
            )


@pytest.fixture(scope="module")
def dealt():
    return toy(), partition.make_splits(toy(), 5, 3, seed=2, validation_fraction=0.25)


def test_each_client_gets_its_shards(dealt):
    dataset, splits = dealt
    numbers = partition.shard_partition(dataset.train_labels, 5, 3, 2)
    by_label = np.array(sorted_indices(dataset.train_labels))
    by_test_label = np.array(sorted_indices(dataset.test_labels))
    assert tuple(splits) == batching.SPLITS
    train, validation, test = (np.asarray(s.indices) for s in splits.values())
    assert (train.shape, validation.shape, test.shape) == ((5, 18), (5, 6), (5, 12))
    for client, own in enumerate(numbers):
        wanted = {i for s in own for i in by_label[8 * s : 8 * s + 8]}
        assert {*train[client], *validation[client]} == wanted
        tested = {120 + i for s in own for i in by_test_label[4 * s : 4 * s + 4]}
        assert set(test[client]) == tested
    everything = np.concatenate([train, validation, test], axis=1)
    assert sorted(everything.ravel()) == list(range(180))


def test_the_places_lead_to_the_images(dealt):
    dataset, splits = dealt
    for name, split in splits.items():
        from_test = name == "test"
        pictures = dataset.test_images if from_test else dataset.train_images
        labels = dataset.test_labels if from_test else dataset.train_labels
        for index in np.asarray(split.indices).ravel():
            row = index - 120 * from_test
            np.testing.assert_array_equal(split.images[index], pictures[row])
            assert split.labels[index] == labels[row]
        np.testing.assert_array_equal(split.mask, np.ones(split.indices.shape))
        assert split.images.dtype == np.uint8
        assert split.labels.dtype == split.indices.dtype == np.int32
        assert split.mask.dtype == split.client_weights.dtype == np.float32
        np.testing.assert_array_equal(split.client_weights, [18] * 5)
        np.testing.assert_array_equal(split.client_ids, range(5))


def test_a_client_is_tested_on_its_own_mix_of_labels(dealt):
    dataset, splits = dealt
    labels = np.asarray(splits["train"].labels)
    for client in range(5):
        own = [
            np.bincount(labels[np.asarray(splits[name].indices)[client]], minlength=4)
            for name in batching.SPLITS
        ]
        np.testing.assert_array_equal(own[0] + own[1], 2 * own[2])
        assert (own[2] == 0).any()  # and that mix is a mix of few


def test_validation_images_are_drawn_from_the_identity_of_the_client(dealt):
    dataset, splits = dealt
    validation = np.asarray(splits["validation"].indices)
    rank = np.argsort(sorted_indices(dataset.train_labels))
    within = np.sort(rank[validation] % 8, axis=1)  # indices within a shard
    assert len({tuple(row) for row in within}) > 1
    again = partition.make_splits(dataset, 5, 3, seed=2, validation_fraction=0.25)
    np.testing.assert_array_equal(again["validation"].indices, validation)
    other = partition.make_splits(dataset, 5, 3, seed=3, validation_fraction=0.25)
    assert (np.asarray(other["validation"].indices) != validation).any()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 1.5, 0.01, 0.99, float("nan")])
def test_fractions_that_leave_nothing(fraction):
    with pytest.raises(InputError, match="validation_fraction = .* 24 training images"):
        partition.make_splits(toy(), 5, 3, validation_fraction=fraction)


def test_the_graph_follows_the_labels_of_all_training_images(dealt):
    dataset, splits = dealt
    own = [set() for _ in range(5)]
    for name in ("train", "validation"):
        for client, indices in enumerate(np.asarray(splits[name].indices)):
            own[client] |= set(dataset.train_labels[indices].tolist())
    expected = {(a, b) for a in range(5) for b in range(5) if own[a] & own[b]}
    assert 5 < len(expected) < 25
    graph = splits["test"].graph
    ends = zip(np.asarray(graph.senders), np.asarray(graph.receivers), strict=True)
    assert sorted(ends) == sorted(expected)
    np.testing.assert_array_equal(graph.weights, np.ones(len(expected)))
    np.testing.assert_array_equal(graph.node_mask, np.ones(5))
    one_to_train = partition.make_splits(dataset, 5, 3, 2, validation_fraction=0.96)
    assert one_to_train["train"].indices.shape == (5, 1)
    for ours, theirs in zip(graph, one_to_train["train"].graph, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_moments_are_those_of_the_training_pixels(dealt):
    dataset, splits = dealt
    pixels = dataset.train_images.astype(float) / 255
    for split in splits.values():
        np.testing.assert_allclose(split.mean, pixels.mean((0, 1, 2)), rtol=1e-5)
        np.testing.assert_allclose(split.std, pixels.std((0, 1, 2)), rtol=1e-5)
    grey = dataclasses.replace(dataset, train_images=0 * dataset.train_images + 7)
    with pytest.raises(InputError, match="toy: a colour is the same"):
        partition.make_splits(grey, 5, 3)
