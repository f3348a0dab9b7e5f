"""The twelve graph convolutions between which FL-AGCNS searches.

Each maps a `jraph.GraphsTuple` to new node features [N, features]:

- nodes [N, F]. Messages flow from senders to receivers. An undirected edge is stored
  both ways; self edges are left out, and added by the convolutions that define them.
- edges [E], weights that are not negative, or None for ones. An edge of weight w counts
  as w edges; one of weight 0 does nothing, wherever it points.

A padded graph has no other edges between its padding and the rest. Features of padding
nodes must be finite; their outputs are finite and mean nothing.

N(i) are the senders of node i, N+(i) those and i itself, d_i is the size of N(i). S is
the symmetrically normalised adjacency matrix with self edges, S_0 the one without.
Products with a kernel are taken on nodes, not on edges.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from fedjax_graph.core import arrays
from fedjax_graph.core.checks import limited, limits
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.spread_rows import SpreadRows
from fedjax_graph.models.gru import GRUCell, gru_step
from fedjax_graph.models.linear import Linear, fan_in_uniform
from fedjax_graph.models.message_passing import (
    Structure,
    make_structure,
    repeat,
    spread_and_project,
    spread_and_project_all,
)
from fedjax_graph.models.normalization import BatchNorm, unit_rows
from fedjax_graph.models.settings import CheckedModule

LEAKY_SLOPE = 0.2
MESSAGE_FLOOR = 1e-7  # of GENConv
SQUARED_NORM_FLOOR = 1e-24  # below, a row has no direction
VARIANCE_FLOOR = 1e-15  # of GMMConv's kernels

glorot = nn.initializers.glorot_uniform()
stacked_glorot = nn.initializers.glorot_uniform(in_axis=0, out_axis=2, batch_axis=1)
glorot_of_heads = nn.initializers.glorot_uniform(in_axis=1, out_axis=(0, 2))
glorot_of_scores = nn.initializers.glorot_uniform(1, 0, batch_axis=2)
zeros = nn.initializers.zeros


class Convolution(CheckedModule):
    """Gives all twelve convolutions their interface and their parameters."""

    features: int = dataclasses.field(metadata=limits(lower=1))

    def __call__(
        self, graph: jraph.GraphsTuple, mask: jax.Array | None = None
    ) -> jax.Array:
        """Convolves the nodes' features.

        Args:
          graph: nodes [N, F] and edge weights [E] or None.
          mask: [N], 0 for padding, for GINConv and GENConv to normalise by the
            statistics of the other nodes (`batch_stats` must be mutable). None: they
            normalise by the running statistics.

        Returns:
          [N, features].

        Raises:
          InputError: if the edges are no weights, or the nodes do not have as many
            features as the convolution needs.
        """
        return self.convolve(graph.nodes, make_structure(graph, mask))

    def convolve(self, x: jax.Array, structure: Structure) -> jax.Array:
        """Convolves features [N, F] -> [N, features] on a structure made before."""
        raise NotImplementedError

    def bias(self, init=zeros) -> jax.Array:
        """Declares the bias [features]."""
        return self.param("bias", init, (self.features,))

    def kernel(self, x: jax.Array, init=glorot, name: str = "kernel") -> jax.Array:
        """Declares a kernel [F, features]."""
        return self.param(name, init, (x.shape[-1], self.features))

    def stacked_kernel(
        self, x: jax.Array, size: int, name: str = "kernel"
    ) -> jax.Array:
        """Declares a stack of kernels [F, size, features]."""
        return self.param(name, stacked_glorot, (x.shape[-1], size, self.features))

    def normalise(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Normalises [N, F] as a batch; nodes are images of one pixel."""
        return BatchNorm(name="norm")(x[:, None, None], mask)[:, 0, 0]

    def require_own_size(self, x: jax.Array) -> None:
        """Checks that the features are as many as the convolution's own."""
        if x.shape[-1] != self.features:
            raise InputError(
                f"{type(self).__name__} keeps the number of features: expected "
                f"{self.features}, got {x.shape[-1]}; project the nodes first"
            )


class GATConv(Convolution):
    """Computes z = x W, then the sum over N+(i) of a_ij z_j + b.

    Veličković et al., "Graph Attention Networks", ICLR 2018, Eqs. 3 and 4: a_ij =
    softmax over j of LeakyReLU(s . z_j + r . z_i). Heads are averaged (Eq. 6), or
    concatenated (Eq. 5) and then share the features.
    """

    num_heads: int = limited(1, lower=1)
    concatenates: bool = False

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        if self.num_heads == 1:
            z = x @ self.kernel(x)
            scores = z @ self.param("attention", glorot, (self.features, 2))
            logits = gat_logits(structure, scores[:, :1], scores[:, 1:])
            return structure.attend(*logits, z) + self.bias()
        size = self._head_size()
        shape = (self.num_heads, x.shape[-1], size)
        kernel = self.param("kernel", glorot_of_heads, shape)
        shape = (self.num_heads, size, 2)
        attention = self.param("attention", glorot_of_scores, shape)
        flat = kernel.transpose(1, 0, 2).reshape(x.shape[-1], -1)
        z = (x @ flat).reshape(len(x), self.num_heads, size)
        sent, received = (jnp.sum(z * attention[..., i], axis=2) for i in (0, 1))
        logits = gat_logits(structure, sent, received)
        shares, own, totals = structure.attention(*logits)
        shares = (shares / totals[structure.receivers])[:, :, None]
        messages, kept = shares * z[structure.senders], (own / totals)[:, :, None] * z
        if self.concatenates:
            flat_size = (-1, self.features)
            messages, kept = messages.reshape(flat_size), kept.reshape(flat_size)
        else:  # heads are added up before nodes are
            messages, kept = jnp.mean(messages, axis=1), jnp.mean(kept, axis=1)
        summed = structure.plain_sum(messages) + kept
        return summed.astype(structure.result_type(z, sent)) + self.bias()

    def _head_size(self) -> int:
        """Features of one of several heads."""
        if not self.concatenates:
            return self.features
        if self.features % self.num_heads:
            raise InputError(
                f"GATConv: {self.features} features of {self.num_heads} heads side by "
                "side: expected a multiple"
            )
        return self.features // self.num_heads


def gat_logits(
    structure: Structure, sent: jax.Array, received: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes a GAT's logits of edges [E, H] and of nodes themselves [N, H].

    Args:
      structure: of the graph.
      sent: s . z_j of all nodes and heads [N, H].
      received: r . z_i, [N, H].
    """
    logits = sent[structure.senders] + received[structure.receivers]
    return (
        nn.leaky_relu(logits, LEAKY_SLOPE),
        nn.leaky_relu(sent + received, LEAKY_SLOPE),
    )


class GINConv(Convolution):
    """Computes MLP((1 + eps) x_i + sum over N(i) of x_j), eps trained.

    Xu et al., "How Powerful are Graph Neural Networks?", ICLR 2019, Eq. 4.1. The MLP is
    Linear, BatchNorm, ReLU, Linear.
    """

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        epsilon = self.param("epsilon", zeros, ())
        init = fan_in_uniform(x.shape[-1])
        summed = spread_and_project(
            lambda h: (1 + epsilon) * h + structure.sum(h[structure.senders]),
            x,
            self.kernel(x, init),
        )
        hidden = self.normalise(summed + self.bias(init), structure.mask)
        return Linear(self.features, self.features, name="last")(nn.relu(hidden))


class SAGEConv(Convolution):
    """Computes (mean over N(i) of x_j) W + x_i U + b.

    Hamilton, Ying, Leskovec, "Inductive Representation Learning on Large Graphs", NIPS
    2017, Algorithm 1 with the mean aggregator, before the nonlinearity and without the
    L2 normalisation.
    """

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        init = fan_in_uniform(x.shape[-1])
        mean = spread_and_project(
            lambda h: structure.mean(h[structure.senders]), x, self.kernel(x, init)
        )
        root = x @ self.kernel(x, init, "root_kernel")
        return mean + root + self.bias(init)


class GCNConv(Convolution):
    """Computes S x W + b, also of `SpreadRows`, which hold S x.

    Kipf, Welling, "Semi-Supervised Classification with Graph Convolutional Networks",
    ICLR 2017, Eq. 2.
    """

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        kernel = self.kernel(x)
        if isinstance(x, SpreadRows):
            return x.rows @ kernel + self.bias()
        return spread_and_project(structure.normalised_sum, x, kernel) + self.bias()


class SGConv(Convolution):
    """Computes S^K x W + b.

    Wu et al., "Simplifying Graph Convolutional Networks", ICML 2019, Eq. 8.
    """

    num_hops: int = limited(1, lower=0)

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        def spread(h):
            return repeat(structure.normalised_sum, h, self.num_hops)

        init = fan_in_uniform(x.shape[-1])
        kernel = self.kernel(x, init)
        return spread_and_project(spread, x, kernel) + self.bias(init)


class APPNP(Convolution):
    """Repeats z <- (1 - alpha) S z + alpha x from z = x on, K times.

    Gasteiger, Bojchevski, Günnemann, "Predict then Propagate: Graph Neural Networks
    meet Personalized PageRank", ICLR 2019, Section 3. It has no parameters.
    """

    num_hops: int = limited(1, lower=0)
    teleport: float = limited(0.1, lower=0, upper=1)

    def convolve(self, x, structure) -> jax.Array:
        self.require_own_size(x)

        def hop(z):
            return (1 - self.teleport) * structure.normalised_sum(z) + self.teleport * x

        return repeat(hop, x, self.num_hops)


class AGNNConv(Convolution):
    """Sums p_ij x_j over N+(i), p_ij = softmax over j of beta cos(x_i, x_j).

    Thekumparampil, Wang, Oh, Li, "Attention-based Graph Neural Network for
    Semi-supervised Learning", 2018, Section 4. The cosine with a row of zeros is 0.
    """

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        self.require_own_size(x)
        beta = self.param("beta", nn.initializers.ones, ())
        squares = jnp.sum(arrays.precise(x) ** 2, axis=1, keepdims=True)
        has_direction = squares > SQUARED_NORM_FLOOR
        unit = unit_rows(jnp.where(has_direction, x, 0))
        cosines = jnp.sum(
            unit[structure.senders] * unit[structure.receivers], axis=1, keepdims=True
        )
        self_cosines = jnp.sum(unit**2, axis=1, keepdims=True)
        return structure.attend(beta * cosines, beta * self_cosines, x)


class ARMAConv(Convolution):
    """Averages ReLU(S_0 x W_k + x V_k + b_k) over stacks k.

    Bianchi, Grattarola, Livi, Alippi, "Graph Neural Networks with Convolutional ARMA
    Filters", TPAMI 2021, Section 3, one recursion.
    """

    num_stacks: int = limited(2, lower=1)
    activation: Callable[[jax.Array], jax.Array] = nn.relu  # instead of ReLU

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        kernel = self.stacked_kernel(x, self.num_stacks)
        root_kernel = self.stacked_kernel(x, self.num_stacks, "root_kernel")
        flat_size = (x.shape[-1], self.num_stacks * self.features)
        summed = spread_and_project(
            lambda h: structure.normalised_sum(h, self_weight=0),
            x,
            kernel.reshape(flat_size),
        ) + x @ root_kernel.reshape(flat_size)
        bias = self.param("bias", zeros, (self.num_stacks, self.features))
        stacks = self.activation(summed.reshape(-1, *bias.shape) + bias)
        return jnp.mean(stacks, axis=1)


class FeaStConv(Convolution):
    """Averages over N+(i) the sum over heads m of q_m(x_i, x_j) x_j W_m; adds b.

    Verma, Boyer, Verbeek, "FeaStNet: Feature-Steered Graph Convolutions for 3D Shape
    Analysis", CVPR 2018, Section 3, the translation-invariant form: q = softmax over m
    of u_m . (x_j - x_i) + c_m.
    """

    num_heads: int = limited(2, lower=1)

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        size = (x.shape[-1], self.num_heads)
        scores = x @ self.param("steering_kernel", glorot, size)
        offset = self.param("offset", nn.initializers.normal(0.1), (self.num_heads,))
        kernel = self.stacked_kernel(x, self.num_heads)
        differences = scores[structure.senders] - scores[structure.receivers]
        shares, own = nn.softmax(differences + offset), nn.softmax(offset)
        counts = (structure.degrees + 1)[:, None]

        def spread(m, h):
            summed = structure.sum(shares[:, m, None] * h[structure.senders])
            mean = (summed + own[m] * h) / counts
            return mean.astype(structure.result_type(h, scores))

        return spread_and_project_all(spread, x, kernel) + self.bias()


class GENConv(Convolution):
    """Computes MLP(x_i + sum over N(i) of p_ij m_j), m_j = ReLU(x_j) + 1e-7.

    Li, Xiong, Thabet, Ghanem, "DeeperGCN: All You Need to Train Deeper GCNs", 2020,
    Section 3, softmax aggregation of inverse temperature 1: p_ij = softmax over j of
    m_j, in every channel. The MLP is Linear, BatchNorm, ReLU, Linear of hidden size 2
    features.
    """

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        messages = nn.relu(x) + MESSAGE_FLOOR
        h = x + structure.attend(messages[structure.senders], -jnp.inf, messages)
        input_size, hidden_size = x.shape[-1], 2 * self.features
        init = fan_in_uniform(input_size)
        kernel = self.param("kernel", init, (input_size, hidden_size))
        hidden = nn.relu(self.normalise(h @ kernel, structure.mask))
        return hidden @ self.kernel(hidden, fan_in_uniform(hidden_size), "last_kernel")


class GMMConv(Convolution):
    """Averages over N(i) the sum over kernels k of w_k(u_ij) x_j G_k; adds x_i R + b.

    Monti et al., "Geometric Deep Learning on Graphs and Manifolds Using Mixture Model
    CNNs", CVPR 2017, Eqs. 9 to 11 with diagonal covariances and a root weight: w_k(u) =
    exp(-1/2 sum over d of (u_d - mu_kd)^2 / sigma_kd^2). The pseudo-coordinates u_ij
    are (d_j + 1)^-1/2 and (d_i + 1)^-1/2, so w_k is a product of a factor of node j
    and one of node i, and both act on nodes.
    """

    num_kernels: int = limited(4, lower=1)

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        size = (self.num_kernels, 2)
        means = self.param("means", glorot, size)
        deviations = self.param("deviations", nn.initializers.ones, size)
        coordinates = jax.lax.rsqrt(structure.degrees + 1)[:, None, None]
        squares = (coordinates - means) ** 2 / (deviations**2 + VARIANCE_FLOOR)
        densities = jnp.exp(-squares / 2)  # [N, K, 2], as sender and as receiver
        densities = densities.astype(structure.result_type(means))
        kernel = self.stacked_kernel(x, self.num_kernels)

        def spread(k, h):
            as_sender, as_receiver = densities[:, k, :1], densities[:, k, 1:]
            return as_receiver * structure.mean((as_sender * h)[structure.senders])

        root = x @ self.kernel(x, name="root_kernel")
        return spread_and_project_all(spread, x, kernel) + root + self.bias()


class GatedGraphConv(Convolution):
    """Takes L steps h <- GRU(sum over N(i) of h_j W, state h_i), from h = [x, 0].

    Li, Tarlow, Brockschmidt, Zemel, "Gated Graph Sequence Neural Networks", ICLR 2016,
    Eqs. 1 to 6, one edge type.
    """

    num_steps: int = limited(1, lower=1)
    num_kernels: int = limited(1, lower=1)  # W of the steps in turn

    @nn.compact
    def convolve(self, x, structure) -> jax.Array:
        missing = self.features - x.shape[-1]
        if missing < 0:
            raise InputError(
                f"GatedGraphConv: expected nodes of at most {self.features} features, "
                f"got {x.shape[-1]}; project the nodes first"
            )
        state = jnp.pad(x, ((0, 0), (0, missing)))
        init = fan_in_uniform(self.features)
        kernels = [self.kernel(state, init)]
        for i in range(1, self.num_kernels):
            kernels.append(self.kernel(state, init, f"kernel_{i + 1}"))
        state = state.astype(structure.result_type(state, kernels[0]))
        weights = GRUCell(self.features, self.features, name="gru").weights

        def step(state, kernel):
            received = structure.sum(state[structure.senders]) @ kernel
            projected = received @ weights.input_kernel + weights.input_bias
            return gru_step(weights, state, projected), None

        if self.num_steps == 1:
            return step(state, kernels[0])[0]
        turns = np.arange(self.num_steps) % self.num_kernels
        state, _ = jax.lax.scan(step, state, jnp.stack(kernels)[turns])
        return state


CONVOLUTIONS: dict[str, type[Convolution]] = {
    convolution.__name__: convolution
    for convolution in (
        *(GATConv, GINConv, SAGEConv, GCNConv, SGConv, APPNP),
        *(AGNNConv, ARMAConv, FeaStConv, GENConv, GMMConv, GatedGraphConv),
    )
}

OF_THE_PAPER: dict[str, Callable[..., Convolution]] = CONVOLUTIONS | {
    "GATConv": partial(GATConv, num_heads=6),
    "SGConv": partial(SGConv, num_hops=2),
    "APPNP": partial(APPNP, num_hops=10),
    "GatedGraphConv": partial(GatedGraphConv, num_steps=3, num_kernels=3),
}
"""The convolutions between which the paper's space chooses: (features, name) ->."""
