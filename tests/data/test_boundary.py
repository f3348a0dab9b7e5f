"""Datasets of a user's own that do not fit together make no splits."""

import dataclasses

import numpy as np
import pytest
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import (
    client_subgraphs,
    label_splits,
    node_dataset,
    receptive_fields,
    subgraphs,
)
from fedjax_graph.data.graphs.node_dataset import NodeDataset
from fedjax_graph.data.images import label_shards
from fedjax_graph.data.images.datasets import ImageDataset
from fedjax_graph.data.traffic import inductive, network, windows
from fedjax_graph.data.traffic.network import TrafficDataset

RNG = np.random.default_rng(0)
PATH = np.array([[i, i + 1] for i in range(5)], np.int32)
NODES = NodeDataset(
    "path", np.eye(6, dtype=np.float32), PATH, np.arange(6) % 2, ("a", "b"), {}
)
SPLIT = client_subgraphs.NodeSplit(*np.arange(6).reshape(3, 2))
PARTS = subgraphs.Parts(np.arange(6) // 3, (np.arange(3), np.arange(3, 6)))
TRAFFIC = TrafficDataset(
    "roads",
    RNG.uniform(1, 9, (100, 3)).astype(np.float32),
    np.datetime64("2020-01-01", "ns") + np.arange(100) * windows.FIVE_MINUTES,
    np.arange(3),
    np.eye(3, dtype=np.float32),
)
IMAGES = ImageDataset(
    "toy",
    RNG.integers(0, 255, (8, 2, 2, 3)).astype(np.uint8),
    np.arange(8, dtype=np.int32) % 2,
    RNG.integers(0, 255, (4, 2, 2, 3)).astype(np.uint8),
    np.arange(4, dtype=np.int32) % 2,
    ("a", "b"),
)
LABELS = np.arange(20) % 2
DEAL = {"num_classes": 2, "num_clients": 2, "labels_per_class": 2}
DEAL |= {"num_validation": 3, "num_test": 3}
DRAW = label_splits.non_iid(LABELS, **DEAL)
FEATURES, EVERYTHING = np.ones((20, 3)), np.ones((1, 20), bool)
ADJACENCY = scipy.sparse.eye_array(20, format="csr")


def of_nodes(parts=PARTS, split=SPLIT, **changes):
    return client_subgraphs.make_splits(NODES._replace(**changes), parts, split)


def of_traffic(**changes):
    return windows.make_splits(dataclasses.replace(TRAFFIC, **changes))


def of_images(**changes):
    dataset = dataclasses.replace(IMAGES, **changes)
    return label_shards.make_splits(dataset, 2, 1, validation_fraction=0.5)


def fields(draw=DRAW, features=FEATURES, num_clients=2, **settings):
    return receptive_fields.make_splits(
        ADJACENCY, features, draw, num_clients, **settings
    )


def elsewhere(shift):
    half = DRAW["train"].support
    support = half._replace(nodes=half.nodes + shift)
    return DRAW | {"train": DRAW["train"]._replace(support=support)}


def holding(*nodes):
    return PARTS._replace(nodes=tuple(map(np.array, nodes)))


def pseudo(probabilities, mask=EVERYTHING, number=1):
    return label_splits.with_pseudo_labels(DRAW, probabilities, mask, number)


EVEN = np.full((2, 20, 2), 0.5)
WRONG = {
    "a list of readings": lambda: of_traffic(speed=TRAFFIC.speed.tolist()),
    "a list of ids": lambda: of_traffic(sensor_ids=[0, 1, 2]),
    "a list of images": lambda: of_images(train_images=IMAGES.train_images.tolist()),
    "a list of labels": lambda: of_images(test_labels=[0, 1, 0, 1]),
    "a list of nodes' labels": lambda: of_nodes(labels=[0, 1] * 3),
    "a list of edges": lambda: node_dataset.adjacency(NODES._replace(edges=[[0, 1]])),
    "fewer stamps": lambda: of_traffic(timestamps=TRAFFIC.timestamps[:9]),
    "stamps of integers": lambda: of_traffic(timestamps=np.arange(100)),
    "a NaN reading": lambda: of_traffic(speed=TRAFFIC.speed * np.nan),
    "fewer sensors": lambda: of_traffic(adjacency=np.eye(2)),
    "negative roads": lambda: of_traffic(adjacency=-np.eye(3)),
    "a sensor twice": lambda: network.take_sensors(TRAFFIC, np.array([0, 0])),
    "a sensor beyond": lambda: network.take_sensors(TRAFFIC, np.array([-1])),
    "indices for a mask": lambda: inductive.make_splits(TRAFFIC, np.array([0, 1, 1])),
    "a short mask": lambda: inductive.make_splits(TRAFFIC, np.array([True, False])),
    "a label beyond": lambda: of_images(test_labels=IMAGES.test_labels + 1),
    "a negative label": lambda: of_images(test_labels=IMAGES.test_labels - 1),
    "fewer images": lambda: of_images(test_images=IMAGES.test_images[:2]),
    "grey images": lambda: of_images(train_images=IMAGES.train_images[..., :1]),
    "2.0 shards": lambda: label_shards.make_splits(IMAGES, 2, 2.0),
    "a shard twice": lambda: label_shards.shard_indices(
        np.arange(4), np.array([[0, 0], [1, 1]])
    ),
    "NaN counts": lambda: label_shards.relation_graph(np.full((2, 2), np.nan)),
    "no frequent label": lambda: label_shards.relation_graph(np.eye(2), 0),
    "an edge twice": lambda: node_dataset.adjacency(NODES._replace(edges=PATH[[0, 0]])),
    "a self edge": lambda: node_dataset.adjacency(
        NODES._replace(edges=PATH[:, [0, 0]])
    ),
    "edges of floats": lambda: node_dataset.adjacency(NODES._replace(edges=PATH * 1.0)),
    "an edge beyond": lambda: node_dataset.adjacency(NODES._replace(edges=PATH + 1)),
    "half a node": lambda: node_dataset.subset(NODES, [0.5, 1.7]),
    "a class beyond": lambda: of_nodes(labels=np.arange(6)),
    "more features": lambda: of_nodes(features=np.eye(9)),
    "NaN features": lambda: of_nodes(features=np.full((6, 2), np.nan)),
    "a part beyond": lambda: of_nodes(holding([0, 1, 2], [3, 4, 5, -1])),
    "a part with a node twice": lambda: of_nodes(holding([0, 0, 1, 2], [3, 4, 5])),
    "parts that own more": lambda: of_nodes(holding([0], [3])),
    "owners beyond": lambda: of_nodes(PARTS._replace(owners=np.full(6, 7))),
    "a column of nodes": lambda: of_nodes(
        split=SPLIT._replace(train=np.eye(2, dtype=int))
    ),
    "2.5 parts": lambda: subgraphs.parts(ADJACENCY, 2.5),
    "parts of an oblong": lambda: subgraphs.parts(ADJACENCY[:9], 2),
    "self edges already": lambda: subgraphs.normalise(ADJACENCY),
    "labels of floats": lambda: label_splits.non_iid(LABELS * 1.0, **DEAL),
    "owners of floats": lambda: label_splits.non_iid(
        LABELS, owners=np.zeros(20), **DEAL
    ),
    "owners of more": lambda: label_splits.non_iid(
        LABELS, owners=np.zeros(99, int), **DEAL
    ),
    "2.5 clients": lambda: label_splits.non_iid(LABELS, **DEAL | {"num_clients": 2.5}),
    "fewer models": lambda: pseudo(EVEN[:1]),
    "NaN probabilities": lambda: pseudo(EVEN * np.nan),
    "a mask of integers": lambda: pseudo(EVEN, np.full((1, 20), -1)),
    "fewer labels than none": lambda: pseudo(EVEN, number=-1),
    "more clients than tasks": lambda: fields(num_clients=5),
    "more rows": lambda: fields(features=np.ones((99, 3)), num_propagations=0),
    "rows of NaN": lambda: fields(features=np.full((20, 3), np.nan)),
    "a negative node": lambda: fields(elsewhere(-100)),
    "two hops": lambda: fields(num_hops=2),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(make):
    with pytest.raises(InputError) as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("make", [of_nodes, of_traffic, of_images, fields])
def test_what_fits_makes_splits(make):
    assert list(make()) == ["train", "validation", "test"]
