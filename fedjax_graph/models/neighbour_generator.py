"""NeighGen: how many neighbours a node misses, and what their features are.

Zhang, Yang, Li, Sun, Yiu, "Subgraph Federated Learning with Missing Neighbor
Generation", NeurIPS 2021, Section 4.1. Widths are those of the released code.
"""

import dataclasses
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph

from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.masked_rows import linear_of_marked, map_marked
from fedjax_graph.models.convolutions import SAGEConv
from fedjax_graph.models.linear import Linear
from fedjax_graph.models.message_passing import make_structure
from fedjax_graph.models.supernet import empty_graph

GENERATES = ("first", "second", "features")  # layers that make features


@dataclasses.dataclass(frozen=True)
class GeneratorConfig(Checked):
    """Sizes of a generator of neighbours."""

    num_places: int = limited(5, lower=1)  # most neighbours of a node, P
    hidden_size: int = limited(64, lower=1)  # of the encoder
    latent_size: int = limited(128, lower=1)
    layer_sizes: tuple[int, int] = limited((256, 2048), lower=1)
    noise: float = limited(1.0, lower=0)

    def build(self, num_features: int, dropout: float = 0.0) -> "NeighbourGenerator":
        """The network, for nodes with so many features."""
        sizes = dataclasses.asdict(self)
        return NeighbourGenerator(num_features, dropout=dropout, **sizes)


class NeighbourGenerator(nn.Module):
    """Encodes nodes by two layers of GraphSAGE, and generates P neighbours of each."""

    num_features: int
    num_places: int  # P
    hidden_size: int
    latent_size: int
    layer_sizes: tuple[int, int]
    dropout: float
    noise: float  # standard deviation, added to what features are made of

    def setup(self) -> None:
        first, second = self.layer_sizes
        self.hidden = SAGEConv(self.hidden_size)
        self.encoder = SAGEConv(self.latent_size)
        self.degree = Linear(self.latent_size, 1)
        self.first = Linear(self.latent_size, first)
        self.second = Linear(first, second)
        self.features = Linear(second, self.num_places * self.num_features)
        self.drop = nn.Dropout(self.dropout)

    def __call__(self, graph: jraph.GraphsTuple) -> tuple[jax.Array, jax.Array]:
        """Encodes and generates; see `encode` and `generate`."""
        return self.generate(self.encode(graph))

    def encode(self, graph: jraph.GraphsTuple, is_training: bool = False) -> jax.Array:
        """Encodes nodes [N, F] as [N, latent_size]."""
        structure = make_structure(graph, None)
        x = nn.relu(self.hidden.convolve(graph.nodes, structure))
        x = self.drop(x, deterministic=not is_training)
        return self.encoder.convolve(x, structure)

    def generate(
        self, z: jax.Array, is_training: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Generates numbers of missing neighbours [N], not rounded, and features.

        Args:
          z: [N, latent_size]; the random stream `noise` is added to it for features.
          is_training: whether to drop units, by the random stream `dropout`.

        Returns:
          Numbers [N], none negative, and features [N, P, F] in (-1, 1), 0 for places
          of a node that its number, rounded down, leaves empty.
        """
        counts = nn.relu(self.degree(z))[:, 0]
        noise = jax.random.normal(self.make_rng("noise"), z.shape, z.dtype)
        x = nn.relu(self.first(z + self.noise * noise))
        x = self.drop(nn.relu(self.second(x)), deterministic=not is_training)
        is_filled = counts[:, None] >= jnp.arange(1, self.num_places + 1)
        weights = self.features.kernel, self.features.bias
        features = linear_of_marked(x, *weights, is_filled, most_blocks=10)
        made = features.reshape(-1, self.num_features)
        made = map_marked(lambda x, nothing: nn.tanh(x), is_filled.ravel(), made, ())
        return counts, made.reshape(features.shape)


# --- Of plain parameters --------------------------------------------------------------


def init(net: NeighbourGenerator, key: jax.Array) -> Any:
    """Draws parameters; no graph changes their shapes."""
    keys = jax.random.split(key)
    rngs = {"params": keys[0], "noise": keys[1]}
    return net.init(rngs, empty_graph(net.num_features))["params"]


def encode(
    net: NeighbourGenerator,
    params: Any,
    graph: jraph.GraphsTuple,
    key: jax.Array | None = None,
) -> jax.Array:
    """Encodes nodes; with the key of a dropout as in training."""
    rngs = {} if key is None else {"dropout": key}
    args = {"params": params}, graph, key is not None
    return cast(jax.Array, net.apply(*args, rngs=rngs, method="encode"))


def generate(
    net: NeighbourGenerator,
    params: Any,
    z: jax.Array,
    key: jax.Array,
    is_training: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Generates numbers of neighbours and features, by a key of noise and dropout."""
    noise_key, dropout_key = jax.random.split(key)
    rngs = {"noise": noise_key, "dropout": dropout_key}
    args = {"params": params}, z, is_training
    return cast(Any, net.apply(*args, rngs=rngs, method="generate"))
