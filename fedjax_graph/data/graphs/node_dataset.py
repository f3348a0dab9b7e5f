"""Graphs whose nodes have features and one label each, and what is done with them.

`largest_component`, `subset`, `without_small_classes` and `binarised` change a dataset;
`adjacency` and `statistics` tell what is in it. `citation` loads the published ones.
"""

from typing import NamedTuple

import numpy as np
import scipy.sparse
from scipy.sparse import csgraph

from fedjax_graph.core import arrays
from fedjax_graph.core.errors import InputError

SPARSE = 0.05  # share of features other than 0, below


class NodeDataset(NamedTuple):
    """Holds a graph whose nodes have features and one label each, on the host."""

    name: str
    features: scipy.sparse.csr_array | np.ndarray  # [N, F] float32; sparse: word bags
    edges: np.ndarray  # [E, 2] int32, sorted, each undirected edge once, first < second
    labels: np.ndarray  # [N] int32, index into `class_names`; -1 where a node has none
    class_names: tuple[str, ...]
    splits: dict[str, np.ndarray]  # published "train", "validation", "test" nodes
    notes: tuple[str, ...] = ()  # what was done to the data, or must be known


def noted(dataset: NodeDataset, *notes: str) -> NodeDataset:
    """Adds notes to a dataset."""
    return dataset._replace(notes=(*dataset.notes, *notes))


def distinct(keys: np.ndarray) -> np.ndarray:
    """Sorts integers [R] in place and returns each once."""
    keys.sort()
    is_first = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    return keys[is_first]


def check(dataset: NodeDataset) -> None:
    """Checks that features, labels and edges of a dataset fit together.

    Raises:
      InputError: if features are not of N nodes or not finite, a label is no class, or
        see `check_edges`.
    """
    arrays.check_are_arrays(features=dataset.features, labels=dataset.labels)
    num_nodes, num_classes = len(dataset.labels), len(dataset.class_names)
    features = dataset.features
    arrays.check_shape(f"features of {dataset.name}", features, (num_nodes, None))
    check_finite(features, f"features of {dataset.name}")
    what = f"labels of {dataset.name}"
    arrays.check_shape(what, dataset.labels, (num_nodes,))
    labels = np.where(dataset.labels == -1, 0, dataset.labels)
    arrays.check_indices(what, labels, num_classes, "the classes")
    check_edges(dataset)


def check_finite(features: scipy.sparse.csr_array | np.ndarray, what: str) -> None:
    """Checks that all features are finite.

    Raises:
      InputError: if one is not.
    """
    is_dense = isinstance(features, np.ndarray)
    if not np.isfinite(features if is_dense else features.data).all():
        raise InputError(f"{what} are not finite")


def check_edges(dataset: NodeDataset) -> None:
    """Checks that edges join two nodes each, in order, and no two nodes twice.

    Raises:
      InputError: naming what does not hold.
    """
    arrays.check_are_arrays(edges=dataset.edges, labels=dataset.labels)
    edges, what = dataset.edges, f"edges of {dataset.name}"
    arrays.check_shape(what, edges, (None, 2))
    arrays.check_indices(what, edges, len(dataset.labels), "the nodes")
    first, second = edges.T
    is_later = (first[1:] > first[:-1]) | (
        (first[1:] == first[:-1]) & (second[1:] > second[:-1])
    )
    if not ((first < second).all() and is_later.all()):
        raise InputError(
            f"{what}: expected them sorted, each once, its first node below its second"
        )


def adjacency(dataset: NodeDataset) -> scipy.sparse.csr_array:
    """Makes the adjacency matrix [N, N] float32: symmetric, 0 or 1, empty diagonal.

    Raises:
      InputError: see `check_edges`.
    """
    check_edges(dataset)
    num_nodes = len(dataset.labels)
    rows, columns = np.concatenate([dataset.edges, dataset.edges[:, ::-1]]).T
    ones = np.ones(len(rows), np.float32)
    matrix = scipy.sparse.csr_array((ones, (rows, columns)), (num_nodes, num_nodes))
    matrix.sort_indices()
    return matrix


def subset(dataset: NodeDataset, nodes: np.ndarray) -> NodeDataset:
    """Takes the subgraph of some nodes and the edges between them.

    Args:
      dataset: N nodes.
      nodes: [M] of them; the i-th becomes node i.

    Raises:
      InputError: if a node is not there, or stands twice.
    """
    nodes = np.asarray(nodes)
    arrays.check_shape(f"subset of {dataset.name}", nodes, (None,))
    arrays.check_indices(f"subset of {dataset.name}", nodes, len(dataset.labels))
    nodes = np.asarray(nodes, np.int64)
    index = np.full(len(dataset.labels), -1, np.int32)
    index[nodes] = np.arange(len(nodes))
    if not np.array_equal(index[nodes], np.arange(len(nodes))):
        raise InputError(f"subset of {dataset.name} has a node twice")
    edges = np.sort(index[dataset.edges], axis=1)
    edges = edges[edges[:, 0] >= 0]
    splits = {name: index[split] for name, split in dataset.splits.items()}
    return dataset._replace(
        features=dataset.features[nodes],
        edges=edges[np.lexsort(edges.T[::-1])],
        labels=dataset.labels[nodes],
        splits={name: np.sort(split[split >= 0]) for name, split in splits.items()},
    )


def _components(dataset: NodeDataset) -> tuple[np.ndarray, np.ndarray]:
    """Finds the component of each node [N], and the number of nodes of each component.

    Nodes that are absent from the source, without a label or a feature, do not count
    and link nothing.
    """
    is_present = dataset.labels >= 0
    unlabelled = np.flatnonzero(~is_present)
    is_present[unlabelled] = abs(dataset.features[unlabelled]).sum(axis=1) > 0
    edges = dataset.edges[is_present[dataset.edges].all(axis=1)]
    graph = adjacency(dataset._replace(edges=edges))
    component = csgraph.connected_components(graph, directed=False)[1]
    sizes = np.bincount(component, weights=is_present).astype(np.int64)
    return np.where(is_present, component, -1), sizes


def largest_component(dataset: NodeDataset) -> NodeDataset:
    """Takes the largest connected component, the first of equals; nodes stay in order.

    Nodes without a label or a feature are left out first: so the 2110 nodes and 3668
    edges that are published of CiteSeer come about.
    """
    component, sizes = _components(dataset)
    kept = np.flatnonzero(component == sizes.argmax())
    if len(kept) == len(component):
        return dataset
    return noted(
        subset(dataset, kept),
        f"largest of {np.count_nonzero(sizes)} components: {len(kept)} of "
        f"{len(component)} nodes",
    )


def without_small_classes(dataset: NodeDataset, least: int) -> NodeDataset:
    """Takes away the labels of classes that have fewer than `least` nodes."""
    sizes = np.bincount(
        dataset.labels[dataset.labels >= 0], minlength=len(dataset.class_names)
    )
    kept = np.flatnonzero(sizes >= least)
    if len(kept) == len(sizes):
        return dataset
    numbers = np.full(len(sizes) + 1, -1, np.int32)  # the last is for unlabelled nodes
    numbers[kept] = np.arange(len(kept))
    few = [
        name
        for name, size in zip(dataset.class_names, sizes, strict=True)
        if size < least
    ]
    return noted(
        dataset._replace(
            labels=numbers[dataset.labels],
            class_names=tuple(dataset.class_names[i] for i in kept),
        ),
        f"classes of fewer than {least} nodes count as unlabelled: {', '.join(few)}",
    )


def binarised(dataset: NodeDataset) -> NodeDataset:
    """Sets features to 1 where they were positive, else to 0."""
    features = (dataset.features > 0).astype(np.float32)
    note = "features binarised: 1 where positive"
    return noted(dataset._replace(features=features), note)


def statistics(dataset: NodeDataset) -> dict:
    """Counts nodes, edges, features, classes and components.

    Components are those of which `largest_component` takes one.
    """
    component, sizes = _components(dataset)
    is_largest = component == sizes.argmax()
    labels = dataset.labels[dataset.labels >= 0]
    class_sizes = np.bincount(labels, minlength=len(dataset.class_names))
    degrees = np.bincount(dataset.edges.ravel(), minlength=len(dataset.labels))
    return {
        "name": dataset.name,
        "num_nodes": len(dataset.labels),
        "num_edges": len(dataset.edges),
        "num_features": dataset.features.shape[1],
        "num_nonzero_features": _num_nonzero(dataset.features),
        "num_classes": len(dataset.class_names),
        "class_names": list(dataset.class_names),
        "class_sizes": class_sizes.tolist(),
        "unlabelled_nodes": len(dataset.labels) - len(labels),
        "isolated_nodes": int((degrees == 0).sum()),
        "largest_degree": int(degrees.max()),
        "num_components": int(np.count_nonzero(sizes)),
        "largest_component_nodes": int(is_largest.sum()),
        "largest_component_edges": int(is_largest[dataset.edges].all(axis=1).sum()),
        **{f"{name}_nodes": len(split) for name, split in dataset.splits.items()},
        "notes": list(dataset.notes),
    }


def has_sparse_features(dataset: NodeDataset) -> bool:
    """Tells whether so few features are not 0 that products take these alone."""
    features = dataset.features
    size = len(dataset.labels) * features.shape[1]
    return _num_nonzero(features) < SPARSE * size


def _num_nonzero(features) -> int:
    if scipy.sparse.issparse(features):
        return int(features.count_nonzero())
    return int(np.count_nonzero(features))
