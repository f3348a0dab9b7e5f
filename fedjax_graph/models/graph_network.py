"""The graph network of CNFGNN's server (Eq. 3), a configured `jraph.GraphNetwork`.

Battaglia et al., "Relational inductive biases, deep learning, and graph networks",
2018. A layer, with an MLP for each phi:

    e_k' = phi_e(e_k, v_receiver(k), v_sender(k), u)     edges
    v_i' = phi_v(sum of the e_k' that i receives, v_i, u)     nodes
    u'   = phi_u(sum of all e_k', sum of all v_i', u)     globals

Two identities make it fast without changing a result:

- The first layer of the edge MLP is linear, W [v_s; v_r; e; u] = W_s v_s + W_r v_r +
  W_e e + W_u u, so nodes are projected before they are gathered along edges.
- The last layer of the edge MLP is linear, so it commutes with the receiver's sum.
  Where nothing else reads the edge output (the last layer), it acts on N rows, not E.

On large graphs the messages of a few edges at a time are summed by a scan, which keeps
none of them: a later layer and the gradient compute them again.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from fedjax_graph.core import arrays, graphs, mesh
from fedjax_graph.core.checks import limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.graphs import Graph, check, segment_sum, to_jraph
from fedjax_graph.core.local import Params
from fedjax_graph.models.linear import MLP, Linear, matmul
from fedjax_graph.models.settings import CheckedModule

# What products over all edges, or nodes, and windows are cut into on a GPU: rows of
# another number would be copied before each.
EDGE_MULTIPLES, NODE_MULTIPLES = {"gpu": 64}, {"gpu": 16}
AT_ONCE_BYTES = 2**29  # of one layer's messages, up to which `auto` leaves them whole


class Edges(NamedTuple):
    """Holds the edges of a graph, or a part of them."""

    senders: jax.Array  # [E] int32
    receivers: jax.Array  # [E] int32, ascending
    weights: jax.Array  # [E] float32


def sum_all(values: jax.Array, *_: Any) -> jax.Array:
    """Sums over all rows: the segment sum of a single graph."""
    return jnp.sum(values, axis=0, keepdims=True)


def sum_received(values: jax.Array, receivers: jax.Array, num_nodes: int) -> jax.Array:
    """Sums over the edges of each receiver, shorter floats in float32."""
    return segment_sum(values, receivers, num_nodes, indices_are_sorted=True)


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
        self,
        graph: Graph,
        num_edges: int,
        nodes: jax.Array,
        edges: tuple[jax.Array, ...],
        globals_: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
        """Updates the features of a graph.

        Args:
          graph: N nodes and E edges.
          num_edges: those that are no padding, which comes last.
          nodes: [N, B, F_v].
          edges: features in parts, [E, B or 1, F_i] each, the latest first.
          globals_: [1, B, F_u].

        Returns:
          `[updated; previous]` nodes, edges and globals (edges as they came where
          `is_last`).
        """
        is_edge = jnp.arange(len(graph.senders))[:, None, None] < num_edges

        def update_edge(projected, sent, received, _):
            hidden = self.edge.hidden(projected + sent[0] + received[1])
            updated = hidden if self.is_last else self.edge.output(hidden)
            has_padding = num_edges < len(graph.senders)
            return jnp.where(is_edge, updated, 0) if has_padding else updated

        def edge_sum(total, count):
            return self.sum_of_outputs(total, count) if self.is_last else total

        def update_node(_, __, received, ___):
            received = edge_sum(received, in_degree(graph))
            return self.update_node(graph, nodes, globals_, received)

        def update_global(node_sum, all_edges, _):
            return self.update_global(
                globals_, node_sum, edge_sum(all_edges, num_edges)
            )

        *ends, w_edge = self.project(nodes, globals_)
        # Both projections belong to a node; jraph gathers them along the edges.
        updated = jraph.GraphNetwork(
            update_edge,
            update_node,
            update_global,
            aggregate_edges_for_nodes_fn=sum_received,
            aggregate_nodes_for_globals_fn=sum_all,
            aggregate_edges_for_globals_fn=sum_all,
        )(
            to_jraph(
                graph, tuple(ends), from_edges(edges, w_edge, nodes.shape[1]), globals_
            )
        )
        nodes = _behind(updated.nodes, nodes)
        globals_ = _behind(updated.globals, globals_)
        if not self.is_last:
            edges = (cast(jax.Array, updated.edges), *edges)
        return nodes, edges, globals_

    def project(self, nodes, globals_) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The edge MLP's first sums, as far as they come from an edge's ends.

        Returns:
          [N, B, H] of a node as a sender, with what is the same for all edges; [N, B,
          H] of it as a receiver; the kernel for what comes from the edge, [F_e, H].
        """
        w_sender, w_receiver, w_edge, w_global = self.edge.first_kernels()
        shared = matmul(globals_, w_global) + self.edge.first_bias()
        return matmul(nodes, w_sender) + shared, matmul(nodes, w_receiver), w_edge

    def sum_of_outputs(self, hidden_sum, count) -> jax.Array:
        """The sum of the edge MLP's outputs over `count` edges, from that of the inputs
        of its last layer."""
        last = self.edge.layers[-1]
        outputs = matmul(hidden_sum, last.kernel)
        return (outputs + count * arrays.precise(last.bias)).astype(outputs.dtype)

    def update_node(self, graph: Graph, nodes, globals_, received) -> jax.Array:
        """Updated nodes, from the sums of what they receive."""
        w_node, w_received, w_global = self.node.first_kernels()
        first = matmul(nodes, w_node)
        first += matmul(received, w_received)
        first += matmul(globals_, w_global) + self.node.first_bias()
        mask = graph.node_mask[:, None, None].astype(nodes.dtype)
        return mask * self.node.output(self.node.hidden(first))

    def update_global(self, globals_, node_sum, all_edges) -> jax.Array:
        """Updated globals, from the sums over updated nodes and edges."""
        w_nodes, w_edges, w_global = self.global_.first_kernels()
        first = matmul(node_sum, w_nodes)
        first += matmul(all_edges, w_edges)
        first += matmul(globals_, w_global) + self.global_.first_bias()
        return self.global_.output(self.global_.hidden(first))


def in_degree(graph: Graph) -> jax.Array:
    """How many edges each node receives, [N, 1, 1] float32."""
    ones = jnp.ones((*graph.receivers.shape, 1, 1), jnp.float32)
    return sum_received(ones, graph.receivers, graph.num_nodes)


def from_edges(
    parts: Sequence[jax.Array], kernel: jax.Array, batch_size: int
) -> jax.Array:
    """`x W` of the concatenation x of an edge's features.

    An accelerator adds up the products of the parts: the concatenation is not written,
    and the gradient of a part that all windows share is summed over edges and windows
    at once, without another layout of the messages.

    Args:
      parts: [E, B or 1, F_i] each.
      kernel: [sum of F_i, H].
      batch_size: B.

    Returns:
      [E, B, H], or [E, 1, H] where all windows share it.
    """
    if mesh.backend() == "cpu":
        rows = max(part.shape[1] for part in parts)
        return matmul(jnp.concatenate([_of(part, rows) for part in parts], -1), kernel)
    bounds = np.cumsum([part.shape[-1] for part in parts])[:-1]
    products = [
        matmul(_of(part, batch_size), rows)
        for part, rows in zip(parts, jnp.split(kernel, bounds), strict=True)
    ]
    return functools.reduce(jnp.add, products)


def _of(part: jax.Array, batch_size: int) -> jax.Array:
    return jnp.broadcast_to(part, (len(part), batch_size, part.shape[-1]))


def _behind(updated: jax.Array, previous: jax.Array) -> jax.Array:
    """The residual: [..., updated; previous]."""
    return jnp.concatenate([updated, previous], axis=-1)


class GraphNetwork(CheckedModule):
    """Embeds h_c of all nodes as h_G: 1,237,312 parameters by default."""

    node_size: int = limited(64, lower=1)
    output_size: int = limited(64, lower=1)
    mlp_sizes: Sequence[int] = limited((256, 256, 128), lower=1)  # two or more
    num_layers: int = limited(2, lower=1)
    edges_per_chunk: int = limited(0, lower=0)
    """How many edges' messages are held at once, in the gradient too; 0 for all. With
    fewer than there are, messages are computed again where a later layer or the
    gradient reads them, and the results differ by rounding."""

    def __post_init__(self) -> None:
        """Checks the settings; raises `InputError`."""
        super().__post_init__()
        if len(self.mlp_sizes) < 2:
            raise InputError(
                f"GraphNetwork mlp_sizes={self.mlp_sizes!r}: expected two or more, as "
                "the first layer of an MLP is applied in parts"
            )

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
            computed in their type, of whole numbers in float32, which that of the
            parameters should be too.

        Returns:
          [N, B, output_size].

        Raises:
          InputError: if nodes or edges do not fit the graph.
        """
        check(graph)
        arrays.check_shape("nodes", nodes, (graph.num_nodes, None, self.node_size))
        nodes = nodes.astype(arrays.float_type(nodes.dtype))
        globals_ = jnp.zeros((1, nodes.shape[1], self.node_size), nodes.dtype)
        is_chunked = 0 < self.edges_per_chunk < len(graph.senders)
        embed = self._in_chunks if is_chunked else self._at_once
        return self.out(embed(graph, nodes, globals_))

    def _at_once(self, graph: Graph, nodes, globals_) -> jax.Array:
        num_nodes, num_edges = graph.num_nodes, len(graph.senders)
        extra = -num_nodes % NODE_MULTIPLES.get(mesh.backend(), 1)
        graph = graphs.pad_nodes(graph, num_nodes + extra)
        nodes = jnp.pad(nodes, ((0, extra), (0, 0), (0, 0)))
        multiple = math.lcm(mesh.edge_parts(), EDGE_MULTIPLES.get(mesh.backend(), 1))
        edges = mesh.split_edges(_padded(graph, multiple))
        graph = graph._replace(**edges._asdict())
        edges = (graph.weights[:, None, None].astype(nodes.dtype),)
        for layer in self.layers:
            nodes, edges, globals_ = layer(graph, num_edges, nodes, edges, globals_)
        return nodes[:num_nodes]

    def _in_chunks(self, graph: Graph, nodes, globals_) -> jax.Array:
        num_edges, parts, projected = len(graph.senders), mesh.edge_parts(), []
        chunk_size = -(-self.edges_per_chunk // parts) * parts
        edges = _padded(graph, chunk_size)
        chunks = jax.tree.map(lambda x: x.reshape(-1, chunk_size), edges)
        degree = in_degree(graph)
        for layer in self.layers:
            projected.append(layer.project(nodes, globals_))
            received, total = self._sum_hidden(chunks, num_edges, projected)
            received = layer.sum_of_outputs(received, degree)
            updated = layer.update_node(graph, nodes, globals_, received)
            total = layer.sum_of_outputs(total, num_edges)
            global_ = layer.update_global(globals_, sum_all(updated), total)
            nodes, globals_ = _behind(updated, nodes), _behind(global_, globals_)
        return nodes

    def _sum_hidden(self, chunks: Edges, num_edges: int, projected):
        """Sums the inputs of an edge MLP's last layer, which commutes with the sum.

        Args:
          chunks: of edges, [C, E / C]; padding comes last.
          num_edges: those that are no padding.
          projected: `project` of that layer and of the ones before it.

        Returns:
          Sums over the edges that a node receives, [N, B, H], and over all, [1, B, H].
        """
        layers = self.layers[: len(projected)]
        num_nodes, batch_size, _ = projected[0][0].shape
        dtype = projected[0][0].dtype
        precise = jnp.promote_types(dtype, jnp.float32)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def sums_of(projected, chunk, is_edge):
            senders, receivers, weights = mesh.split_edges(chunk)
            edges = (weights[:, None, None].astype(dtype),)
            for layer, (sent, received, w_edge) in zip(layers, projected, strict=True):
                first = from_edges(edges, w_edge, batch_size)
                first = first + sent[senders] + received[receivers]
                hidden = layer.edge.hidden(first)
                edges = (layer.edge.output(hidden), *edges)
            hidden = jnp.where(is_edge[:, None, None], hidden, 0).astype(precise)
            return sum_received(hidden, receivers, num_nodes), sum_all(hidden)

        def add(sums, chunk):
            return jax.tree.map(jnp.add, sums, sums_of(projected, *chunk)), None

        is_edge = jnp.arange(chunks.senders.size) < num_edges
        rows = (chunks, is_edge.reshape(chunks.senders.shape))
        shape = (batch_size, self.mlp_sizes[-2])
        zeros = (
            jnp.zeros((num_nodes, *shape), precise),
            jnp.zeros((1, *shape), precise),
        )
        sums, _ = jax.lax.scan(add, mesh.varying(zeros), rows)
        return jax.tree.map(lambda x: x.astype(dtype), sums)


def _padded(graph: Graph, multiple: int) -> Edges:
    """Edges up to a multiple, the additional ones at the end and received by nobody."""
    extra = -len(graph.senders) % multiple
    return Edges(
        senders=jnp.pad(graph.senders, (0, extra)),
        receivers=jnp.pad(graph.receivers, (0, extra), constant_values=graph.num_nodes),
        weights=jnp.pad(graph.weights, (0, extra)),
    )


def auto_edges_per_chunk(
    num_nodes: int, num_edges: int, batch_size: int, width: int
) -> int:
    """Returns 0, for all edges at once, unless a layer's messages are above 512 MiB.

    Then it is the number of nodes: messages take as much memory as nodes do.

    Args:
      num_nodes: of the graph.
      num_edges: likewise.
      batch_size: windows in a minibatch.
      width: numbers in the widest layer of the edge MLP, counted as float32.
    """
    is_small = 4 * num_edges * batch_size * width <= AT_ONCE_BYTES
    return 0 if is_small else num_nodes


def init_params(model: GraphNetwork, key: jax.Array) -> Params:
    """Draws fresh parameters, whose shapes do not depend on the graph."""
    graph = Graph(jnp.zeros(1, int), jnp.zeros(1, int), jnp.ones(1), jnp.ones(1))
    return model.init(key, graph, jnp.zeros((1, 1, model.node_size)))["params"]
