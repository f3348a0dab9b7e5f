"""Subgraph clients: a graph in parts, each with its own nodes and the edges between.

Wang et al., "FL-AGCNS: Federated Learning Framework for Automatic Graph Convolutional
Network Search", arXiv 2104.04141, Section 4: METIS cuts a graph into clients, and the
edges between clients are lost. Labels are split as by Yang, Cohen, Salakhutdinov,
"Revisiting Semi-Supervised Learning with Graph Embeddings", ICML 2016: 20 nodes of each
class to train on, 500 to validate and 1000 to test; or by `client_split` as in OpenFGL
(Li et al., VLDB 2025): 20, 40 and 40 percent of each class of each client.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import scipy.sparse

from fedjax_graph.core import arrays, batching, client_rows, graphs, sparse_rows
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.masked_rows import MaskedRows
from fedjax_graph.core.sparse_rows import SparseRows
from fedjax_graph.core.spread_rows import SpreadRows
from fedjax_graph.data.graphs import label_splits, subgraphs
from fedjax_graph.data.graphs import node_dataset as node_graphs
from fedjax_graph.data.graphs.formats import check_nodes
from fedjax_graph.data.graphs.node_dataset import NodeDataset


class SubgraphData(NamedTuple):
    """Holds one split: K clients' subgraphs, padded to N nodes and E edges.

    A client's own nodes come first, ascending as in the dataset, and then the copies
    of other clients' nodes. A copy has no label: it is neither trained nor scored.
    """

    # of which a device of several holds its clients' alone
    CLIENT_ROWS = ("features", "senders", "receivers", "edge_weights")

    # [K, N, F] float32
    features: jax.Array | SparseRows | SpreadRows | MaskedRows
    senders: jax.Array  # [K, E] int32
    receivers: jax.Array  # [K, E] int32, ascending
    edge_weights: jax.Array  # [K, E] float32, 1, or 0 for padding
    labels: jax.Array  # [K, N] int32, 0 for nodes without
    is_real: jax.Array  # [K, N] float32, 0 for padding
    is_trained: jax.Array  # [K, N] float32, whose labels are trained on
    is_scored: jax.Array  # [K, N] float32, by whose labels a split is scored
    client_ids: jax.Array  # [K] int32
    client_weights: jax.Array  # [K] float32, number of trained nodes; 0 = padding
    graph: graphs.Graph | None = None  # of the K clients; weights: edges between them
    node_ids: jax.Array | None = None  # [K, N] int32, the node of the dataset
    is_own: jax.Array | None = None  # [K, N] float32, 0 for copies and padding

    def by_client(self) -> "SubgraphData":
        """Leaves out the graph of the clients: all that is left has K rows."""
        return self._replace(graph=None)


def dense_features(data: SubgraphData) -> jax.Array:
    """Returns the features of clients' nodes, refusing all but arrays.

    Raises:
      InputError: if they are sparse, masked, or spread over neighbours.
    """
    if isinstance(data.features, SparseRows):
        raise InputError(
            "features are sparse, expected dense ones; leave out is_sparse of "
            "make_splits"
        )
    if isinstance(data.features, MaskedRows):
        raise InputError("features are masked, expected arrays")
    if isinstance(data.features, SpreadRows):
        raise InputError("features are spread already; leave out with_spread_features")
    return data.features


def adjacencies(data: SubgraphData) -> list[scipy.sparse.csr_array]:
    """Makes the adjacency matrices of K padded subgraphs, each [N, N]."""
    edges = map(np.asarray, (data.edge_weights, data.receivers, data.senders))
    size = data.is_real.shape[1]
    return [
        scipy.sparse.csr_array((weights, ends), shape=(size, size))
        for weights, *ends in zip(*edges, strict=True)
    ]


def with_spread_features(splits: dict[str, SubgraphData]) -> dict[str, SubgraphData]:
    """Puts S X in place of the features X, for GCNs that read nothing else of them.

    Args:
      splits: with the same graphs and features, edges stored both ways.

    Returns:
      The splits with `SpreadRows` as features.

    Raises:
      InputError: if the features are not dense.
    """
    data = next(iter(splits.values()))
    own = dense_features(data)
    rows = np.empty(own.shape, own.dtype)
    for k, adjacency in enumerate(adjacencies(data)):
        adjacency.eliminate_zeros()  # padding, which would count as a self edge
        rows[k] = subgraphs.normalise(adjacency) @ np.asarray(own[k])
    features = client_rows.to_device(data._replace(features=SpreadRows(rows))).features
    return {name: split._replace(features=features) for name, split in splits.items()}


class NodeSplit(NamedTuple):
    """Names the labelled nodes of each split: int32, ascending, each in one only."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


# --- Labels ---------------------------------------------------------------------------


def planetoid_split(
    labels: np.ndarray,
    *,
    num_classes: int,
    per_class: int = 20,
    num_validation: int = 500,
    num_test: int = 1000,
    seed: int = 0,
) -> NodeSplit:
    """Draws as many training nodes of each class, and others to validate and test.

    Args:
      labels: [N], -1 for nodes that are in no set.
      num_classes: labels are below it.
      per_class: training nodes of each class.
      num_validation: nodes that are not trained on, of any class.
      num_test: of those that are left; they do not depend on `num_validation`.
      seed: of the draw.

    Raises:
      InputError: if there are too few nodes, or a label does not exist.
    """
    draw = label_splits.non_iid(
        labels,
        num_classes=num_classes,
        num_clients=1,
        labels_per_class=per_class,
        num_validation=num_validation,
        num_test=num_test,
        seed=seed,
    )
    nodes = {
        name: np.concatenate([half.nodes.ravel() for half in draw[name]])
        for name in NodeSplit._fields
    }
    split = NodeSplit(**{name: np.sort(own) for name, own in nodes.items()})
    if len(split.validation) < num_validation:
        raise InputError(
            f"num_validation = {num_validation}: {len(split.train)} training and "
            f"{num_test} test nodes leave {len(split.validation)} labelled nodes; ask "
            "for fewer"
        )
    return split


def has_published_split(dataset: NodeDataset) -> bool:
    """Tells whether a dataset says which nodes train, validate and test."""
    return all(name in dataset.splits for name in NodeSplit._fields)


def make_split(
    dataset: NodeDataset, *, published: bool = True, seed: int = 0, **sizes: int
) -> NodeSplit:
    """Takes the published split of a dataset, or draws one.

    Args:
      dataset: its split is the published one if it has all three sets.
      published: whether that one is taken; False, or a dataset without: it is drawn.
      seed: of the draw.
      **sizes: `per_class`, `num_validation` and `num_test` of the draw.

    Raises:
      InputError: if there are too few nodes to draw from.
    """
    if published and has_published_split(dataset):
        return NodeSplit(*(dataset.splits[name] for name in NodeSplit._fields))
    num_classes = len(dataset.class_names)
    return planetoid_split(dataset.labels, num_classes=num_classes, seed=seed, **sizes)


FRACTIONS = (0.2, 0.4, 0.4)  # OpenFGL's, of each class of each client


def client_split(
    labels: np.ndarray,
    owners: np.ndarray,
    fractions: tuple[float, float, float] = FRACTIONS,
    seed: int = 0,
) -> NodeSplit:
    """Draws shares of each class of each client to train, to validate and to test.

    Args:
      labels: [N], -1 for nodes that are in no set.
      owners: [N], the client of each node.
      fractions: of training, validation and test nodes, rounded down at each end.
      seed: of the draw.

    Raises:
      InputError: if labels and owners are not of the same nodes, or the fractions are
        negative or sum to more than 1.
    """
    arrays.check_shape("owners", owners, labels.shape)
    if min(fractions) < 0 or sum(fractions) > 1 + 1e-9:
        raise InputError(f"fractions = {fractions}: expected three shares of 1")
    if not np.any(labels >= 0):
        raise InputError("labels: no node has one, so there is none to train on")
    random = np.random.default_rng(seed)
    ends = np.cumsum(fractions) + 1e-9  # in floats, 0.7 + 0.1 is below 0.8
    sets: tuple[list[np.ndarray], ...] = ([], [], [])
    for client in np.unique(owners):
        for kind in np.unique(labels[labels >= 0]):
            nodes = np.flatnonzero((owners == client) & (labels == kind))
            cuts = (ends * len(nodes)).astype(np.int64)
            pieces = np.split(random.permutation(nodes), cuts)[:3]
            for own, piece in zip(sets, pieces, strict=True):
                own.append(piece)
    return NodeSplit(*(np.sort(np.concatenate(own)).astype(np.int32) for own in sets))


# --- Clients --------------------------------------------------------------------------


def make_splits(
    dataset: NodeDataset,
    parts: subgraphs.Parts,
    split: NodeSplit,
    *,
    outside_neighbours: bool = False,
    normalise_features: bool = False,
    is_linked: bool = False,
    is_sparse: bool = False,
) -> dict[str, SubgraphData]:
    """Makes `train`, `validation` and `test`, which differ in `is_scored` alone.

    In `train` and `validation` the validation nodes are scored, in `train` because
    they judge architectures during the search; in `test` the test nodes.

    An undirected edge is stored both ways. Padding stands last: nodes without
    features, and edges of weight 0 from node 0 to node N - 1. Of several devices each
    will hold its clients' features and edges alone; until then these stay on the host.

    Args:
      dataset: the whole graph.
      parts: which of its nodes each client holds. One that several hold has its label
        with the owner only.
      split: its labels.
      outside_neighbours: whether a client also keeps copies of the nodes that an edge
        joins to its own, with their features. Edges run both ways between own nodes
        and copies, and none between copies: a client knows of no others' edges. The
        data then say which node of the dataset each row is (`node_ids`, `is_own`).
      normalise_features: whether the features of a node are divided by their sum;
        those of sum 0 are left.
      is_linked: whether the data say which clients have edges between them (`graph`).
      is_sparse: whether features are `SparseRows`, for models that multiply them by
        their first kernel and read them nowhere else.

    Raises:
      InputError: if parts or split do not fit the dataset.
    """
    _check_fit(dataset, parts, split)
    adjacency = node_graphs.adjacency(dataset)
    subs = [_subgraph(adjacency, own, outside_neighbours) for own in parts.nodes]
    held, senders, receivers = zip(*subs, strict=True)
    nodes, is_real = _padded(held)
    senders, is_edge = _padded(senders)
    receivers, _ = _padded(receivers, fill=nodes.shape[1] - 1)
    clients = np.arange(len(nodes), dtype=np.int32)
    is_own = is_real & (parts.owners[nodes] == clients[:, None])

    def marks(chosen: np.ndarray) -> np.ndarray:
        is_chosen = np.zeros(len(dataset.labels), bool)
        is_chosen[chosen] = True
        return (is_own & is_chosen[nodes]).astype(np.float32)

    labels = dataset.labels[nodes]
    is_trained = marks(split.train)
    train = SubgraphData(
        features=_features(dataset.features, held, normalise_features, is_sparse),
        senders=senders,
        receivers=receivers,
        edge_weights=is_edge.astype(np.float32),
        labels=np.where(is_own & (labels >= 0), labels, 0).astype(np.int32),
        is_real=is_real.astype(np.float32),
        is_trained=is_trained,
        is_scored=marks(split.validation),
        client_ids=clients,
        client_weights=is_trained.sum(axis=1),
    )
    if is_linked:
        graph = graphs.from_adjacency(_edges_between(adjacency, parts.owners))
        train = train._replace(graph=graph)
    if outside_neighbours:
        train = train._replace(node_ids=nodes, is_own=is_own.astype(np.float32))
    train = client_rows.to_device(train)
    test = train._replace(is_scored=jax.device_put(marks(split.test)))
    return dict(zip(batching.SPLITS, (train, train, test), strict=True))


def _edges_between(adjacency: scipy.sparse.csr_array, owners: np.ndarray) -> np.ndarray:
    """Counts the neighbours that nodes of each client have at each: [K, K].

    That is P^T A P of the parts' indicators P, with a client's own edges twice on the
    diagonal, once for either end: the self edge of what mixes models along it.
    """
    num_clients = int(owners.max()) + 1
    rows, columns = (owners[ends].astype(np.int64) for ends in adjacency.nonzero())
    counts = np.bincount(rows * num_clients + columns, minlength=num_clients**2)
    return counts.reshape(num_clients, num_clients).astype(np.float32)


def _check_fit(dataset: NodeDataset, parts: subgraphs.Parts, split: NodeSplit) -> None:
    node_graphs.check(dataset)
    num_nodes = len(dataset.labels)
    if len(parts.owners) != num_nodes:
        raise InputError(
            f"parts of {len(parts.owners)} nodes: expected those of the {num_nodes} of "
            f"{dataset.name}; cut this dataset"
        )
    subgraphs.check_parts(parts, num_nodes)
    for name, nodes in split._asdict().items():
        arrays.check_shape(f"the {name} split", nodes, (None,))
        check_nodes(np.asarray(nodes), num_nodes, f"the {name} split")
        if not len(nodes) or (dataset.labels[nodes] < 0).any():
            raise InputError(
                f"the {name} split has {len(nodes)} nodes, expected at least one, and "
                "each with a label; draw another split"
            )
    everyone = np.concatenate(split)
    if len(np.unique(everyone)) < len(everyone):
        raise InputError(
            "a node is in the split twice, expected each in one set at most; draw "
            "another split"
        )


def _subgraph(
    adjacency: scipy.sparse.csr_array, own: np.ndarray, outside_neighbours: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds nodes [n], own ones first, and the senders and receivers [e] among them."""
    nodes = own
    if outside_neighbours:
        nodes = np.append(own, np.setdiff1d(adjacency[own].indices, own))
    edges = subgraphs.induced(adjacency, nodes)
    edges.sort_indices()
    receivers, senders = edges.nonzero()
    is_known = (receivers < len(own)) | (senders < len(own))
    return nodes, senders[is_known], receivers[is_known]


def _padded(rows: Sequence[np.ndarray], fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Stacks rows of K lengths as [K, L] int32, with a mask of what is not padding."""
    sizes = np.array([len(row) for row in rows])
    is_real = np.arange(sizes.max()) < sizes[:, None]
    padded = np.full(is_real.shape, fill, np.int32)
    padded[is_real] = np.concatenate(rows)
    return padded, is_real


def _features(
    features: scipy.sparse.csr_array | np.ndarray,
    held: Sequence[np.ndarray],
    normalise: bool,
    is_sparse: bool,
) -> np.ndarray | SparseRows:
    """Gathers the rows of K sets of nodes, padded [K, N, F], by client."""
    size = max(map(len, held))
    if normalise and features.min() < 0:
        raise InputError(
            "normalise_features: the features have negative numbers, by whose sum rows "
            "cannot be divided"
        )
    if is_sparse:
        matrix = scipy.sparse.csr_array(features)
        if normalise:
            sums = matrix.sum(axis=1)
            shares = scipy.sparse.diags_array(1 / np.where(sums == 0, 1, sums))
            matrix = scipy.sparse.csr_array(shares @ matrix)
        return sparse_rows.stack([matrix[nodes] for nodes in held], size)
    dense = np.zeros((len(held), size, features.shape[1]), np.float32)
    for rows, nodes in zip(dense, held, strict=True):
        own = rows[: len(nodes)]
        if scipy.sparse.issparse(features):
            features[nodes].astype(np.float32, copy=False).toarray(out=own)
        else:
            own[:] = features[nodes]
        if normalise:
            sums = own.sum(axis=1, keepdims=True)
            own /= np.where(sums == 0, 1, sums)
    return dense


# --- Statistics -----------------------------------------------------------------------


def statistics(
    dataset: NodeDataset, parts: subgraphs.Parts, splits: dict[str, SubgraphData]
) -> dict:
    """Counts clients' sizes, what is lost between them, and what padding wastes.

    Args:
      dataset: the whole graph.
      parts: of it.
      splits: what `make_splits` makes of them.

    Returns:
      Numbers, and lists of a number for each client. `edges` are the undirected ones
      of the dataset, `edges_cut` those between nodes of different clients, also where
      these hold copies.
    """
    shared = splits["train"]
    cut = subgraphs.statistics(node_graphs.adjacency(dataset), parts)
    num_edges, cut_share = len(dataset.edges), 1 - cut["edges_kept"]
    num_copies = [
        int(total) - len(own)
        for total, own in zip(_by_client(shared.is_real), parts.nodes, strict=True)
    ]
    return {
        "num_clients": cut["num_clients"],
        "edges": num_edges,
        "edges_cut": round(cut_share * num_edges),
        "edges_cut_share": cut_share,
        "smallest_part": cut["smallest_part"],
        "largest_part": cut["largest_part"],
        "padded_nodes_share": _padding_share(shared.is_real),
        "padded_edges_share": _padding_share(shared.edge_weights),
        "train_nodes": _by_client(shared.is_trained),
        "validation_nodes": _by_client(splits["validation"].is_scored),
        "test_nodes": _by_client(splits["test"].is_scored),
        "outside_copies": num_copies,
    }


def _by_client(mask: jax.Array) -> list[int]:
    """Sums of [K, ...] over all axes but the first."""
    return np.count_nonzero(np.asarray(mask), axis=1).tolist()


def _padding_share(mask: jax.Array) -> float:
    """Returns the share of zeros, 0 where there is nothing."""
    return float(np.mean(np.asarray(mask) == 0)) if mask.size else 0.0
