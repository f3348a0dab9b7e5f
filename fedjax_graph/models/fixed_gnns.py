"""The eight fixed graph networks with which FL-AGCNS is compared.

Wang et al., arXiv 2104.04141, Tables 3 and 4, which name the networks and count their
parameters. Layers, widths and activations are those of the public code of January 2021,
whose counts are the paper's, but for

- gcn: the two layers of Kipf & Welling, 0.092 million parameters on Cora; the paper's
  0.102 counts a layer from features to classes that the code makes and never uses.
- gated_graph: 0.129 on Cora, the paper has 0.130.

That code also takes a softmax before the cross-entropy of gcn, agnn and gated_graph,
and drops out nothing. The names in `VARIANTS` are other layouts of as many parameters.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jraph

from fedjax_graph.core import sparse_rows
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.spread_rows import SpreadRows
from fedjax_graph.models.convolutions import (
    APPNP,
    AGNNConv,
    ARMAConv,
    Convolution,
    GATConv,
    GatedGraphConv,
    GCNConv,
    SAGEConv,
    SGConv,
)
from fedjax_graph.models.message_passing import make_structure

Layer = Callable[..., Convolution]  # (features, name) -> module
linear = partial(SGConv, num_hops=0)  # x W + b, reads no edges


class Layout(NamedTuple):
    """Lists the layers of a network in the order in which they act."""

    outer: Layer  # from features to hidden units, and from those to classes
    head: Layer | None = None  # from hidden units to classes; None: `outer`
    hidden_size: int | None = 64  # None: `outer` goes from features to classes
    activation: Callable[[jax.Array], jax.Array] = nn.relu  # of hidden units
    inner: tuple[Layer, ...] = ()  # on hidden units
    last: tuple[Layer, ...] = ()  # on logits


PAPER_GNNS: dict[str, Layout] = {
    "gat": Layout(
        partial(GATConv, num_heads=8, concatenates=True), GATConv, activation=nn.elu
    ),
    "sage": Layout(SAGEConv, activation=nn.sigmoid),
    "gcn": Layout(GCNConv),
    "sgc": Layout(partial(SGConv, num_hops=2), hidden_size=None),
    "appnp": Layout(linear, last=(partial(APPNP, num_hops=10, teleport=0.1),)),
    "agnn": Layout(linear, hidden_size=16, inner=(AGNNConv,) * 3),
    "arma": Layout(ARMAConv, hidden_size=16, activation=lambda x: x),
    "gated_graph": Layout(
        linear, inner=(partial(GatedGraphConv, num_steps=3, num_kernels=3),)
    ),
}
VARIANTS: dict[str, Layout] = {
    "gat_one_head": Layout(GATConv, activation=nn.elu),
    "sage_relu": Layout(SAGEConv),
    "agnn_two_layers": Layout(linear, hidden_size=16, inner=(AGNNConv,) * 2),
    "arma_one_stack": Layout(
        partial(ARMAConv, num_stacks=1, activation=lambda x: x), hidden_size=32
    ),
}
FIXED_GNNS = PAPER_GNNS | VARIANTS


class FixedGNN(nn.Module):
    """Classifies nodes by one of the networks in `FIXED_GNNS`.

    Dropout is of the features, unless `drops_features` is False, and of what the last
    layer with a kernel reads, once where that is the same.
    """

    op: str
    num_classes: int
    hidden_size: int | None = None  # None: the layout's
    dropout: float = 0.0
    drops_features: bool = True
    reads_masked_rows: ClassVar[bool] = True  # of features, which it multiplies first

    @nn.compact
    def __call__(
        self,
        graph: jraph.GraphsTuple,
        mask: jax.Array | None = None,
        is_training: bool = False,
    ) -> jax.Array:
        """Computes the logits of all nodes.

        Args:
          graph: nodes [N, F], edge weights [E] or None; see `models.convolutions`, also
            on padding. They may be `SparseRows` or `MaskedRows`, and of gcn without
            dropout of features `SpreadRows`.
          mask: [N], 0 for padding; changes nothing, as none of them has batch
            statistics.
          is_training: whether to drop units, by the random stream `dropout`.

        Returns:
          [N, classes].

        Raises:
          InputError: if there is no such network, or it has no hidden units for
            `hidden_size`, the edges are no weights, or it cannot read `SpreadRows`.
        """
        layout = find_layout(self.op)
        hidden_size = layout.hidden_size
        if self.hidden_size is not None:
            if hidden_size is None:
                raise InputError(
                    f"{self.op} has no hidden units: expected hidden_size None, got "
                    f"{self.hidden_size}"
                )
            hidden_size = self.hidden_size
        structure = make_structure(graph, mask)

        def drop(x):
            layer = nn.Dropout(self.dropout, deterministic=not is_training)
            return sparse_rows.map_entries(layer, x)

        def run(layers, name, x):
            for i, layer in enumerate(layers, 1):
                x = layer(x.shape[-1], name=f"{name}_{i}").convolve(x, structure)
            return x

        drops = self.drops_features and self.dropout > 0
        if isinstance(graph.nodes, SpreadRows) and (drops or layout.outer != GCNConv):
            raise InputError(
                "features are spread over neighbours already, which only a GCN that "
                "drops none of them reads; give it the features themselves"
            )
        x = drop(graph.nodes) if drops else graph.nodes
        if hidden_size is not None:
            first = layout.outer(hidden_size, name="hidden")
            x = layout.activation(first.convolve(x, structure))
            x = drop(run(layout.inner, "inner", x))
        head = layout.head or layout.outer
        x = head(self.num_classes, name="head").convolve(x, structure)
        return run(layout.last, "last", x)


def find_layout(op: str) -> Layout:
    """Looks up the layout of a network.

    Raises:
      InputError: if there is no such network.
    """
    if op not in FIXED_GNNS:
        raise InputError(f"unknown GNN {op!r}; known: {', '.join(FIXED_GNNS)}")
    return FIXED_GNNS[op]
