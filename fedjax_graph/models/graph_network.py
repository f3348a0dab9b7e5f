"""The graph network of CNFGNN's server (Eq. 3), a configured `jraph.GraphNetwork`.

Battaglia et al., "Relational inductive biases, deep learning, and graph networks",
2018. Two identities make it fast without changing a result:

- The first layer of the edge MLP is linear, W [v_s; v_r; e; u] = W_s v_s + W_r v_r +
  W_e e + W_u u, so nodes are projected before they are gathered along edges.
- The last layer of the edge MLP is linear, so it commutes with the receiver's sum.
  Where nothing else reads the edge output (the last layer), it acts on N rows, not E.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph

from fedjax_graph.core import arrays, mesh
from fedjax_graph.core.graphs import Graph, check, to_jraph
from fedjax_graph.core.local import Params
from fedjax_graph.models.linear import MLP, Linear, matmul


def sum_all(values: jax.Array, index: jax.Array, num_graphs: int) -> jax.Array:
    """Sums over all rows: the segment sum of a single graph."""
    del index, num_graphs
    return jnp.sum(values, axis=0, keepdims=True)


def sum_received(values: jax.Array, receivers: jax.Array, num_nodes: int) -> jax.Array:
    """Sums over the edges of each receiver, shorter floats in float32."""
    precise = jnp.promote_types(values.dtype, jnp.float32)
    total = jax.ops.segment_sum(
        values.astype(precise), receivers, num_nodes, indices_are_sorted=True
    )
    return total.astype(values.dtype)


class GraphNetworkLayer(nn.Module):
    """Updates edges, nodes and globals by sums, with residuals by concatenation."""

    node_size: int
    edge_size: int
    global_size: int
    mlp_sizes: Sequence[int]
    is_last: bool = False  # then nobody reads the updated edges one by one

    def setup(self) -> None:
        out = self.mlp_sizes[-1]
        v, e, u = self.node_size, self.edge_size, self.global_size
        self.edge = MLP((v, v, e, u), self.mlp_sizes)
        self.node = MLP((v, out, u), self.mlp_sizes)
        self.global_ = MLP((out, out, u), self.mlp_sizes, name="global")

    def __call__(
        self, graph: Graph, num_edges: int, nodes, edges, globals_
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Updates the features of a graph.

        Args:
          graph: N nodes and E edges.
          num_edges: those that are no padding, which comes last.
          nodes: [N, B, F_v].
          edges: [E, B or 1, F_e].
          globals_: [1, B, F_u].

        Returns:
          `[updated; previous]` nodes, edges and globals (edges as they came where
          `is_last`).
        """
        w_sender, w_receiver, w_edge, w_global = self.edge.first_kernels()
        shared = matmul(globals_, w_global) + self.edge.first_bias()
        as_sender = matmul(nodes, w_sender) + shared
        as_receiver = matmul(nodes, w_receiver)
        w_node, w_received, w_global_node = self.node.first_kernels()
        w_nodes, w_edges, w_global_global = self.global_.first_kernels()
        mask = graph.node_mask[:, None, None].astype(nodes.dtype)

        is_edge = jnp.arange(len(graph.senders))[:, None, None] < num_edges

        def update_edge(projected, sent, received, _):
            hidden = self.edge.hidden(projected + sent[0] + received[1])
            updated = hidden if self.is_last else self.edge.output(hidden)
            has_padding = num_edges < len(graph.senders)
            return jnp.where(is_edge, updated, 0) if has_padding else updated

        def edge_sum(received, count):
            """From the sum that jraph made to the sum of the edge MLP's outputs."""
            if not self.is_last:
                return received
            last = self.edge.layers[-1]
            return matmul(received, last.kernel) + count * last.bias

        def update_node(_, __, received_edges, ___):
            first = matmul(nodes, w_node)
            first += matmul(edge_sum(received_edges, in_degree), w_received)
            first += matmul(globals_, w_global_node) + self.node.first_bias()
            return mask * self.node.output(self.node.hidden(first))

        def update_global(node_sum, all_edges, _):
            first = matmul(node_sum, w_nodes)
            first += matmul(edge_sum(all_edges, num_edges), w_edges)
            first += matmul(globals_, w_global_global) + self.global_.first_bias()
            return self.global_.output(self.global_.hidden(first))

        ones = jnp.ones((*graph.receivers.shape, 1, 1), nodes.dtype)
        in_degree = sum_received(ones, graph.receivers, graph.num_nodes)
        # Both projections belong to a node; jraph gathers them along the edges.
        updated = jraph.GraphNetwork(
            update_edge,
            update_node,
            update_global,
            aggregate_edges_for_nodes_fn=sum_received,
            aggregate_nodes_for_globals_fn=sum_all,
            aggregate_edges_for_globals_fn=sum_all,
        )(to_jraph(graph, (as_sender, as_receiver), matmul(edges, w_edge), globals_))
        nodes = jnp.concatenate([updated.nodes, nodes], axis=-1)
        globals_ = jnp.concatenate([updated.globals, globals_], axis=-1)
        if self.is_last:
            return nodes, edges, globals_
        edges = jnp.broadcast_to(edges, (*updated.edges.shape[:-1], edges.shape[-1]))
        return nodes, jnp.concatenate([updated.edges, edges], axis=-1), globals_


class GraphNetwork(nn.Module):
    """Embeds h_c of all nodes as h_G: 1,237,312 parameters by default."""

    node_size: int = 64
    output_size: int = 64
    mlp_sizes: Sequence[int] = (256, 256, 128)
    num_layers: int = 2

    def setup(self) -> None:
        v, e, u = self.node_size, 1, self.node_size
        out, layers = self.mlp_sizes[-1], []
        for depth in range(self.num_layers):
            is_last = depth == self.num_layers - 1
            layers.append(GraphNetworkLayer(v, e, u, self.mlp_sizes, is_last))
            v, e, u = v + out, e + out, u + out
        self.layers = layers
        self.out = Linear(v, self.output_size)

    def __call__(self, graph: Graph, nodes: jax.Array) -> jax.Array:
        """Embeds nodes.

        Args:
          graph: N nodes; an edge's feature is its weight.
          nodes: [N, B, F], a batch of features of the same graph. Everything is
            computed in their type, which that of the parameters should be too.

        Returns:
          [N, B, output_size].

        Raises:
          InputError: if nodes or edges do not fit the graph.
        """
        check(graph)
        arrays.check_shape("nodes", nodes, (graph.num_nodes, None, self.node_size))
        num_edges = len(graph.senders)
        graph = _cut(graph)
        edges = graph.weights[:, None, None].astype(nodes.dtype)
        globals_ = jnp.zeros((1, nodes.shape[1], self.node_size), nodes.dtype)
        for layer in self.layers:
            nodes, edges, globals_ = layer(graph, num_edges, nodes, edges, globals_)
        return self.out(nodes)


def _cut(graph: Graph) -> Graph:
    """Edges cut along the mesh's axis of edges, padded by some that nobody receives."""
    extra = -len(graph.senders) % mesh.edge_parts()
    edges = (
        jnp.pad(graph.senders, (0, extra)),
        jnp.pad(graph.receivers, (0, extra), constant_values=graph.num_nodes),
        jnp.pad(graph.weights, (0, extra)),
    )
    senders, receivers, weights = mesh.split_edges(edges)
    return graph._replace(senders=senders, receivers=receivers, weights=weights)


def init_params(model: GraphNetwork, key: jax.Array) -> Params:
    """Draws fresh parameters, whose shapes do not depend on the graph."""
    graph = Graph(jnp.zeros(1, int), jnp.zeros(1, int), jnp.ones(1), jnp.ones(1))
    return model.init(key, graph, jnp.zeros((1, 1, model.node_size)))["params"]
