"""Graphs of clients as pytrees, and the bridge to jraph."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from fedjax_graph.core import arrays, mesh
from fedjax_graph.core.errors import InputError

COLUMNS_PER_CHUNK = 4096  # of `neighbour_sum`


class Graph(NamedTuple):
    """Holds a directed weighted graph, edges s -> r sorted by receiver."""

    senders: jax.Array  # [E] int32
    receivers: jax.Array  # [E] int32, ascending
    weights: jax.Array  # [E] float32
    node_mask: jax.Array  # [N] float32, 0 for padding
    neighbours: jax.Array | None = (
        None  # [E'] int32, indices of edges between two nodes
    )

    @property
    def num_nodes(self) -> int:
        """Number of nodes, with those of padding."""
        return self.node_mask.shape[0]


def check_edges(
    num_nodes: int,
    senders: jax.Array,
    receivers: jax.Array,
    weights: jax.Array | None,
    what: str = "weights",
) -> None:
    """Checks the edges of a graph, whose indices JAX would clamp or leave out.

    Args:
      num_nodes: N.
      senders, receivers: [E] whole numbers; an edge of weight 0 may point anywhere.
      weights: [E], or None for ones.
      what: the weights are called, for messages.

    Raises:
      InputError: if they do not fit together or, where values are known, an edge has an
        end that is no node, or a weight that is negative or not finite.
    """
    size = jnp.shape(receivers)
    arrays.check_shape("receivers", receivers, (None,))
    arrays.check_shape("senders", senders, size)
    if weights is not None and jnp.shape(weights) != size:
        raise InputError(
            f"{what} of shape {jnp.shape(weights)}: expected weights of shape {size}; "
            "keep other edge features out of the graph"
        )
    if weights is not None:
        arrays.check_weights(what, weights)
    of = f"a graph with {num_nodes} nodes"
    for name, ends in (("senders", senders), ("receivers", receivers)):
        if weights is not None and arrays.is_known(ends, weights):
            ends = np.where(np.asarray(weights) != 0, np.asarray(ends), 0)
            if not num_nodes:
                ends = ends[:0]
        arrays.check_indices(name, ends, num_nodes, of)


def check(graph: Graph) -> None:
    """Checks a graph's edges; see `check_edges`.

    Raises:
      InputError: naming what does not fit.
    """
    arrays.check_shape("node_mask", graph.node_mask, (None,))
    check_edges(graph.num_nodes, graph.senders, graph.receivers, graph.weights)
    receivers = graph.receivers
    if arrays.is_known(receivers) and np.any(np.diff(np.asarray(receivers)) < 0):
        raise InputError("receivers of a graph fall, expected them to ascend")


def client_adjacency(data: Any) -> jax.Array:
    """`dense_adjacency` of the graph of the clients that some data have, [K, K].

    Args:
      data: see `client_graph`.

    Raises:
      InputError: likewise.
    """
    return dense_adjacency(client_graph(data))


def client_graph(data: Any) -> Graph:
    """The graph of the K clients that some data have.

    Args:
      data: of K clients, with `client_ids` and `graph`.

    Raises:
      InputError: if the graph has another number of nodes, or is none.
    """
    graph = getattr(data, "graph", None)
    if graph is None:
        raise InputError("the data have no graph of their clients, expected one")
    if graph.num_nodes != len(data.client_ids):
        raise InputError(
            f"the graph has {graph.num_nodes} nodes, expected one for each of "
            f"{len(data.client_ids)} clients"
        )
    return graph


def from_adjacency(adjacency: np.ndarray) -> Graph:
    """Makes the graph of a matrix [N, N]: an entry `[i, j]` other than 0 is i -> j.

    Raises:
      InputError: if it is not square, or an entry is negative or not finite.
    """
    adjacency = np.asarray(adjacency)
    arrays.check_shape("adjacency", adjacency, (len(adjacency),) * 2)
    arrays.check_weights("adjacency", adjacency)
    receivers, senders = np.nonzero(adjacency.T)  # sorted by receiver
    return Graph(
        senders=jnp.asarray(senders, jnp.int32),
        receivers=jnp.asarray(receivers, jnp.int32),
        weights=jnp.asarray(adjacency[senders, receivers], jnp.float32),
        node_mask=jnp.ones(len(adjacency), jnp.float32),
        neighbours=_between_nodes(senders, receivers),
    )


def _between_nodes(senders: np.ndarray, receivers: np.ndarray) -> jax.Array:
    return jnp.asarray(np.flatnonzero(senders != receivers), jnp.int32)


def permute(graph: Graph, order: np.ndarray) -> Graph:
    """Moves node `order[i]` to index i (host only).

    Raises:
      InputError: if the order is none of the graph's nodes.
    """
    check(graph)
    if not np.array_equal(np.sort(order), np.arange(graph.num_nodes)):
        raise InputError(f"order: expected each of {graph.num_nodes} nodes once")
    index = np.argsort(order)
    senders, receivers = index[graph.senders], index[graph.receivers]
    by_receiver = np.argsort(receivers, kind="stable")
    senders, receivers = senders[by_receiver], receivers[by_receiver]
    return Graph(
        senders=jnp.asarray(senders, jnp.int32),
        receivers=jnp.asarray(receivers, jnp.int32),
        weights=graph.weights[by_receiver],
        node_mask=graph.node_mask[order],
        neighbours=_between_nodes(senders, receivers),
    )


def pad_nodes(graph: Graph, num_nodes: int) -> Graph:
    """Adds nodes without edges up to `num_nodes`; their mask is 0.

    Raises:
      InputError: if the graph has more already.
    """
    extra = num_nodes - graph.num_nodes
    if extra < 0:
        raise InputError(f"num_nodes={num_nodes}: the graph has {graph.num_nodes}")
    return graph._replace(node_mask=jnp.pad(graph.node_mask, (0, extra)))


def one_graph(
    nodes: Any,
    senders: jax.Array,
    receivers: jax.Array,
    edges: Any = None,
    globals_: Any = None,
    num_nodes: int | None = None,
) -> jraph.GraphsTuple:
    """Makes a `jraph.GraphsTuple` of one graph.

    Args:
      nodes: [N, ...], or a pytree of such.
      senders, receivers: [E] int32, indices of nodes.
      edges: pytree of [E, ...].
      globals_: pytree of [1, ...].
      num_nodes: N; None: the length of `nodes`.
    """
    num_nodes = len(nodes) if num_nodes is None else num_nodes
    return jraph.GraphsTuple(
        nodes=nodes,
        edges=edges,
        globals=globals_,
        senders=senders,
        receivers=receivers,
        n_node=jnp.array([num_nodes], jnp.int32),
        n_edge=jnp.array([len(senders)], jnp.int32),
    )


def to_jraph(graph: Graph, nodes: Any, edges: Any, globals_: Any) -> jraph.GraphsTuple:
    """Makes `one_graph` of a graph's structure and the given features."""
    ends = graph.senders, graph.receivers
    return one_graph(nodes, *ends, edges, globals_, num_nodes=graph.num_nodes)


def segment_sum(
    values: jax.Array,
    segments: jax.Array,
    num_segments: int,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Sums the rows of each segment, shorter numbers in float32.

    On a GPU sorted segments are summed as any others are: XLA's own program for them
    took a thousand times as long there (see BUILD_NOTES.md, 'On an H100').

    Args:
      values: [E, ...].
      segments: [E], which segment a row belongs to.
      num_segments: N.
      indices_are_sorted: whether `segments` ascend.

    Returns:
      [N, ...], of the values' type, or float32 where they are whole numbers.
    """
    total = jax.ops.segment_sum(
        arrays.precise(values),
        segments,
        num_segments,
        indices_are_sorted=indices_are_sorted and mesh.backend() != "gpu",
    )
    return total.astype(arrays.float_type(values.dtype))


def neighbour_sum(graph: Graph, features: jax.Array) -> jax.Array:
    """Sums a_ij x_j over the edges i -> j between two nodes, without self edges.

    One sparse product, columns in chunks so that [E', F] is never there as a whole.

    Args:
      graph: N nodes and E' edges between two nodes, as `from_adjacency` finds them.
      features: [N, ...], x.

    Returns:
      [N, ...].

    Raises:
      InputError: if the features are not of N nodes, or the graph does not fit
        together or says nothing of `neighbours`.
    """
    check(graph)
    edges = graph.neighbours
    if edges is None or features.shape[:1] != (graph.num_nodes,):
        raise InputError(
            f"features of shape {features.shape}: expected those of the "
            f"{graph.num_nodes} nodes of a graph with `neighbours`"
        )
    senders, receivers = graph.senders[edges], graph.receivers[edges]
    arrays.check_indices("neighbours", edges, len(graph.weights), "a graph's edges")
    weights = graph.weights[edges][:, None]
    weights = weights.astype(arrays.float_type(weights.dtype))

    def product(columns):  # [N, F]
        return segment_sum(weights * columns[receivers], senders, graph.num_nodes)

    flat = features.reshape(graph.num_nodes, -1)
    num_chunks = -(-flat.shape[1] // COLUMNS_PER_CHUNK)
    if num_chunks <= 1:
        return product(flat).reshape(features.shape)
    extra = num_chunks * COLUMNS_PER_CHUNK - flat.shape[1]
    chunks = jnp.pad(flat, ((0, 0), (0, extra)))
    chunks = chunks.reshape(graph.num_nodes, num_chunks, COLUMNS_PER_CHUNK)
    sums = jax.lax.map(product, jnp.swapaxes(chunks, 0, 1))
    sums = jnp.swapaxes(sums, 0, 1).reshape(graph.num_nodes, -1)
    return sums[:, : flat.shape[1]].reshape(features.shape)


def neighbour_weights(graph: Graph) -> jax.Array:
    """Returns a_ij [N, N] of the edges i -> j between two nodes; 0 on the diagonal."""
    adjacency = dense_adjacency(graph).T
    return adjacency - jnp.diag(jnp.diagonal(adjacency))


def dense_adjacency(graph: Graph) -> jax.Array:
    """Returns weights [N, N] with self edges: [i, j] is what node i receives from j.

    A node without a self edge gets one of weight 1.

    Raises:
      InputError: see `check`.
    """
    check(graph)
    size = graph.num_nodes
    adjacency = jnp.zeros((size, size)).at[graph.receivers, graph.senders]
    adjacency = adjacency.add(graph.weights)
    missing = jnp.diagonal(adjacency) == 0
    return adjacency + jnp.diag(missing.astype(adjacency.dtype))


def row_normalise(adjacency: jax.Array) -> jax.Array:
    """Divides rows by their sums; a row of zeros becomes a self edge.

    Raises:
      InputError: if the matrix is not square, or its known values are no weights.
    """
    arrays.check_shape("adjacency", adjacency, (len(adjacency),) * 2)
    arrays.check_weights("adjacency", adjacency)
    sums = jnp.sum(arrays.precise(adjacency), axis=1, keepdims=True)
    rows = adjacency / jnp.where(sums > 0, sums, 1)
    rows = rows.astype(arrays.float_type(adjacency.dtype))
    return jnp.where(sums > 0, rows, jnp.eye(len(adjacency), dtype=rows.dtype))
