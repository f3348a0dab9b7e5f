"""Who owns each node of a graph: cut at random, by communities, by METIS, by labels.

A partition lists the nodes of each client; see `PARTITIONS` for their names. Partitions
and the defaults of their settings are those of the subgraph scenarios of OpenFGL (Li et
al., "OpenFGL: A Comprehensive Benchmark for Federated Graph Learning", VLDB 2025); but
communities are dealt to the client with the fewest nodes by default, not in turn.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from scipy.cluster import vq

from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.errors import InputError

MOST_DRAWS = 100  # of `label_dirichlet`, and of first centres of k-means
MOST_STEPS = 300  # of k-means


def _to_the_fewest(sizes: list[int], num_clients: int, balance: int) -> list[int]:
    """Deals pieces to the client with the fewest nodes: sizes differ little."""
    del balance
    clients, held = [], np.zeros(num_clients, np.int64)
    for size in sizes:
        clients.append(int(np.argmin(held)))
        held[clients[-1]] += size
    return clients


def _in_turn(sizes: list[int], num_clients: int, balance: int) -> list[int]:
    """Deals pieces to one client until it is full, then to the next, as OpenFGL does.

    A client that has N / K nodes gets no more, and none gets a piece by which it would
    have balance more than that; a piece that is too large for all goes to the one with
    the fewest (in OpenFGL, whose search for it stops early, to an earlier one).
    """
    mean = sum(sizes) // num_clients
    clients, held = [], np.zeros(num_clients, np.int64)
    turns = list(range(num_clients))
    for size in sizes:
        while len(turns) > 1 and held[turns[0]] >= mean:
            turns.pop(0)
        fits = [
            i for i, client in enumerate(turns) if held[client] + size < mean + balance
        ]
        first = fits[0] if fits else int(np.argmin(held[turns]))
        turns = turns[first:] + turns[:first]
        clients.append(turns[0])
        held[turns[0]] += size
    return clients


DEALS = {"fewest": _to_the_fewest, "in_turn": _in_turn}


@dataclasses.dataclass(frozen=True)
class PartitionConfig(Checked):
    """Settings of the partitions that have some."""

    resolution: float = limited(1.0, above=0)  # of Louvain; more: smaller communities
    # of `louvain`: nodes by which a piece stays below the clients' mean; dealt in turn,
    # also those by which a client may exceed it
    balance: int = limited(20, lower=0)
    # of labels: alpha of the Dirichlet draw of each class; less: more skewed
    concentration: float = limited(10.0, above=0)
    least_nodes: int = limited(5, lower=1)  # of labels: each client's
    # of `louvain`: whom a community goes to, a name in `DEALS`
    deal: str = limited("fewest", choices=DEALS)
    num_communities: int = limited(100, lower=1)  # of `metis_plus`


class Problem(NamedTuple):
    """What is cut."""

    adjacency: scipy.sparse.csr_array  # [N, N], symmetric
    labels: np.ndarray | None  # [N]
    num_clients: int
    order: np.ndarray  # [N], in which random cuts and lists of nodes stand
    random: np.random.Generator


Owned = list[np.ndarray]  # K arrays of nodes


def at_random(problem: Problem, config: PartitionConfig) -> Owned:
    """Deals nodes out in the drawn order; numbers of nodes differ by at most 1."""
    del config
    return np.array_split(problem.order, problem.num_clients)


def metis(problem: Problem, config: PartitionConfig) -> Owned:
    """Cuts few edges, with about as many nodes each: Karypis and Kumar, 1998."""
    del config
    return _by_client(_metis_parts(problem, problem.num_clients), problem)


def metis_plus(problem: Problem, config: PartitionConfig) -> Owned:
    """Cuts small parts by METIS, and deals those of similar labels to one client."""
    num_nodes = problem.adjacency.shape[0]
    if config.num_communities > num_nodes:
        raise InputError(
            f"num_communities = {config.num_communities}: expected {num_nodes} or "
            "less, a node for each"
        )
    part_of = _metis_parts(problem, config.num_communities)
    communities = [np.flatnonzero(part_of == part) for part in np.unique(part_of)]
    return _of_similar_labels(communities, problem, "num_communities")


def _metis_parts(problem: Problem, num_parts: int) -> np.ndarray:
    """The part of each node [N] by METIS; some may be empty."""
    try:
        import pymetis
    except ImportError as error:
        raise InputError(
            "partition 'metis' needs the package pymetis; run `pip install pymetis`, "
            "or use 'random'"
        ) from error
    adjacency = problem.adjacency
    graph = pymetis.CSRAdjacency(adjacency.indptr, adjacency.indices)
    return np.asarray(pymetis.part_graph(num_parts, graph).vertex_part)


def louvain(problem: Problem, config: PartitionConfig) -> Owned:
    """Deals communities out: Blondel, Guillaume, Lambiotte, Lefebvre, 2008.

    A community of more than N / K - balance nodes is cut into pieces of so many, so
    there is one for each client. They are dealt largest first, by `config.deal` to the
    client with the fewest nodes, or in turn.
    """
    num_nodes, num_clients = problem.adjacency.shape[0], problem.num_clients
    most = num_nodes // num_clients - config.balance
    if most < 1:
        raise InputError(
            f"louvain: balance={config.balance} leaves no node of the "
            f"{num_nodes // num_clients} that a client has in the mean; use a smaller "
            "one, or fewer clients"
        )
    cut = [
        (start, nodes[start : start + most])
        for nodes in _louvain_communities(problem, config)
        for start in range(0, len(nodes), most)
    ]
    if config.deal == "in_turn":  # OpenFGL's order: the first piece of each, and so on
        cut.sort(key=lambda piece: piece[0])
    pieces = sorted((nodes for _, nodes in cut), key=len, reverse=True)
    clients = DEALS[config.deal](list(map(len, pieces)), num_clients, config.balance)
    return _dealt(pieces, clients, problem)


def louvain_plus(problem: Problem, config: PartitionConfig) -> Owned:
    """Deals communities by Louvain out, those of similar labels to one client."""
    communities = _louvain_communities(problem, config)
    return _of_similar_labels(communities, problem, "resolution")


def _louvain_communities(problem: Problem, config: PartitionConfig) -> Owned:
    """Communities, each with its nodes ascending, by their first nodes."""
    import networkx

    graph = networkx.from_scipy_sparse_array(problem.adjacency)
    seed = int(problem.random.integers(2**31))
    communities = networkx.community.louvain_communities(
        graph, resolution=config.resolution, seed=seed
    )
    return [np.array(nodes) for nodes in sorted(map(sorted, communities))]


def _of_similar_labels(communities: Owned, problem: Problem, setting: str) -> Owned:
    """Deals communities out by k-means, K of their shares of labels; sizes may differ.

    Args:
      communities: nodes of each.
      problem: what is cut.
      setting: what there is more of with more communities, for the message.
    """
    if problem.labels is None:
        raise InputError("communities of similar labels need the labels of the nodes")
    labels = np.unique(problem.labels, return_inverse=True)[1]
    shares = np.stack(
        [
            np.bincount(labels[nodes], minlength=labels.max() + 1)
            for nodes in communities
        ]
    ) / [[len(nodes)] for nodes in communities]
    if len(np.unique(shares, axis=0)) >= problem.num_clients:
        for _ in range(MOST_DRAWS):
            with contextlib.suppress(vq.ClusterError):  # a cluster lost all it had
                _, clients = vq.kmeans2(
                    shares,
                    problem.num_clients,
                    iter=MOST_STEPS,
                    minit="++",
                    missing="raise",
                    rng=problem.random,
                )
                return _dealt(communities, clients, problem)
    raise InputError(
        f"num_clients = {problem.num_clients}: {len(communities)} communities do not "
        f"fall into so many groups by their labels; raise {setting}, or use fewer "
        "clients"
    )


def label_dirichlet(problem: Problem, config: PartitionConfig) -> Owned:
    """Deals each class out in proportions from a Dirichlet distribution.

    Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification", 2019. A client that has N / K nodes gets none of
    the classes that follow; where those that have fewer draw no share of a class, they
    get equal ones. It is drawn again while a client has too few nodes.
    """
    labels, num_clients = problem.labels, problem.num_clients
    if labels is None:
        raise InputError("partition 'label_dirichlet' needs the labels of the nodes")
    if num_clients * config.least_nodes > len(labels):
        raise InputError(
            f"least_nodes = {config.least_nodes}: {num_clients} clients cannot have so "
            f"many of {len(labels)} nodes; use a smaller number, or fewer clients"
        )
    mean, random = len(labels) / num_clients, problem.random
    for _ in range(MOST_DRAWS):
        part_of, sizes = np.empty(len(labels), np.int64), np.zeros(num_clients)
        for kind in np.unique(labels):
            nodes = random.permutation(np.flatnonzero(labels == kind))
            shares = random.dirichlet(np.full(num_clients, config.concentration))
            shares = np.where(sizes < mean, shares, 0)
            if not shares.sum() > 0:  # all of it went to who has enough
                shares = (sizes < mean).astype(float)
            ends = (np.cumsum(shares / shares.sum()) * len(nodes)).astype(np.int64)
            part_of[nodes] = np.searchsorted(
                ends[:-1], np.arange(len(nodes)), side="right"
            )
            sizes += np.bincount(part_of[nodes], minlength=num_clients)
        if sizes.min() >= config.least_nodes:
            return _by_client(part_of, problem)
    raise InputError(
        f"concentration = {config.concentration}: in {MOST_DRAWS} draws some client "
        f"has fewer than least_nodes = {config.least_nodes} nodes; raise it, or use "
        "fewer clients"
    )


def _dealt(pieces: Owned, clients: Sequence[int], problem: Problem) -> Owned:
    """Lists the nodes of each client, of which each has some pieces."""
    part_of = np.empty(problem.adjacency.shape[0], np.int64)
    for nodes, client in zip(pieces, clients, strict=True):
        part_of[nodes] = client
    return _by_client(part_of, problem)


def _by_client(part_of: np.ndarray, problem: Problem) -> Owned:
    """Lists the nodes of each client in the drawn order."""
    order = problem.order
    return [order[part_of[order] == k] for k in range(problem.num_clients)]


PARTITIONS: dict[str, Callable[[Problem, PartitionConfig], Owned]] = {
    "random": at_random,
    "metis": metis,
    "metis_plus": metis_plus,
    "louvain": louvain,
    "louvain_plus": louvain_plus,
    "label_dirichlet": label_dirichlet,
}
