"""A network that keeps features and structure apart, as FedStar's clients train it.

Tan, Liu, Long, Jiang, Lu, Zhang, "Federated Learning on Non-IID Graphs via Structural
Knowledge Sharing", AAAI 2023: graph convolutions encode the structure alone, and layers
of GIN read what these find beside the features. Ours classifies nodes: their
representations are not added up.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph

from fedjax_graph.core.errors import InputError
from fedjax_graph.core.task import layer_name
from fedjax_graph.models.convolutions import GCNConv
from fedjax_graph.models.linear import Linear
from fedjax_graph.models.message_passing import Structure, make_structure

STRUCTURE = "structure"  # what the names of the structure encoder's layers begin with


class GINLayer(nn.Module):
    """Computes MLP(x_i + sum over N(i) of x_j), with one hidden layer."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, structure: Structure) -> jax.Array:
        x = x + structure.sum(x[structure.senders])
        x = nn.relu(Linear(x.shape[-1], self.features, name="first")(x))
        return Linear(self.features, self.features, name="second")(x)


class DecoupledGIN(nn.Module):
    """Classifies nodes whose last features are encodings of structure."""

    num_classes: int
    structure_size: int  # how many of them
    hidden_size: int = 64
    num_layers: int = 2
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self,
        graph: jraph.GraphsTuple,
        mask: jax.Array | None = None,
        is_training: bool = False,
    ) -> jax.Array:
        """Computes the logits of all nodes.

        Args:
          graph: nodes [N, F + structure_size], edge weights [E] or None.
          mask: [N], 0 for padding; changes nothing.
          is_training: whether to drop units, by the random stream `dropout`.

        Returns:
          [N, classes].

        Raises:
          InputError: if no features are left beside the encodings, or there are none.
        """
        size, width = self.hidden_size, graph.nodes.shape[-1] - self.structure_size
        if self.structure_size < 1 or width < 1:
            raise InputError(
                f"structure_size={self.structure_size} of {graph.nodes.shape[-1]} "
                "features: expected at least 1, and others beside"
            )
        edges = make_structure(graph, mask)
        drop = nn.Dropout(self.dropout, deterministic=not is_training)
        x = Linear(width, size, name="input")(graph.nodes[:, :width])
        s = Linear(self.structure_size, size, name=f"{STRUCTURE}_input")(
            graph.nodes[:, width:]
        )
        for i in range(self.num_layers):
            x = GINLayer(size, name=f"layer_{i}")(jnp.concatenate([x, s], 1), edges)
            x = drop(nn.relu(x))
            s = nn.tanh(GCNConv(size, name=f"{STRUCTURE}_{i}").convolve(s, edges))
        x = Linear(2 * size, size, name="fuse")(jnp.concatenate([x, s], 1))
        x = drop(nn.relu(Linear(size, size, name="last")(x)))
        return Linear(size, self.num_classes, name="head")(x)


def in_structure_encoder(path: tuple) -> bool:
    """Tells by its path whether a leaf belongs to the structure encoder."""
    return str(layer_name(path)).startswith(STRUCTURE)
