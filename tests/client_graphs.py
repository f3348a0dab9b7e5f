"""A tiny graph in five parts, for all tests that need subgraphs of clients."""

import jax
import numpy as np

from fedjax_graph.data.graphs import client_subgraphs as client_graphs
from fedjax_graph.data.graphs.client_subgraphs import NodeSplit, SubgraphData
from fedjax_graph.data.graphs.node_dataset import NodeDataset
from fedjax_graph.data.graphs.subgraphs import Parts

NUM_FEATURES, NUM_CLASSES, NUM_CLIENTS = 6, 3, 5
SIZES = (8, 3, 5, 4, 6)  # nodes of each client
NUM_TRAINED = (2, 1, 2, 1, 1)
NUM_VALIDATED = (2, 1, 0, 2, 3)
NUM_TESTED = (1, 0, 2, 1, 2)
NUM_NODES, MOST_NODES = sum(SIZES), max(SIZES)


def make_dataset() -> NodeDataset:
    """A random graph whose node 0 has no edge."""
    rng = np.random.default_rng(4)
    is_edge = np.triu(rng.random((NUM_NODES, NUM_NODES)) < 0.4, 1)
    is_edge[0] = False
    return NodeDataset(
        name="tiny",
        features=rng.normal(size=(NUM_NODES, NUM_FEATURES)).astype(np.float32),
        edges=np.argwhere(is_edge).astype(np.int32),
        labels=rng.integers(0, NUM_CLASSES, NUM_NODES).astype(np.int32),
        class_names=tuple("abc"),
        splits={},
    )


def make_splits(**settings) -> dict[str, SubgraphData]:
    """Of the tiny graph; a client's nodes are in no order."""
    order = np.random.default_rng(5).permutation(NUM_NODES).astype(np.int32)
    held = np.split(order, np.cumsum(SIZES)[:-1])
    owners = np.empty(NUM_NODES, np.int32)
    owners[order] = np.repeat(np.arange(NUM_CLIENTS), SIZES)
    sets = [
        np.split(own, np.cumsum(counts))[:3]
        for own, *counts in zip(
            held, NUM_TRAINED, NUM_VALIDATED, NUM_TESTED, strict=True
        )
    ]
    split = NodeSplit(
        *(np.sort(np.concatenate(own)) for own in zip(*sets, strict=True))
    )
    parts = Parts(owners, tuple(map(np.sort, held)))
    return client_graphs.make_splits(make_dataset(), parts, split, **settings)


def alone(data: SubgraphData, index: int) -> SubgraphData:
    """ONE client's subgraph without padding, in NumPy."""
    own = jax.tree.map(lambda x: np.asarray(x)[index], data)
    num_nodes, is_edge = int(own.is_real.sum()), own.edge_weights > 0
    edges = {name: getattr(own, name)[is_edge] for name in EDGE_FIELDS}
    nodes = {name: getattr(own, name)[:num_nodes] for name in NODE_FIELDS}
    return own._replace(**edges, **nodes)


EDGE_FIELDS = ("senders", "receivers", "edge_weights")
NODE_FIELDS = ("features", "labels", "is_real", "is_trained", "is_scored")


def padded(data: SubgraphData, num_nodes: int = 4, num_edges: int = 9) -> SubgraphData:
    """The same with more padding: nodes with random features and edges between them."""
    rng = np.random.default_rng(6)
    num_clients, num_old, num_features = data.features.shape
    garbage = 30 * rng.normal(size=(num_clients, num_nodes, num_features))
    ends = num_old + np.sort(rng.integers(0, num_nodes, (num_clients, num_edges)))

    def extend(name, more):
        old = np.asarray(getattr(data, name))
        return np.concatenate([old, more.astype(old.dtype)], axis=1)

    none = np.zeros((num_clients, num_nodes))
    longer = data._replace(
        features=extend("features", garbage),
        senders=extend("senders", ends[:, ::-1]),
        receivers=extend("receivers", ends),
        edge_weights=extend("edge_weights", np.ones(ends.shape)),
        **{name: extend(name, none) for name in NODE_FIELDS[1:]},
    )
    return jax.device_put(longer)
