"""Node classification where each client holds a whole subgraph, as in FL-AGCNS.

A client's loss is the mean over its training nodes; the federated accuracy is the sum
over clients of accuracy x share of the scored nodes (Wang et al., arXiv 2104.04141,
Section 4.1), which is the accuracy over all of them.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import optax

from fedjax_graph.core import arrays, clients
from fedjax_graph.core.algorithm import Metrics
from fedjax_graph.core.checks import Checked, limited, limits
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.graphs import one_graph
from fedjax_graph.core.local import LocalResult, Model, local_steps
from fedjax_graph.core.masked_rows import MaskedRows
from fedjax_graph.core.masks import masked_mean
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.registry import Registry
from fedjax_graph.core.sparse_rows import SparseRows
from fedjax_graph.core.task import Embedded, Task, flipped, layer_name
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.models.architecture import NUM_LAYERS, Fusion, Space
from fedjax_graph.models.decoupled import DecoupledGIN
from fedjax_graph.models.embeddings import HEADS, apply_with_embeddings
from fedjax_graph.models.fixed_gnns import FIXED_GNNS, FixedGNN
from fedjax_graph.models.gcn import GCN
from fedjax_graph.models.message_passing import Structure, make_structure
from fedjax_graph.models.protocols import SubgraphModel, built
from fedjax_graph.models.supernet import WIDTH, SuperNet, empty_graph

Fitness = Literal["loss", "accuracy"]
MONITORS: dict[str, str] = {"loss": "loss", "accuracy": "error"}
"""Fitness -> the metric of an evaluation by which the best round is chosen."""


@dataclasses.dataclass(frozen=True)
class SubgraphTask(Checked):
    """Hyper-parameters of node classification on whole subgraphs."""

    num_features: int = dataclasses.field(metadata=limits(lower=1))
    num_classes: int = dataclasses.field(metadata=limits(lower=1))
    kind: Literal["subgraphs"] = "subgraphs"
    model: str = "gcn"  # a name of MODELS
    code: tuple[int, ...] = ()
    space: Space = "paper"  # of a code
    fusion: Fusion = "all"  # of a code
    width: int = limited(WIDTH, lower=1)  # of a code
    # of a fixed network or decoupled_gin; None: its own
    hidden_size: int | None = limited(None, lower=1)
    # last features that encode structure, of decoupled_gin
    structure_size: int = limited(0, lower=0)
    dropout: float = limited(0.0, lower=0, below=1)
    drops_features: bool = True  # of a fixed network: or its hidden units alone
    # epochs: of methods that take steps at the client, each on all its training nodes
    local_steps: int = limited(1, lower=1)
    optimizer: OptimizerConfig = OptimizerConfig("sgd", 0.1)  # of those
    # every `query_every`-th training node of a client is a query node: GraphFL's
    query_every: int = limited(0, lower=0)  # 0: none
    fitness: Fitness = "loss"  # by which the best round is chosen, see MONITORS

    def __post_init__(self) -> None:
        """Checks types and limits; raises `InputError`."""
        super().__post_init__()
        if self.query_every == 1:
            raise InputError(
                "query_every=1 leaves no training node to adapt to; expected 0 for no "
                "query nodes, or 2 or more"
            )

    def module(self) -> SubgraphModel:
        """The network that clients train.

        Raises:
          InputError: if none is registered under this name, the code is not valid, or
            the network lacks what `SubgraphModel` asks for.
        """
        what = f"subgraph model {self.model!r}"
        return built(MODELS.look_up(self.model), self, SubgraphModel, what)

    def build(self) -> Task:
        """The task's functions.

        Raises:
          InputError: as `module`, or if the optimizer was to be kept by clients, which
            is for methods to do.
        """
        self.optimizer.check_begun_anew()
        module = self.module()
        loss = training_loss(module)
        halves = partial(query_halves, query_every=self.query_every)

        def train_loss(params, stats, client_data, key, data, add=None):
            del data
            return loss(params, stats, (halves(client_data)[0], key), add)

        def embed(model, client_data, data, key=None):
            del data
            return embed_nodes(module, model, halves(client_data)[0], key)

        return Task(
            init=lambda key: init(module, self.num_features, key),
            client_data=partial(fitting_rows, self),
            update=client_update(train_loss, embed, self),
            evaluate=evaluate_subgraphs(module, self.fitness),
            predict=predict_subgraphs(module),
            is_head=in_last_layer,
            train_loss=train_loss,
            update_by=lambda loss: client_update(loss, embed, self),
            logits=map_outputs(module, lambda outputs, client_data: outputs),
            query_loss=query_loss(loss, halves) if self.query_every else None,
            embed=embed,
            num_classes=self.num_classes,
            has_query=lambda data: jnp.any(halves(data)[1].is_trained > 0, axis=1),
            flip_labels=lambda own, data, is_flipped: (
                own._replace(labels=flipped(own.labels, self.num_classes, is_flipped)),
                data,
            ),
            monitor=MONITORS[self.fitness],
        )


# --- Models --------------------------------------------------------------------------


def fixed_gnn(task: SubgraphTask) -> FixedGNN:
    """A network of `models.fixed_gnns`, by the task's `model`."""
    return FixedGNN(
        task.model,
        task.num_classes,
        task.hidden_size,
        task.dropout,
        task.drops_features,
    )


def spread_gcn(task: SubgraphTask) -> GCN:
    """The GCN that reads features and edges as they are, without normalising them."""
    return GCN(task.num_classes, task.hidden_size or 64, task.dropout)


def decoupled_gin(task: SubgraphTask) -> DecoupledGIN:
    """The network of FedStar, whose last features are encodings of structure."""
    return DecoupledGIN(
        task.num_classes,
        task.structure_size,
        task.hidden_size or DecoupledGIN.hidden_size,
        dropout=task.dropout,
    )


def network_of_code(task: SubgraphTask) -> nn.Module:
    """The network of the task's `code`, cut out of a SuperNet."""
    net = SuperNet(
        task.num_features,
        task.num_classes,
        max(len(task.code) - 2, 0) or NUM_LAYERS,
        task.width,
        task.fusion,
        task.dropout,
        task.space,
    )
    return net.network(task.code)


MODELS: Registry[Callable[[SubgraphTask], SubgraphModel]] = Registry(
    "subgraph model",
    dict.fromkeys(FIXED_GNNS, fixed_gnn)
    | {
        "spread_gcn": spread_gcn,
        "decoupled_gin": decoupled_gin,
        "code": network_of_code,
    },
    is_callable=True,
)
"""Name -> factory: the task's config -> module; see `register_model`."""
OF_METHODS = ("spread_gcn", "decoupled_gin", "code")  # networks that a method brings
register_model = MODELS.registering()
"""Registers a model of one's own by a function of the task's config.

    register_model("mine", lambda task: FixedGNN("gcn", task.num_classes))

or as a decorator of that function. The module that it returns offers what
`models.protocols.SubgraphModel` asks for.
"""


def in_last_layer(path: tuple[Any, ...]) -> bool:
    """`Task.is_head`: `head` of a fixed network, `output` of a code's."""
    return layer_name(path) in HEADS


def init(module: SubgraphModel, num_features: int, key: jax.Array) -> Model:
    """Fresh parameters and running statistics; no graph changes their shapes."""
    graph = empty_graph(num_features)._replace(edges=jnp.zeros(0))
    drawn = module.init(key, graph)
    return {"batch_stats": {}} | drawn


def fitting_rows(task: SubgraphTask, data: SubgraphData) -> SubgraphData:
    """The rows of the clients, of data that the task is for.

    Raises:
      InputError: if they have another number of features, or labels that are no whole
        numbers or, where they are known, no classes of the task.
    """
    arrays.check_shape("features", data.features, (None, None, task.num_features))
    arrays.check_indices("labels", data.labels, task.num_classes, "num_classes")
    return data.by_client()


def as_graph(
    client_data: SubgraphData, module: SubgraphModel | None = None
) -> jraph.GraphsTuple:
    """The padded subgraph of ONE client.

    Masked features are made dense but for modules whose own class says
    `reads_masked_rows`: others may do anything with them.
    """
    features, ends = client_data.features, (client_data.senders, client_data.receivers)
    reads_them = vars(type(module)).get("reads_masked_rows", False)
    if isinstance(features, MaskedRows) and not reads_them:
        features = features.dense()
    return one_graph(features, *ends, client_data.edge_weights)


def random_blocks(
    key: jax.Array, num_features: int, num_blocks: int, size: int, edge_share: float
) -> SubgraphData:
    """Draws a graph of blocks with edges inside them only, and normal features.

    Args:
      key: of the draw.
      num_features: F.
      num_blocks: B, of `size` nodes each.
      size: nodes of a block, 2 or more.
      edge_share: part of a block's pairs of nodes that an edge joins, rounded up.

    Returns:
      Of one client, [1, B x size, ...]; nothing in it is trained or scored.
    """
    first, second = jnp.triu_indices(size, 1)
    num_edges = math.ceil(edge_share * len(first))
    edges_key, features_key = jax.random.split(key)

    def draw(key, block):
        chosen = jax.random.permutation(key, len(first))[:num_edges]
        return block * size + first[chosen], block * size + second[chosen]

    blocks = jnp.arange(num_blocks)
    one, other = jax.vmap(draw)(jax.random.split(edges_key, num_blocks), blocks)
    senders, receivers = jnp.append(one, other), jnp.append(other, one)
    order = jnp.argsort(receivers)
    num_nodes = num_blocks * size
    shape = (1, num_nodes)
    return SubgraphData(
        features=jax.random.normal(features_key, (1, num_nodes, num_features)),
        senders=senders[order][None],
        receivers=receivers[order][None],
        edge_weights=jnp.ones((1, len(order))),
        labels=jnp.zeros(shape, jnp.int32),
        is_real=jnp.ones(shape),
        is_trained=jnp.zeros(shape),
        is_scored=jnp.zeros(shape),
        client_ids=jnp.zeros(1, jnp.int32),
        client_weights=jnp.zeros(1),
    )


def structure_of(client_data: SubgraphData) -> Structure:
    """All of the padded subgraph of ONE client but its features."""
    return make_structure(as_graph(client_data), None)


def cross_entropy(outputs: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over marked nodes of outputs [N, classes] before a softmax; 0 of none."""
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
    return masked_mean(losses, mask)


def training_loss(module: SubgraphModel) -> Callable[..., tuple[jax.Array, Any]]:
    """Factory of the mean loss over the training nodes of ONE client.

    Returns:
      (params, batch_stats, (client_data, key), add=None) -> (loss, batch_stats); `add`
      is a term of the loss, (params, embeddings, key) -> [].
    """

    def loss(params, stats, batch, add=None):
        client_data, key = batch
        variables = {"params": params, "batch_stats": stats}
        (outputs, new), seen = forward(module, variables, client_data, key)
        value = cross_entropy(outputs, client_data.labels, client_data.is_trained)
        if add is not None:
            value += add(params, check_dense(seen), key)
        return value, new.get("batch_stats", stats)

    return loss


def forward(
    module: SubgraphModel, variables: Model, client_data: SubgraphData, key: jax.Array
) -> tuple[tuple[jax.Array, Any], Embedded]:
    """The outputs in training, with the statistics' changes, and the embeddings."""
    results, embeddings = apply_with_embeddings(
        module,
        variables,
        as_graph(client_data, module),
        mask=client_data.is_real,
        is_training=True,
        rngs={"dropout": key},
        mutable=["batch_stats"],
    )
    return results, as_embedded(embeddings, client_data)


def as_embedded(embeddings: jax.Array, client_data: SubgraphData) -> Embedded:
    """Embeddings of the nodes of ONE client, with what is known of them."""
    return Embedded(
        embeddings, client_data.labels, client_data.is_trained, client_data.is_real
    )


def embed_nodes(
    module: SubgraphModel,
    model: Model,
    client_data: SubgraphData,
    key: jax.Array | None = None,
) -> Embedded:
    """The embeddings of all nodes of ONE client; see `Task.embed`."""
    if key is not None:
        return check_dense(forward(module, model, client_data, key)[1])
    mask = scoring_mask(model, client_data)
    graph = as_graph(client_data, module)
    embeddings = apply_with_embeddings(module, model, graph, mask=mask)[1]
    return check_dense(as_embedded(embeddings, client_data))


def check_dense(seen: Embedded) -> Embedded:
    """Checks that embeddings can be computed with.

    Raises:
      InputError: if they are sparse or masked features, all that a network without
        hidden layers has.
    """
    if isinstance(seen.embeddings, SparseRows | MaskedRows):
        raise InputError(
            "a network without hidden layers, whose embeddings are the features "
            "themselves; give these dense"
        )
    return seen


def query_halves(
    client_data: SubgraphData, query_every: int
) -> tuple[SubgraphData, SubgraphData]:
    """Data that train on all but the query nodes, and data that train on these alone.

    Args:
      client_data: of one client, or of K.
      query_every: every `query_every`-th training node is a query node; 0: none.
    """
    is_trained = client_data.is_trained
    if not query_every:
        return client_data, client_data._replace(is_trained=0 * is_trained)
    rank = jnp.cumsum(is_trained, axis=-1)
    is_query = is_trained * (rank % query_every == 0)
    return (
        client_data._replace(is_trained=is_trained - is_query),
        client_data._replace(is_trained=is_query),
    )


def query_loss(loss, halves) -> Callable[..., jax.Array]:
    """Factory of `Task.query_loss`: the mean over the query nodes of ONE client."""

    def run(params, client_data, key, data):
        del data
        return loss(params, {}, (halves(client_data)[1], key))[0]

    return run


def client_update(
    loss, embed: Callable[..., Embedded], config: SubgraphTask
) -> Callable[..., LocalResult]:
    """Factory of one client's gradient steps on its subgraph.

    Args:
      loss: in the form of `Task.train_loss`, to which `update` may append a term.
      embed: see `Task.embed`.
      config: number of the steps, and their optimizer.
    """

    def update(start, client_data, key, data, adjust, num_rounds, term=None):
        del num_rounds
        terms = (
            () if term is None else (term(lambda m: embed(m, client_data, data)[0]),)
        )
        steps = local_steps(
            lambda params, stats, key: loss(
                params, stats, client_data, key, data, *terms
            ),
            config.optimizer.build(config.local_steps),
            adjust=adjust,
        )
        return steps(start, jax.random.split(key, config.local_steps))

    return update


# --- Scores --------------------------------------------------------------------------


def scoring_mask(model: Model, client_data: SubgraphData) -> jax.Array | None:
    """The mask of nodes [N] for a model that is scored.

    None for one with batch statistics, which then takes those that it has gathered.
    """
    return None if model["batch_stats"] else client_data.is_real


def map_outputs(
    module: SubgraphModel, reduce: Callable[..., Any]
) -> Callable[[Model, SubgraphData], Any]:
    """Factory of a function of models' outputs on the clients' subgraphs.

    Args:
      module: the network.
      reduce: (outputs [N, classes], client_data) -> result, of one client.

    Returns:
      (models [1 or K, ...], data) -> results [K, ...].
    """

    def one(model, client_data):
        mask = scoring_mask(model, client_data)
        outputs = module.apply(model, as_graph(client_data, module), mask=mask)
        return reduce(outputs, client_data)

    def run(models: Model, data: SubgraphData):
        rows = data.by_client()
        return clients.map_rows(one, clients.eval_clients_per_chunk())(models, rows)

    return run


def scores(
    outputs: jax.Array, client_data: SubgraphData
) -> tuple[jax.Array, jax.Array]:
    """ONE client's share of right nodes among those scored, and its cross-entropy."""
    is_right = jnp.argmax(outputs, axis=-1) == client_data.labels
    share_right = masked_mean(is_right, client_data.is_scored)
    return share_right, cross_entropy(
        outputs, client_data.labels, client_data.is_scored
    )


def federated_scores(
    share_right: jax.Array, entropy: jax.Array, data: SubgraphData, fitness: Fitness
) -> dict[str, jax.Array]:
    """The clients' scores [K], weighted by their shares of the scored nodes.

    `accuracy` is in percent. The metric that MONITORS names, NaN where the
    cross-entropy is not finite, is `loss`, the cross-entropy, or `error`, the share of
    wrong answers in [0, 1]. Where no node is scored all are NaN.
    """
    counts = jnp.sum(data.is_scored, axis=1)
    shares = counts / jnp.maximum(jnp.sum(counts), 1)
    right = jnp.sum(shares * share_right)
    entropy = jnp.sum(jnp.where(counts > 0, shares * entropy, 0))
    right, entropy = (
        jnp.where(jnp.any(counts > 0), x, jnp.nan) for x in (right, entropy)
    )
    monitored = entropy if fitness == "loss" else jnp.maximum(1 - right, 0)
    return {
        MONITORS[fitness]: jnp.where(jnp.isfinite(entropy), monitored, jnp.nan),
        "accuracy": 100 * right,
        "cross_entropy": entropy,
    }


def evaluate_subgraphs(
    module: SubgraphModel, fitness: Fitness
) -> Callable[[Model, SubgraphData], Metrics]:
    """Factory of `evaluate`."""

    def evaluate(models: Model, data: SubgraphData):
        share_right, entropy = map_outputs(module, scores)(models, data)
        return federated_scores(share_right, entropy, data, fitness)

    return evaluate


def evaluate_outputs(
    outputs: jax.Array, data: SubgraphData, fitness: Fitness
) -> Metrics:
    """What `evaluate` returns, of outputs [K, N, classes] that are already there."""
    share_right, entropy = clients.map_clients(scores)(outputs, data.by_client())
    return federated_scores(share_right, entropy, data, fitness)


def predict_subgraphs(
    module: SubgraphModel,
) -> Callable[[Model, SubgraphData], jax.Array]:
    """Factory of `predict`: probabilities [K, N, classes]."""
    return map_outputs(module, lambda outputs, client_data: jax.nn.softmax(outputs))
