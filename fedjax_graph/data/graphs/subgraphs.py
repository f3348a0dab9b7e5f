"""Which part of a graph each client sees: node sets that may overlap on a ring.

Every node is owned by one client. A client also holds a share of the nodes that the
next client on the ring owns, and sees the edges between the nodes that it holds; all
other edges are lost. `disjoint_union` puts all clients' subgraphs side by side, so that
what works on one graph works on all of them.
"""

import math
from typing import NamedTuple

import numpy as np
import scipy.sparse

from fedjax_graph.core import arrays
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import partitions
from fedjax_graph.data.graphs.partitions import PARTITIONS, PartitionConfig

NORMALISATIONS = ("symmetric", "row")
PARTITION_STREAM = (1,)  # apart from the draws of labels and classes by the same seed


class Parts(NamedTuple):
    """Says who owns a node, and who holds it."""

    owners: np.ndarray  # [N] int32, the one client that owns each node
    nodes: tuple[np.ndarray, ...]  # K arrays, ascending: all that a client holds


class Union(NamedTuple):
    """Holds all clients' subgraphs as one graph of M copies of nodes, by client."""

    adjacency: scipy.sparse.csr_array  # [M, M], without edges between clients
    copies: np.ndarray  # [M] int32, the node that each row is a copy of
    holders: np.ndarray  # [M] int32, ascending, the client that holds it


def parts(
    adjacency: scipy.sparse.csr_array,
    num_clients: int,
    overlap: float = 0.0,
    partition: str = "random",
    seed: int = 0,
    labels: np.ndarray | None = None,
    config: PartitionConfig | None = None,
) -> Parts:
    """Cuts a graph into parts, of which neighbours on a ring share some nodes.

    Client i holds what it owns and the first ceil(overlap x size) nodes, in a drawn
    order, of what client i + 1 owns; with one seed, a larger overlap only adds nodes.

    Args:
      adjacency: [N, N], symmetric.
      num_clients: K; 1 holds the whole graph.
      overlap: share of the next client's own nodes, from 0 to 1.
      partition: who owns what, a name in `partitions.PARTITIONS`. `random`: numbers of
        nodes differ by at most 1; `metis`: few edges between clients, about as many
        nodes each; `louvain`: communities; `metis_plus`, `louvain_plus`: many parts or
        communities, of which a client has those of similar labels; `label_dirichlet`:
        skewed labels.
      seed: of the draw; who owns what by `metis` does not depend on it.
      labels: [N], of `label_dirichlet` and those with `_plus`.
      config: settings of partitions; None: the defaults.

    Raises:
      InputError: if an argument is out of range, the adjacency is not symmetric or has
        self edges, METIS is not installed, or a partition leaves a client without
        nodes.
    """
    num_nodes = adjacency.shape[0]
    arrays.check_shape("adjacency", adjacency, (num_nodes, num_nodes))
    if adjacency.diagonal().any() or (adjacency != adjacency.T).sum():
        raise InputError("adjacency: expected a symmetric one without self edges")
    is_whole = isinstance(num_clients, int | np.integer)
    if not (is_whole and 1 <= num_clients <= num_nodes):
        raise InputError(
            f"num_clients = {num_clients}: expected 1 to {num_nodes}, a node for each"
        )
    if not 0 <= overlap <= 1:
        raise InputError(f"overlap = {overlap}: expected 0 to 1")
    if partition not in PARTITIONS:
        raise InputError(
            f"unknown partition {partition!r}; known: {', '.join(PARTITIONS)}"
        )
    if seed < 0:
        raise InputError(f"seed = {seed}: expected 0 or more")
    stream = np.random.SeedSequence(seed, spawn_key=PARTITION_STREAM)
    random = np.random.default_rng(stream)
    order = random.permutation(num_nodes)
    problem = partitions.Problem(adjacency, labels, num_clients, order, random)
    owned = PARTITIONS[partition](problem, config or PartitionConfig())
    owners = np.empty(num_nodes, np.int32)
    for client, own in enumerate(owned):
        if not len(own):
            raise InputError(
                f"num_clients = {num_clients}: the partition {partition!r} leaves "
                f"client {client} without nodes; use fewer clients, or 'random'"
            )
        owners[own] = client
    held = [
        np.concatenate([own, following[: _ceil(overlap * len(following))]])
        for own, following in zip(owned, owned[1:] + owned[:1], strict=True)
    ]
    return Parts(owners, tuple(map(np.unique, held)))


def _ceil(number: float) -> int:
    return math.ceil(number - 1e-9)  # 0.07 x 100 is 7


def check_parts(parts: Parts, num_nodes: int) -> None:
    """Checks parts of a graph.

    Raises:
      InputError: if they are those of another number of nodes, or a client holds no
        node, one twice or one that is not there, or not what it owns.
    """
    num_clients = len(parts.nodes)
    arrays.check_count("number of clients", num_clients)
    arrays.check_shape("owners", parts.owners, (num_nodes,))
    arrays.check_indices("owners", parts.owners, num_clients, "the clients")
    for client, held in enumerate(parts.nodes):
        what = f"nodes of client {client}"
        arrays.check_indices(what, held, num_nodes)
        arrays.check_count(f"number of {what}", len(held))
        own = np.flatnonzero(parts.owners == client)
        if len(np.unique(held)) < len(held) or not np.isin(own, held).all():
            raise InputError(f"{what}: expected each once, all that it owns among them")


def induced(
    adjacency: scipy.sparse.csr_array, nodes: np.ndarray
) -> scipy.sparse.csr_array:
    """Takes the subgraph between some nodes, in their order."""
    return adjacency[nodes][:, nodes]


def disjoint_union(adjacency: scipy.sparse.csr_array, parts: Parts) -> Union:
    """Puts all clients' subgraphs of a graph [N, N] side by side.

    Raises:
      InputError: if the parts are those of another graph; see `check_parts`.
    """
    check_parts(parts, adjacency.shape[0])
    subgraphs = [induced(adjacency, nodes) for nodes in parts.nodes]
    sizes = [len(nodes) for nodes in parts.nodes]
    return Union(
        adjacency=scipy.sparse.block_diag(subgraphs, format="csr"),
        copies=np.concatenate(parts.nodes).astype(np.int32),
        holders=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
    )


def statistics(adjacency: scipy.sparse.csr_array, parts: Parts) -> dict:
    """Measures the sizes of parts, and the shares of what is kept and what is shared.

    `edges_kept` is the share of edges that some client sees; `overlap` the copies of
    nodes beyond the first one over nodes: the mean share of the next client's own
    nodes that a client holds, by their number.
    """
    is_kept = np.zeros(adjacency.nnz, bool)
    entries = np.arange(adjacency.nnz)
    numbered = scipy.sparse.csr_array(
        (entries, adjacency.indices, adjacency.indptr), shape=adjacency.shape
    )
    for nodes in parts.nodes:
        is_kept[np.asarray(induced(numbered, nodes).data, np.int64)] = True
    sizes = [len(nodes) for nodes in parts.nodes]
    return {
        "num_clients": len(sizes),
        "edges_kept": float(is_kept.mean()) if len(is_kept) else 1.0,
        "smallest_part": min(sizes),
        "largest_part": max(sizes),
        "overlap": sum(sizes) / len(parts.owners) - 1,
    }


def normalise(
    adjacency: scipy.sparse.csr_array, kind: str = "symmetric"
) -> scipy.sparse.csr_array:
    """Computes S, the normalised adjacency with self edges.

    Args:
      adjacency: A [N, N], symmetric, without self edges.
      kind: `symmetric`, D^-1/2 (A + I) D^-1/2, or `row`, D^-1 (A + I); D holds the row
        sums of A + I.

    Returns:
      [N, N] float32.

    Raises:
      InputError: if the kind is not known, a weight is negative or not finite, or there
        is a self edge.
    """
    arrays.check_weights("adjacency", adjacency.data)
    if adjacency.diagonal().any():
        raise InputError("adjacency has self edges, expected none: they are added here")
    if kind not in NORMALISATIONS:
        raise InputError(
            f"unknown normalisation {kind!r}; known: {', '.join(NORMALISATIONS)}"
        )
    self_edges = scipy.sparse.eye_array(
        adjacency.shape[0], dtype=np.float32, format="csr"
    )
    propagation = adjacency + self_edges
    degrees = 1 + adjacency.sum(axis=1)
    factors = degrees ** (-0.5 if kind == "symmetric" else -1.0)
    propagation.data *= np.repeat(factors, np.diff(propagation.indptr))
    if kind == "symmetric":
        num_pieces = 1 + propagation.nnz // 2**22  # indexing widens the indices
        for data, columns in zip(
            np.array_split(propagation.data, num_pieces),
            np.array_split(propagation.indices, num_pieces),
            strict=True,
        ):
            data *= factors[columns]
    return propagation
