"""The two networks of AdaFGL's second phase, one for homophily and one for its lack.

Li, Wu, Zhang, Sun, Li, Wang, "AdaFGL: A New Paradigm for Federated Node Classification
with Topology Heterogeneity", ICDE 2024. P [N, C] are the probabilities that a model
trained by all clients gives the nodes of one, q = softmax(P) row by row, and

    R_ij = q_i . q_j / (|q_i| |q_j|), 0 for i = j,  U_ij = [R_ij > 0.999]  (1)
    T = alpha A + (1 - alpha) U,  S = D^-1/2 (T + I) D^-1/2                (2)

    loss = CE(smooth) + |smooth - P|^2 / (N C)
         + CE(own) + CE(spread) + CE(signed)                               (3)
    y = w (softmax(smooth) + softmax(P)) / 2
      + (1 - w) (softmax(own) + softmax(spread) + softmax(signed)) / 3     (4)

w is the homophily of the client's graph, the share of right answers of label
propagation from half of its training nodes, drawn at random, on the other half:

    Y <- (S_A Y + Y_0) / 2, and + Y_0 at the first half; 10 times          (5)

S_A is the normalised adjacency with self edges; Y_0 are labels there, else 1 / C.

Networks read X~ = [X, S X, ..., S^k X] or X. As the first layer is linear, X W_j is
computed before S acts on it, and X~ is never there.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_graph.core import arrays
from fedjax_graph.core.masks import lowest, masked_mean
from fedjax_graph.core.sparse_rows import SparseRows
from fedjax_graph.models.message_passing import Structure

ALIKE = 0.999  # R_ij of two nodes that U joins
FIRST_SLOPE = 0.25  # of PReLU
PROPAGATION_STEPS = 10  # of Eq. 5
_he = nn.initializers.variance_scaling(2.0, "fan_avg", "uniform")


class Predictions(NamedTuple):
    """Logits [N, C] of one client's nodes."""

    smooth: jax.Array  # of the network for homophily, from X~
    own: jax.Array  # of the other: from X,
    spread: jax.Array  # from X~,
    signed: jax.Array  # and with messages of both signs


def likeness(logits: jax.Array) -> jax.Array:
    """R of Eq. 1 with q = softmax(logits [N, C]): [N, N], in at least float32."""
    shares = nn.softmax(arrays.precise(logits))
    shares = shares / jnp.linalg.norm(shares, axis=1, keepdims=True)
    with jax.default_matmul_precision("highest"):  # as it is compared with ALIKE
        products = shares @ shares.T
    return products * (1 - jnp.eye(len(shares), dtype=shares.dtype))


def propagation(
    structure: Structure, probabilities: jax.Array, is_real: jax.Array, alpha: float
) -> Callable[[jax.Array], jax.Array]:
    """S of Eq. 2 as a function of [N, F], from P [N, C] and the mask of nodes [N].

    As U is dense, so is T: a product with it costs less than sums over edges beside it.
    """
    is_pair = is_real[:, None] * is_real
    alike = (likeness(probabilities) > ALIKE) * is_pair
    num_alike = jnp.sum(arrays.precise(alike), axis=1)
    degrees = alpha * structure.degrees + (1 - alpha) * num_alike
    scale = jax.lax.rsqrt(1 + degrees)[:, None]
    joined = (1 - alpha) * arrays.precise(alike)  # T
    edges = structure.receivers, structure.senders
    joined = joined.at[edges].add(alpha * structure.weights)

    def spread(x):
        scaled = scale * x
        sums = joined @ scaled + scaled
        return (scale * sums).astype(structure.result_type(x, alike))

    return spread


class AdaptivePropagation(nn.Module):
    """Predicts the nodes of one client by both networks."""

    num_classes: int
    hidden_size: int = 64
    num_hops: int = 3  # k of X~
    dropout: float = 0.5
    alpha: float = 0.5  # of Eq. 2

    @nn.compact
    def __call__(
        self,
        x: jax.Array | SparseRows,
        structure: Structure,
        probabilities: jax.Array,
        is_real: jax.Array,
        is_training: bool = False,
    ) -> Predictions:
        """Computes all four predictions.

        Args:
          x: features X [N, F].
          structure: of the client's graph.
          probabilities: P [N, C].
          is_real: [N], 0 for padding.
          is_training: whether to drop hidden units, by the random stream `dropout`.
        """
        spread = propagation(structure, probabilities, is_real, self.alpha)

        def slope(name):
            return self.param(name, nn.initializers.constant(FIRST_SLOPE), ())

        def mlp(name, num_layers, num_hops, slope):
            return self._mlp(name, num_layers, num_hops, slope, x, spread, is_training)

        shared = slope("hete_slope")
        smooth = mlp("homo", 2, self.num_hops, slope("homo_slope"))
        own = mlp("own", 3, 0, shared)
        spread_out = mlp("spread", 3, self.num_hops, shared)
        signs = slope("signed_slope")
        embedded = mlp("signed", 3, self.num_hops, signs)
        return Predictions(smooth, own, spread_out, signed(embedded, signs, is_real))

    def _mlp(self, name, num_layers, num_hops, slope, x, spread, is_training):
        sizes = [self.hidden_size] * (num_layers - 1) + [self.num_classes]
        for i, size in enumerate(sizes):
            kernel_name, rows = f"{name}_kernel_{i}", x.shape[-1]
            if i == 0:
                shape = ((num_hops + 1) * rows, size)  # of X~
                kernel = self.param(kernel_name, _he, shape)
                parts = [x @ part for part in jnp.split(kernel, num_hops + 1)]
                x = parts.pop()
                while parts:
                    x = spread(x) + parts.pop()
            else:
                x = x @ self.param(kernel_name, _he, (rows, size))
            x = x + self.param(f"{name}_bias_{i}", nn.initializers.zeros, (size,))
            if i + 1 < num_layers:
                x = prelu(x, slope)
                x = nn.Dropout(self.dropout)(x, deterministic=not is_training)
        return x


def prelu(x: jax.Array, slope: jax.Array) -> jax.Array:
    """x where it is positive, else slope x."""
    return jnp.where(x > 0, x, slope * x)


def signed(embedded: jax.Array, slope: jax.Array, is_real: jax.Array) -> jax.Array:
    """Messages H' of both signs between nodes that are alike or unlike by H [N, C].

    H' = (softmax(f(M) H) - softmax(f(-M) H) + H) / 2, f a PReLU, M = R(H) + I with
    entries above the mean r of R as (R - r) / (max R - r), and others as -R / r.
    """
    is_pair = arrays.precise(is_real[:, None] * is_real)
    alike = likeness(embedded) * is_pair
    mean = jnp.sum(alike) / jnp.maximum(jnp.sum(is_pair), 1)
    spread = jnp.max(alike) - mean
    above = (alike - mean) / jnp.where(spread > 0, spread, 1)
    below = -alike / jnp.where(mean > 0, mean, 1)
    eye = jnp.eye(len(alike), dtype=alike.dtype)
    weights = (jnp.where(alike > mean, above, below) + eye) * is_pair
    plus, minus = (
        nn.softmax(prelu(sign * weights, slope) @ embedded) for sign in (1, -1)
    )
    found = (plus - minus + embedded) / 2
    return found.astype(jnp.result_type(embedded, slope, is_real))


def distance(
    found: Predictions, probabilities: jax.Array, is_real: jax.Array
) -> jax.Array:
    """|smooth - P|^2 / (N C) of Eq. 3, over the real nodes: []."""
    return masked_mean(jnp.mean((found.smooth - probabilities) ** 2, axis=1), is_real)


def mixed(
    found: Predictions, probabilities: jax.Array, homophily: jax.Array
) -> jax.Array:
    """Logarithms of Eq. 4 with homophily w []: [N, C]."""
    smooth, *others = map(nn.log_softmax, found)
    logs = jnp.stack([smooth, nn.log_softmax(probabilities), *others])
    rest = (1 - homophily) / 3
    shares = jnp.stack([homophily / 2, homophily / 2, rest, rest, rest])
    return jax.nn.logsumexp(logs, axis=0, b=shares[:, None, None])


def homophily(
    structure: Structure,
    labels: jax.Array,
    is_trained: jax.Array,
    num_classes: int,
    key: jax.Array,
) -> jax.Array:
    """w of Eq. 5, []; 0 without nodes to spread from or to judge by.

    Args:
      structure: of the graph.
      labels: [N].
      is_trained: [N], whose labels are known.
      num_classes: C.
      key: of the draw of the first half.
    """
    draws = jax.random.uniform(key, labels.shape)
    number = jnp.sum(arrays.precise(is_trained)) // 2
    is_first = lowest(draws, is_trained > 0, number)[:, None]
    known = jax.nn.one_hot(labels, num_classes)
    first = jnp.where(is_first, known, 1 / num_classes)
    spread = first
    for _ in range(PROPAGATION_STEPS):
        spread = (structure.normalised_sum(spread) + first) / 2
        spread = spread + is_first * first
    is_right = jnp.argmax(spread, axis=1) == labels
    return masked_mean(is_right, is_trained * ~is_first[:, 0]) * jnp.any(is_first)
