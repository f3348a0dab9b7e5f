"""A tiny graph of labelled nodes, for all tests that need one."""

import numpy as np
import scipy.sparse

from fedjax_graph.data.graphs import receptive_fields as nodes
from fedjax_graph.data.graphs.label_splits import Draw, Halves, NodeSets

NUM_NODES, NUM_FEATURES, NUM_CLASSES, NUM_CLIENTS = 16, 20, 3, 5


def dense_graph(num_features=NUM_FEATURES):
    """S [N, N] of a random graph whose last node is isolated, and X [N, F]."""
    rng = np.random.default_rng(2)
    adjacency = np.triu(rng.random((NUM_NODES, NUM_NODES)) < 0.2, 1).astype(float)
    adjacency[:, -1] = 0
    adjacency += adjacency.T + np.eye(NUM_NODES)
    scale = adjacency.sum(axis=1) ** -0.5
    features = rng.normal(size=(NUM_NODES, num_features))
    return scale[:, None] * adjacency * scale, features


def node_sets(rows) -> NodeSets:
    """Sets of nodes, a list for each task, labelled by what is left modulo 3."""
    size = max(len(row) for row in rows)
    numbers = np.array([[*row, *[0] * (size - len(row))] for row in rows], np.int32)
    mask = np.array([[1] * len(row) + [0] * (size - len(row)) for row in rows])
    labels = (numbers % NUM_CLASSES * mask).astype(np.int32)
    return NodeSets(numbers, labels, mask.astype(np.float32))


def make_draw() -> Draw:
    """Few nodes for each of five clients.

    Client 2 has none to learn from, and client 3 none to be judged by.
    """
    return {
        "train": Halves(
            node_sets([[0, 1, 2], [3, 4], [], [6, 0, 8], [5, 15]]),
            node_sets([[7, 8], [9, 1], [11], [], [2, 13]]),
        ),
        "validation": Halves(node_sets([[]]), node_sets([[10, 4, 12, 7]])),
        "test": Halves(node_sets([[]]), node_sets([[14, 15, 1, 6, 12]])),
    }


def make_splits(num_hops=1, num_features=NUM_FEATURES) -> dict[str, nodes.NodeData]:
    """Of the tiny graph, for GCN; without hops for SGC."""
    propagation, features = dense_graph(num_features)
    return nodes.make_splits(
        scipy.sparse.csr_array(propagation),
        features,
        make_draw(),
        NUM_CLIENTS,
        num_propagations=2 - num_hops,
        num_hops=num_hops,
    )
