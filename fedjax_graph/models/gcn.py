"""GCN and SGC over jraph graphs: what GraphFL trains on every client.

Kipf, Welling, "Semi-Supervised Classification with Graph Convolutional Networks", ICLR
2017, Eq. 9: Z = S ReLU(S X W_0 + b_0) W_1 + b_1. Wu et al., "Simplifying Graph
Convolutional Networks", ICML 2019, Eq. 8: Z = S^k X W. S is the normalised adjacency
with self edges; an edge carries its entry of S.

Products of S with X hold no parameters. They are computed once for a dataset, so both
models start from propagated features: GCN from S X, SGC from S^k X.
"""

from functools import partial
from typing import cast

import flax.linen as nn
import jax
import jraph

from fedjax_graph.core import arrays, graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.spread_rows import SpreadRows


def propagate(graph: jraph.GraphsTuple) -> jax.Array:
    """Computes S X as a configured graph network: edges carry w x_sender, nodes sum.

    Args:
      graph: nodes X [N, F], edges S's entries [E], receivers ascending.

    Returns:
      [N, F].

    Raises:
      InputError: if the edges are no weights; see `graphs.check_edges`.
    """
    if graph.edges is None:
        raise InputError("edges: expected S's entries [E], not None")
    ends = (graph.senders, graph.receivers)
    graphs.check_edges(len(graph.nodes), *ends, graph.edges, "edges")
    weight_type = arrays.float_type(graph.edges.dtype)
    updated = jraph.GraphNetwork(
        update_edge_fn=lambda weights, sent, *_: weights[:, None] * sent,
        update_node_fn=lambda nodes, sent, received, globals_: received,
        aggregate_edges_for_nodes_fn=partial(
            graphs.segment_sum, indices_are_sorted=True
        ),
    )(graph._replace(edges=graph.edges.astype(weight_type)))
    return cast(jax.Array, updated.nodes)


class GraphConvolution(nn.Module):
    """Computes S X W + b."""

    features: int

    @nn.compact
    def __call__(self, graph: jraph.GraphsTuple) -> jax.Array:
        shape = (graph.nodes.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.glorot_uniform(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return propagate(graph._replace(nodes=graph.nodes @ kernel)) + bias


class GCN(nn.Module):
    """Stacks two graph convolutions; dropout after the first only, as in GraphFL."""

    num_classes: int
    hidden_size: int = 16
    dropout: float = 0.5
    num_hops: int = 1  # left to the model after the features were propagated once
    first_layer: str | None = "hidden"  # whose kernel multiplies the features

    @nn.compact
    def __call__(
        self,
        graph: jraph.GraphsTuple,
        is_training: bool = False,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the logits of all nodes.

        Args:
          graph: nodes S X [N, F], also as `SpreadRows`, edges S's entries [E],
            receivers ascending.
          is_training: whether to drop hidden units, by the random stream `dropout`.
          mask: [N], 0 for padding; changes nothing.

        Returns:
          [N, classes].
        """
        del mask
        glorot = nn.initializers.glorot_uniform()
        hidden = nn.Dense(self.hidden_size, kernel_init=glorot, name="hidden")
        x = graph.nodes
        x = nn.relu(hidden(x.rows if isinstance(x, SpreadRows) else x))
        x = nn.Dropout(self.dropout)(x, deterministic=not is_training)
        head = GraphConvolution(self.num_classes, name="head")
        return head(graph._replace(nodes=x))


class SGC(nn.Module):
    """Maps S^2 X linearly, without bias."""

    num_classes: int
    num_hops: int = 0  # left to the model after the features were propagated twice
    first_layer: str | None = "head"

    @nn.compact
    def __call__(
        self, graph: jraph.GraphsTuple, is_training: bool = False
    ) -> jax.Array:
        """Computes the logits of all nodes.

        Args:
          graph: nodes S^2 X [N, F]; its edges are not read.
          is_training: changes nothing.

        Returns:
          [N, classes].
        """
        del is_training
        glorot = nn.initializers.glorot_uniform()
        head = nn.Dense(
            self.num_classes, use_bias=False, kernel_init=glorot, name="head"
        )
        return head(graph.nodes)
