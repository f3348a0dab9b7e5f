"""The graph of clients learnt from the distances of their models (SFL*).

Chen, Long, Wu, Zhou, Jiang, "Personalized Federated Learning With Graph", IJCAI 2022,
Algorithm 1, line 15. What the paper leaves open is the released code's: a graph
constructor with two embeddings and two linear maps, drawn anew at every aggregation,
trained so that its rows match those of the distances. So far clients get strong edges,
and an edge is one-way by construction. `target="similarity"` is ours: near clients get
strong edges, both ways, and the constructor is trained to convergence.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import graphs, mesh, sharding
from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.local import local_update
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.models.linear import fan_in_uniform
from fedjax_graph.models.normalization import unit_rows

MOST_CHUNK_BYTES = 256 * 2**20
TRAINING = {  # of a constructor for each target: optimizer and number of epochs
    "distance": (OptimizerConfig("sgd", 0.01, weight_decay=1e-4), 10),
    "similarity": (OptimizerConfig("adam", 0.03, epsilon=1e-4), 300),
}


@dataclasses.dataclass(frozen=True)
class StructureConfig(Checked):
    """Hyper-parameters of the graph constructor; the defaults are the released code's.

    But that code compares the whole state. The optimizer belongs to the target, see
    TRAINING.
    """

    target: Literal["distance", "similarity"] = "distance"
    compares: Literal["params", "state"] = "params"  # or batch statistics as well
    embedding_size: int = limited(40, lower=1)
    saturation: float = limited(3.0, above=0)  # the factor before each tanh
    num_neighbours: int = limited(30, lower=1)  # entries of a row that are kept


class GraphConstructor(NamedTuple):
    """Parameters; the two halves see the sender and the receiver of an edge."""

    embedding_1: jax.Array  # [C, D]
    embedding_2: jax.Array  # [C, D]
    kernel_1: jax.Array  # [D, D], input first
    bias_1: jax.Array  # [D]
    kernel_2: jax.Array  # [D, D]
    bias_2: jax.Array  # [D]


def init_constructor(
    key: jax.Array, client_ids: jax.Array, size: int
) -> GraphConstructor:
    """Normal embeddings, each from its client's identity; uniform linear maps."""
    keys = jax.random.split(key, 6)
    uniform = fan_in_uniform(size)

    def embedding(key):
        own = jax.vmap(jax.random.fold_in, (None, 0))(key, client_ids)
        return jax.vmap(lambda key: jax.random.normal(key, (size,)))(own)

    return GraphConstructor(
        embedding(keys[0]),
        embedding(keys[1]),
        uniform(keys[2], (size, size)),
        uniform(keys[3], (size,)),
        uniform(keys[4], (size, size)),
        uniform(keys[5], (size,)),
    )


def edge_scores(
    constructor: GraphConstructor, saturation: float = 3.0, is_mutual: bool = False
) -> jax.Array:
    """M1 M2' - M2 M1' with M = tanh(s (E W + b)), [C, C].

    Args:
      constructor: parameters.
      saturation: s.
      is_mutual: whether edges go both ways, (M1 M2' + M2 M1') / D, which unlike the
        difference over all D features does not saturate, so that it can be trained.
    """
    first, second = (
        jnp.tanh(saturation * (embedding @ kernel + bias))
        for embedding, kernel, bias in (
            (constructor.embedding_1, constructor.kernel_1, constructor.bias_1),
            (constructor.embedding_2, constructor.kernel_2, constructor.bias_2),
        )
    )
    scores = first @ second.T
    mutual, one_way = (scores + scores.T) / first.shape[1], scores - scores.T
    return mutual if is_mutual else one_way


def construct(
    constructor: GraphConstructor, saturation: float = 3.0, is_mutual: bool = False
) -> jax.Array:
    """A = relu(tanh(s scores)), [C, C]; arguments as for `edge_scores`.

    Wu, Pan, Long, Jiang, Chang, Zhang, "Connecting the Dots: Multivariate Time Series
    Forecasting with Graph Neural Networks", KDD 2020, Eqs. 3 to 5. Mutual edges are
    sigmoid(s scores): a ReLU would leave those that start below 0 there.
    """
    scores = saturation * edge_scores(constructor, saturation, is_mutual)
    return jax.nn.sigmoid(scores) if is_mutual else jax.nn.relu(jnp.tanh(scores))


def structure_loss(
    adjacency: jax.Array, target: jax.Array, num_pairs: jax.Array | int
) -> jax.Array:
    """Mean squared error between the two matrices, their rows of unit norm."""
    return jnp.sum((unit_rows(adjacency) - unit_rows(target)) ** 2) / num_pairs


def squared_distances(
    stacked: Any,
    is_real: jax.Array | None = None,
    most_bytes: int = MOST_CHUNK_BYTES,
) -> jax.Array:
    """Squared Euclidean distances between the rows of a pytree of [C, ...]: [C, C].

    One product V V' summed over chunks of the parameters, each centred first so that
    little is lost to cancellation; besides the result only a chunk is held.

    Args:
      stacked: pytree of [C, ...].
      is_real: [C] bool, whose distances are wanted; by default all.
      most_bytes: of a chunk.
    """
    leaves = [x.reshape(len(x), -1) for x in jax.tree.leaves(stacked)]
    num_rows = len(leaves[0])
    columns = max(1, most_bytes // (4 * num_rows))
    counted = jnp.ones(num_rows) if is_real is None else is_real.astype(jnp.float32)
    shares = counted / jnp.maximum(jnp.sum(counted), 1)
    of_columns = sharding.sum_columns(functools.partial(_products, columns))
    total = sum(of_columns(x, counted, shares) for x in leaves)
    norms = jnp.diagonal(total)
    squares = jnp.maximum(norms[:, None] + norms[None] - 2 * total, 0)
    return squares * (1 - jnp.eye(num_rows))


def _products(
    columns: int, x: jax.Array, counted: jax.Array, shares: jax.Array
) -> jax.Array:
    """Inner products of the centred rows [C, N], summed over chunks of columns."""

    def product(x):
        x = (x - shares @ x) * counted[:, None]
        return jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST)

    def add(i, total):
        return total + product(jax.lax.dynamic_slice_in_dim(x, i * columns, columns, 1))

    total = mesh.varying(jnp.zeros((len(x), len(x))))
    whole, rest = divmod(x.shape[1], columns)
    if whole:
        total = jax.lax.fori_loop(0, whole, add, total)
    if rest:
        total = total + product(x[:, whole * columns :])
    return total


def similarities(squares: jax.Array, pairs: jax.Array) -> jax.Array:
    """exp(-2 (d^2 - min d^2) / std d^2): near is 1, two deviations further is 0.02.

    A kernel of the distances whose width is their own spread, since distances between
    long vectors differ by little of what they have in common.

    Args:
      squares: [C, C] squared distances.
      pairs: [C, C] bool, of two different real clients; the rest is similar to nobody.

    Returns:
      [C, C] in [0, 1].
    """
    count = jnp.maximum(jnp.sum(pairs), 1)
    mean = jnp.sum(pairs * squares) / count
    spread = jnp.sqrt(jnp.sum(pairs * (squares - mean) ** 2) / count)
    nearest = jnp.min(squares, initial=jnp.inf, where=pairs)
    gap = jnp.where(pairs, squares - nearest, 0)
    return pairs * jnp.exp(-2 * gap / jnp.where(spread > 0, spread, 1))


def learn(
    config: StructureConfig,
    stacked: Any,
    client_ids: jax.Array,
    is_real: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Learns the graph of the clients from their models.

    Args:
      config: of the constructor.
      stacked: pytree of [C, ...], the models.
      client_ids: [C] identities, from which the embeddings are drawn.
      is_real: [C] bool; the others get and give nothing.
      key: of the aggregation.

    Returns:
      [C, C] rows of sum 1, [i, j] = what client i takes from client j. A row without
      an edge becomes a self edge.
    """
    is_mutual = config.target == "similarity"
    squares = squared_distances(stacked, is_real)
    pairs = is_real[:, None] & is_real[None] & ~jnp.eye(len(squares), dtype=bool)
    target = similarities(squares, pairs) if is_mutual else jnp.sqrt(squares) * pairs
    training, num_epochs = TRAINING[config.target]

    def adjacency(constructor):
        return construct(constructor, config.saturation, is_mutual) * pairs

    def loss(constructor, _):
        return structure_loss(adjacency(constructor), target, jnp.sum(is_real) ** 2)

    train = local_update(loss, training.build(num_epochs))
    constructor = init_constructor(key, client_ids, config.embedding_size)
    constructor, _ = train(constructor, jnp.arange(num_epochs))
    scores = edge_scores(constructor, config.saturation, is_mutual)
    scores = jnp.where(pairs, scores, -jnp.inf)
    learnt = adjacency(constructor)
    return graphs.row_normalise(keep_strongest(learnt, scores, config.num_neighbours))


def keep_strongest(adjacency: jax.Array, scores: jax.Array, count: int) -> jax.Array:
    """All entries set to 0 but the `count` with the largest scores in their row.

    Scores tell apart the many entries that saturate to 1.
    """
    if count >= adjacency.shape[1]:
        return adjacency
    _, indices = jax.lax.top_k(scores, count)
    rows = jnp.arange(len(adjacency))[:, None]
    kept = jnp.zeros_like(adjacency)
    return kept.at[rows, indices].set(adjacency[rows, indices])
