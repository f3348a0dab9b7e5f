"""Who owns each node of a graph: cut at random, by communities, by METIS, by labels.

A partition lists the nodes of each client; see `PARTITIONS` for their names. The
settings `resolution`, `balance`, `concentration` and `least_nodes` are named after, and
have the defaults of, those of the subgraph scenarios of OpenFGL (Li et al., "OpenFGL: A
Comprehensive Benchmark for Federated Graph Learning", VLDB 2025).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.sparse

from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.errors import InputError

MOST_DRAWS = 100  # of `label_dirichlet`


@dataclasses.dataclass(frozen=True)
class PartitionConfig(Checked):
    """Settings of the partitions that have some."""

    resolution: float = limited(1.0, above=0)  # of Louvain; more: smaller communities
    # of Louvain: nodes by which a piece stays below the clients' mean
    balance: int = limited(20, lower=0)
    # of labels: alpha of the Dirichlet draw of each class; less: more skewed
    concentration: float = limited(10.0, above=0)
    least_nodes: int = limited(5, lower=1)  # of labels: each client's


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
    try:
        import pymetis
    except ImportError as error:
        raise InputError(
            "partition 'metis' needs the package pymetis; run `pip install pymetis`, "
            "or use 'random'"
        ) from error
    adjacency, num_clients = problem.adjacency, problem.num_clients
    graph = pymetis.CSRAdjacency(adjacency.indptr, adjacency.indices)
    part_of = np.asarray(pymetis.part_graph(num_clients, graph).vertex_part)
    owned = _by_client(part_of, problem)
    smallest = min(range(num_clients), key=lambda client: len(owned[client]))
    if not len(owned[smallest]):
        raise InputError(
            f"num_clients = {num_clients}: METIS leaves client {smallest} without "
            "nodes; use fewer clients or the partition 'random'"
        )
    return owned


def louvain(problem: Problem, config: PartitionConfig) -> Owned:
    """Deals communities out: Blondel, Guillaume, Lambiotte, Lefebvre, 2008.

    A community of more than N / K - balance nodes is cut into pieces of so many, so
    there is one for each client. The largest that is left goes to the client with the
    fewest nodes; OpenFGL's goes to the next one in turn that stays below N / K +
    balance, which leaves sizes further apart.
    """
    import networkx

    num_nodes, num_clients = problem.adjacency.shape[0], problem.num_clients
    most = num_nodes // num_clients - config.balance
    if most < 1:
        raise InputError(
            f"louvain: balance={config.balance} leaves no node of the "
            f"{num_nodes // num_clients} that a client has in the mean; use a smaller "
            "one, or fewer clients"
        )
    graph = networkx.from_scipy_sparse_array(problem.adjacency)
    seed = int(problem.random.integers(2**31))
    communities = networkx.community.louvain_communities(
        graph, resolution=config.resolution, seed=seed
    )
    pieces = [
        nodes[start : start + most]
        for nodes in sorted(sorted(community) for community in communities)
        for start in range(0, len(nodes), most)
    ]
    part_of, sizes = np.empty(num_nodes, np.int64), np.zeros(num_clients, np.int64)
    for piece in sorted(pieces, key=len, reverse=True):
        client = np.argmin(sizes)
        part_of[piece] = client
        sizes[client] += len(piece)
    return _by_client(part_of, problem)


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


def _by_client(part_of: np.ndarray, problem: Problem) -> Owned:
    """Lists the nodes of each client in the drawn order."""
    order = problem.order
    return [order[part_of[order] == k] for k in range(problem.num_clients)]


PARTITIONS: dict[str, Callable[[Problem, PartitionConfig], Owned]] = {
    "random": at_random,
    "metis": metis,
    "louvain": louvain,
    "label_dirichlet": label_dirichlet,
}
