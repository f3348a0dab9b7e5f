"""Subgraphs that lose nodes, and subgraphs that are given neighbours, of fixed shapes.

Functions are of ONE client's padded `SubgraphData` where nothing else is said.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import mesh
from fedjax_graph.core.masked_rows import MaskedRows, map_marked
from fedjax_graph.core.masks import lowest, masked_mean
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData, dense_features


class Neighbours(NamedTuple):
    """Holds neighbours that nodes are thought to have lost, P places for each."""

    counts: jax.Array  # [N] floats, how many of the places are filled, rounded down
    features: jax.Array  # [N, P, F]


class Lost(NamedTuple):
    """Holds neighbours that nodes have lost, the first P of them."""

    counts: jax.Array  # [N] floats, of all that were lost
    nodes: jax.Array  # [N, P] int32, where they are; 0 for places that are empty


def nothing_found(data: SubgraphData, num_places: int) -> Neighbours:
    """Neighbours [K, N, ...] of K clients' nodes where none was generated.

    Raises:
      InputError: if their features are sparse.
    """
    features = dense_features(data)
    *nodes, width = features.shape
    zeros = functools.partial(jnp.zeros, dtype=features.dtype)
    return Neighbours(zeros(nodes), zeros((*nodes, num_places, width)))


def draw_hidden(key: jax.Array, candidates: jax.Array, share: float) -> jax.Array:
    """Draws a share, rounded down, of candidates [N]: [N] float32, 1 for the drawn."""
    is_candidate = candidates > 0
    draws = jax.random.uniform(key, candidates.shape)
    size = jnp.floor(share * jnp.sum(is_candidate))
    return lowest(draws, is_candidate, size).astype(jnp.float32)


def without(own: SubgraphData, hidden: jax.Array) -> SubgraphData:
    """Takes the edges of hidden nodes [N] away, which leaves these alone."""
    kept = (1 - hidden[own.senders]) * (1 - hidden[own.receivers])
    return own._replace(edge_weights=own.edge_weights * kept)


def hidden_neighbours(own: SubgraphData, hidden: jax.Array, num_places: int) -> Lost:
    """Finds what `without` takes from nodes: P of their hidden neighbours."""
    size = len(own.labels)
    is_lost = own.edge_weights * hidden[own.senders] * (1 - hidden[own.receivers]) > 0
    counts = jax.ops.segment_sum(is_lost.astype(jnp.int32), own.receivers, size)
    rank = jnp.cumsum(is_lost) - 1 - (jnp.cumsum(counts) - counts)[own.receivers]
    place = own.receivers * num_places + rank
    place = jnp.where(is_lost & (rank < num_places), place, size * num_places)
    table = jnp.zeros(size * num_places, own.senders.dtype)
    nodes = table.at[place].set(own.senders, mode="drop").reshape(size, num_places)
    return Lost(counts.astype(own.features.dtype), nodes)


def draw_neighbours(
    key: jax.Array, other: SubgraphData, own: SubgraphData, num_places: int
) -> jax.Array:
    """Draws for each own node a node of another client, and P neighbours of that one.

    Nodes are drawn from those with neighbours, and neighbours with replacement.

    Returns:
      The neighbours [N, P]; node 0 if the other graph has no edges.
    """
    size = len(own.labels)
    node_key, edge_key = jax.random.split(key)
    is_edge = (other.edge_weights > 0).astype(jnp.int32)
    degrees = jax.ops.segment_sum(is_edge, other.receivers, len(other.labels))
    (candidates,) = jnp.nonzero(degrees, size=len(degrees), fill_value=0)
    number = jnp.maximum(jnp.count_nonzero(degrees), 1)
    nodes = candidates[jax.random.randint(node_key, (size,), 0, number)]
    draws = jax.random.uniform(edge_key, (size, num_places))
    starts = jnp.cumsum(degrees) - degrees  # edges stand by receiver, padding last
    drawn = jnp.floor(draws * degrees[nodes][:, None]).astype(jnp.int32)
    edges = starts[nodes][:, None] + drawn
    if not len(is_edge):  # of all clients
        chosen = jnp.zeros(edges.shape, jnp.int32)
    else:
        chosen = other.senders[jnp.minimum(edges, len(is_edge) - 1)]
    return jnp.where(jnp.any(degrees > 0), chosen, 0)


def remaining(own: SubgraphData, hidden: jax.Array) -> SubgraphData:
    """Marks hidden nodes [N] as padding."""
    return own._replace(is_real=own.is_real * (1 - hidden))


def fill(own: SubgraphData, found: Neighbours) -> SubgraphData:
    """Adds neighbours, with edges both ways: N (1 + P) nodes, own ones first."""
    filled = fill_structure(own, found.counts, found.features.shape[1])
    return fill_features(filled, found)


def fill_structure(
    own: SubgraphData, counts: jax.Array, num_places: int
) -> SubgraphData:
    """Adds P places for neighbours of each node, and edges where they are filled.

    Args:
      own: a client's subgraph, whose features stay those of its own nodes.
      counts: [N], how many places of a node are filled, rounded down.
      num_places: P.
    """
    size = len(counts)
    place = jnp.arange(size * num_places)
    parents, added = place // num_places, size + place
    is_filled = place % num_places < jnp.floor(counts)[parents]
    is_there = is_filled * own.is_real[parents]

    def extend(x, *more):
        return jnp.concatenate([x, *(y.astype(x.dtype) for y in more)])

    nobody = jnp.zeros(len(place))
    receivers = extend(own.receivers, parents, added)
    order = jnp.argsort(receivers, stable=True)  # ascending, as sums expect them
    return own._replace(
        senders=extend(own.senders, added, parents)[order],
        receivers=receivers[order],
        edge_weights=extend(own.edge_weights, is_there, is_there)[order],
        is_real=extend(own.is_real, is_there),
        **{
            name: extend(x, nobody)
            for name in ("labels", "is_trained", "is_scored", "node_ids", "is_own")
            if (x := getattr(own, name)) is not None
        },
    )


def fill_features(filled: SubgraphData, found: Neighbours) -> SubgraphData:
    """Adds neighbours' features, which are `MaskedRows` as most places are empty.

    Args:
      filled: of one client, or of K, by `fill_structure`.
      found: likewise.
    """
    *clients, size, num_places, width = found.features.shape
    added = found.features.reshape(*clients, size * num_places, width)
    parts = filled.features, added.astype(filled.features.dtype)
    return filled._replace(features=MaskedRows(parts, filled.is_real))


def greedy_distance(made: Neighbours, wanted: Neighbours) -> jax.Array:
    """Averages the squared distance of what was made to the nearest of what is wanted.

    Returns:
      [N, P], over the features; 0 for places that are empty, and for nodes that want
      nothing.
    """
    squares = (jnp.sum(x.features**2, axis=2) for x in (made, wanted))
    left, right = squares
    with jax.default_matmul_precision("highest"):  # whose sum nearly cancels
        products = jnp.einsum("npf,nqf->npq", made.features, wanted.features)
    gaps = left[:, :, None] + right[:, None] - 2 * products
    places = jnp.arange(gaps.shape[1])
    is_wanted = places < wanted.counts[:, None]  # [N, Q]
    nearest = jnp.min(jnp.where(is_wanted[:, None], gaps, jnp.inf), axis=2)
    is_counted = (places < jnp.floor(made.counts)[:, None]) & is_wanted[:, :1]
    width = made.features.shape[2]
    return jnp.where(is_counted, nearest, 0) / width


def distance(
    made: Neighbours,
    counts: jax.Array,
    nodes: jax.Array,
    features: jax.Array,
    is_there: jax.Array,
    own: SubgraphData,
) -> jax.Array:
    """Sums over J graphs `greedy_distance` to nodes of each, a mean over places.

    Args:
      made: neighbours of the own nodes.
      counts: [N], how many of the places are wanted in each graph.
      nodes: [J, N, P], what is wanted there.
      features: [J, N', F], of the graphs' nodes; no gradient is taken in them.
      is_there: [J], graphs that count.
      own: whose training nodes [N] it is a mean over.

    Returns:
      [].
    """

    def of_nodes(rows, graphs):
        (made, counts, nodes), (features, is_there) = rows, graphs

        def add(total, graph):
            nodes, features, is_there = graph
            wanted = Neighbours(counts, features[nodes])
            gaps = jnp.mean(greedy_distance(made, wanted), axis=1)
            return total + jnp.where(is_there, gaps, 0), None

        features = jax.lax.stop_gradient(features)
        dtype = jnp.result_type(made.features, features)
        zeros = mesh.varying(jnp.zeros(len(counts), dtype))
        graphs = jnp.moveaxis(nodes, 1, 0), features, is_there
        return jax.lax.scan(add, zeros, graphs)[0]

    is_compared = (own.is_trained > 0) & (made.counts >= 1) & (counts > 0)
    rows = made, counts, jnp.moveaxis(nodes, 0, 1)
    by_node = map_marked(of_nodes, is_compared, rows, (features, is_there))
    return masked_mean(by_node, own.is_trained)


def distance_to_own(made: Neighbours, lost: Lost, own: SubgraphData) -> jax.Array:
    """The `distance` to what nodes have lost."""
    graph = lost.nodes[None], own.features[None], jnp.ones(1, bool)
    return distance(made, lost.counts, *graph, own)


def distance_of_counts(made: Neighbours, lost: Lost, own: SubgraphData) -> jax.Array:
    """Averages the smooth L1 distance of the counts over the training nodes."""
    errors = optax.losses.huber_loss(made.counts, lost.counts)
    return masked_mean(errors, own.is_trained)


def distance_to_others(
    key: jax.Array,
    made: Neighbours,
    counts: jax.Array,
    own: SubgraphData,
    everybody: SubgraphData,
) -> tuple[jax.Array, jax.Array]:
    """The `distance` to neighbours drawn from each other client of some weight.

    Args:
      key: of the draws.
      made: neighbours of the own nodes.
      counts: [N], how many of the places are wanted at each client.
      own: whose training nodes count.
      everybody: [K, ...], also the client itself.

    Returns:
      The sum, and the number of clients of some weight, at least 1.
    """

    def draw(other):
        other_key = jax.random.fold_in(key, other.client_ids)
        return draw_neighbours(other_key, other, own, made.features.shape[1])

    is_there = everybody.client_weights > 0
    is_other = is_there & (everybody.client_ids != own.client_ids)
    nodes = jax.lax.map(draw, everybody)
    total = distance(made, counts, nodes, everybody.features, is_other, own)
    return total, jnp.maximum(jnp.sum(is_there), 1)
