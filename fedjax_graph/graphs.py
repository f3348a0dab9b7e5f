"""Graphs of clients as pytrees, and the bridge to jraph."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np


class Graph(NamedTuple):
    """A directed weighted graph, edges sorted by receiver. Messages flow s -> r."""

    senders: jax.Array  # [E] int32
    receivers: jax.Array  # [E] int32, ascending
    weights: jax.Array  # [E] float32
    node_mask: jax.Array  # [N] float32, 0 for padding

    @property
    def num_nodes(self) -> int:
        return self.node_mask.shape[0]


def from_adjacency(adjacency: np.ndarray) -> Graph:
    """Graph of the non-zero entries of a [N, N] matrix, `[i, j]` an edge i -> j."""
    receivers, senders = np.nonzero(np.asarray(adjacency).T)  # sorted by receiver
    return Graph(
        senders=jnp.asarray(senders, jnp.int32),
        receivers=jnp.asarray(receivers, jnp.int32),
        weights=jnp.asarray(adjacency[senders, receivers], jnp.float32),
        node_mask=jnp.ones(len(adjacency), jnp.float32),
    )


def permute(graph: Graph, order: np.ndarray) -> Graph:
    """The same graph with node `order[i]` moved to place i (host only)."""
    place = np.argsort(order)
    senders, receivers = place[graph.senders], place[graph.receivers]
    by_receiver = np.argsort(receivers, kind="stable")
    return Graph(
        senders=jnp.asarray(senders[by_receiver], jnp.int32),
        receivers=jnp.asarray(receivers[by_receiver], jnp.int32),
        weights=graph.weights[by_receiver],
        node_mask=graph.node_mask[order],
    )


def pad_nodes(graph: Graph, num_nodes: int) -> Graph:
    """Adds nodes without edges up to `num_nodes`; their mask is 0."""
    extra = num_nodes - graph.num_nodes
    return graph._replace(node_mask=jnp.pad(graph.node_mask, (0, extra)))


def to_jraph(graph: Graph, nodes: Any, edges: Any, globals_: Any) -> jraph.GraphsTuple:
    """A `jraph.GraphsTuple` of one graph with the given features.

    Args:
      graph: structure.
      nodes: pytree of [N, ...].
      edges: pytree of [E, ...].
      globals_: pytree of [1, ...].
    """
    return jraph.GraphsTuple(
        nodes=nodes,
        edges=edges,
        globals=globals_,
        senders=graph.senders,
        receivers=graph.receivers,
        n_node=jnp.array([graph.num_nodes], jnp.int32),
        n_edge=jnp.array([graph.senders.shape[0]], jnp.int32),
    )


def dense_adjacency(graph: Graph) -> jax.Array:
    """[N, N] weights with self edges: [i, j] is what node i receives from node j.

    A node without a self edge gets one of weight 1.
    """
    size = graph.num_nodes
    adjacency = jnp.zeros((size, size)).at[graph.receivers, graph.senders]
    adjacency = adjacency.add(graph.weights)
    missing = jnp.diagonal(adjacency) == 0
    return adjacency + jnp.diag(missing.astype(adjacency.dtype))


def row_normalise(adjacency: jax.Array) -> jax.Array:
    """Rows divided by their sums; a row of zeros becomes a self edge."""
    sums = jnp.sum(adjacency, axis=1, keepdims=True)
    rows = adjacency / jnp.where(sums > 0, sums, 1)
    return jnp.where(sums > 0, rows, jnp.eye(len(adjacency)))
