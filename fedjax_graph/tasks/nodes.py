"""Node classification with GCN, SGC or a model of one's own, as in GraphFL.

A client trains on its support set, on all of it in each step; its query set is for who
judges what the steps led to (GraphFL's meta step). Clients hold the whole graph or a
subgraph; what they compute on are the receptive fields of their labelled nodes, see
`data.graphs.receptive_fields`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jraph
import optax

from fedjax_graph.core import clients, trees
from fedjax_graph.core.aggregation import client_mean
from fedjax_graph.core.algorithm import Metrics
from fedjax_graph.core.checks import Checked, limited, limits
from fedjax_graph.core.graphs import one_graph
from fedjax_graph.core.local import LocalResult, Model
from fedjax_graph.core.masks import masked_mean
from fedjax_graph.core.meta_learning import inner_update
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.registry import Registry
from fedjax_graph.core.task import Embedded, Task, Term, flipped, in_head
from fedjax_graph.data.graphs.receptive_fields import NodeData, ReceptiveField
from fedjax_graph.models.embeddings import apply_with_embeddings
from fedjax_graph.models.gcn import GCN, SGC
from fedjax_graph.models.protocols import NodeModel, built

TEST_METRICS = ("accuracy", "cross_entropy")  # what a test is summed up by


@dataclasses.dataclass(frozen=True)
class NodeTask(Checked):
    """Hyper-parameters of node classification; rounds and steps are the paper's."""

    num_features: int = dataclasses.field(metadata=limits(lower=1))
    num_classes: int = dataclasses.field(metadata=limits(lower=1))
    kind: Literal["nodes"] = "nodes"
    model: str = "gcn"  # a name of MODELS
    hidden_size: int = limited(16, lower=1)  # of GCN
    dropout: float = limited(0.5, lower=0, below=1)  # of GCN
    inner_steps: int = limited(15, lower=0)  # local steps
    optimizer: OptimizerConfig = OptimizerConfig("sgd", 0.1)  # alpha, of those
    # taken on a task's support set before its query set is scored
    adapt_steps: int = limited(0, lower=0)
    checkpoint_inner: bool = False

    def module(self) -> NodeModel:
        """The model that clients train.

        Raises:
          InputError: if none is registered under this name, or it lacks what
            `NodeModel` asks for.
        """
        what = f"node model {self.model!r}"
        return built(MODELS.look_up(self.model), self, NodeModel, what)

    def build(self) -> Task:
        """The task's functions; raises as `module`."""
        model = self.module()
        return Task(
            init=lambda key: init(model, self.num_features, key),
            client_data=lambda data: (data.support, data.query),
            update=client_update(model, self),
            evaluate=evaluate_nodes(model, self),
            predict=predict_nodes(model, self),
            is_head=in_head,
            query_loss=query_loss(model),
            has_query=lambda data: jnp.any(data.query.mask > 0, axis=1),
            embed=embed_support(model),
            num_classes=self.num_classes,
            flip_labels=lambda own, data, is_flipped: (
                tuple(
                    field._replace(
                        labels=flipped(field.labels, self.num_classes, is_flipped)
                    )
                    for field in own
                ),
                data,
            ),
            monitor="error",
        )


MODELS: Registry[Callable[[NodeTask], NodeModel]] = Registry(
    "node model",
    {
        "gcn": lambda task: GCN(task.num_classes, task.hidden_size, task.dropout),
        "sgc": lambda task: SGC(task.num_classes),
    },
    is_callable=True,
)
"""Name -> factory: the task's config -> module; see `register_model`."""
register_model = MODELS.registering()
"""Registers a model of one's own by a function of the task's config.

    register_model("mine", lambda task: GCN(task.num_classes, task.hidden_size))

or as a decorator of that function. The module that it returns offers what
`models.protocols.NodeModel` asks for.
"""


def init(model: NodeModel, num_features: int, key: jax.Array) -> Model:
    """Fresh parameters (the shapes do not depend on the graph)."""
    none = jnp.zeros(0, jnp.int32)
    graph = as_graph(
        jnp.zeros((1, num_features)),
        ReceptiveField(
            jnp.zeros(1, jnp.int32), none, none, jnp.zeros(0), none, jnp.zeros(0)
        ),
    )
    return {"params": model.init(key, graph)["params"], "batch_stats": {}}


def as_graph(features: jax.Array, field: ReceptiveField) -> jraph.GraphsTuple:
    """A field with its nodes' features [H, F], of one task."""
    nodes = features[field.rows]
    return one_graph(nodes, field.senders, field.receivers, field.weights)


def cross_entropy(logits: jax.Array, field: ReceptiveField) -> jax.Array:
    """Mean over the labelled nodes (Eqs. 2 and 3) of logits [H, classes]; 0 of none."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[: len(field.labels)], field.labels
    )
    return masked_mean(losses, field.mask)


def in_training(key: jax.Array) -> dict[str, Any]:
    """Settings of a model's `apply` while it trains, with the key of the dropout."""
    return {"is_training": True, "rngs": {"dropout": key}}


def field_loss(
    model: NodeModel,
    graph: jraph.GraphsTuple,
    field: ReceptiveField,
    term: Term | None = None,
) -> Callable[..., jax.Array]:
    """Factory of (params, key of the dropout) -> mean loss on a field, and the term."""

    if term is not None:
        add = term(lambda other: embedded(model, other, graph, field)[1].embeddings)

    def loss(params, key):
        settings = in_training(key)
        if term is None:
            logits = model.apply({"params": params}, graph, **settings)
            return cross_entropy(logits, field)
        logits, seen = embedded(model, {"params": params}, graph, field, **settings)
        return cross_entropy(logits, field) + add(params, seen, key)

    return loss


def embedded(
    model: NodeModel,
    variables: Model,
    graph: jraph.GraphsTuple,
    field: ReceptiveField,
    **settings: Any,
) -> tuple[jax.Array, Embedded]:
    """The logits of a field's nodes, and the embeddings of the labelled ones."""
    logits, embeddings = apply_with_embeddings(
        model, {"params": variables["params"]}, graph, **settings
    )
    labelled = embeddings[: len(field.labels)]
    return logits, Embedded(labelled, field.labels, field.mask, field.mask)


def embed_support(model: NodeModel) -> Callable[..., Embedded]:
    """Factory of the embeddings of one client's support set; see `Task.embed`."""

    def embed(
        variables: Model, client_data, data: NodeData, key: jax.Array | None = None
    ) -> Embedded:
        support, _ = client_data
        graph = as_graph(data.features, support)
        settings = {} if key is None else in_training(key)
        return embedded(model, variables, graph, support, **settings)[1]

    return embed


def client_update(model: NodeModel, config: NodeTask) -> Callable[..., LocalResult]:
    """Factory of the inner steps of one client; see `Task.update`."""

    def update(start, client_data, key, data: NodeData, adjust, num_rounds, term=None):
        del num_rounds
        support, _ = client_data
        graph = as_graph(data.features, support)
        if adjust is None and term is None:
            return support_steps(model, config, graph, support)(start, key)
        loss = field_loss(model, graph, support, term)
        return gradient_steps(config, loss, adjust=adjust)(start, key)

    return update


def gradient_steps(
    config: NodeTask, loss: Callable[..., jax.Array], **settings: Any
) -> Callable[..., LocalResult]:
    """`inner_update` with the task's number of steps and optimizer."""
    return inner_update(
        loss,
        config.inner_steps,
        config.optimizer.build(config.inner_steps),
        checkpoint=config.checkpoint_inner,
        **settings,
    )


def support_steps(
    model: NodeModel,
    config: NodeTask,
    graph: jraph.GraphsTuple,
    support: ReceptiveField,
) -> Callable[[Model, jax.Array], LocalResult]:
    """Factory of (model, key) -> LocalResult: gradient steps on a support set.

    The first layer takes the products P = X W of features X [H, F]. With G the loss's
    gradient in P, that in W is X^T G, so after some steps W is W_0 - alpha X^T sum G
    and P is P_0 - alpha X X^T sum G. Where the field brings X X^T, the steps keep
    -alpha sum G [H, units] in place of W and never multiply by the F features:
    equal to steps in W up to rounding, as long as the optimizer's updates are linear in
    the gradients.

    Args:
      model: see `NodeTask.module`.
      config: number of the steps, and their optimizer.
      graph: the support set's field, with features.
      support: the field.
    """
    features, layer = graph.nodes, model.first_layer
    is_exact = support.gram is not None and config.optimizer.is_linear
    if layer is None or not is_exact or config.inner_steps < 2:
        return gradient_steps(config, field_loss(model, graph, support))

    def with_kernel(params, kernel):
        return params | {layer: params[layer] | {"kernel": kernel}}

    def loss_of_products(params, key):
        products = params[layer]["kernel"]
        loss = field_loss(model, graph._replace(nodes=products), support)
        return loss(with_kernel(params, jnp.eye(products.shape[1])), key)

    def run(start, key):
        first = start["params"][layer]["kernel"]
        products = features @ first

        def view(params):
            sums = params[layer]["kernel"]
            return with_kernel(params, products + support.gram @ sums)

        sums = with_kernel(start["params"], jnp.zeros_like(products))
        steps = gradient_steps(config, loss_of_products, view=view)
        result = steps(start | {"params": sums}, key)
        params = result.model["params"]
        kernel = first + features.T @ params[layer]["kernel"]
        params = with_kernel(params, kernel)
        return result._replace(model=result.model | {"params": params})

    return run


def query_loss(model: NodeModel) -> Callable[..., jax.Array]:
    """Factory of the loss on one client's query set; see `Task.query_loss`."""

    def loss(params, client_data, key, data: NodeData):
        _, query = client_data
        return field_loss(model, as_graph(data.features, query), query)(params, key)

    return loss


# --- Scores --------------------------------------------------------------------------


def map_logits(
    model: NodeModel, config: NodeTask, reduce: Callable[..., Any]
) -> Callable[[Model, NodeData], Any]:
    """Factory of a function of models' logits on the query sets of a split.

    With `adapt_steps`, a model first takes that many steps on the support set.

    Args:
      model: see `NodeTask.module`.
      config: of the task.
      reduce: (logits [L, classes], query field) -> result, of one model and task.

    Returns:
      (models, data) -> results [K or 1, ...]: of client i's model on client i's task,
      where either may be the same for all.
    """

    adaptation = dataclasses.replace(config, inner_steps=config.adapt_steps)

    def one(start, support, query, key, features):
        if config.adapt_steps:
            graph = as_graph(features, support)
            start = support_steps(model, adaptation, graph, support)(start, key).model
        graph = as_graph(features, query)
        logits = model.apply({"params": start["params"]}, graph)
        return reduce(logits[: len(query.labels)], query)

    def run(models: Model, data: NodeData):
        num_tasks = data.query.labels.shape[0]
        ids = data.client_ids[:num_tasks]
        keys = clients.client_keys(jax.random.key(0), ids)  # of the dropout
        chunk = clients.eval_clients_per_chunk()
        mapped = clients.map_rows(one, chunk)
        return mapped(models, data.support, data.query, keys, shared=(data.features,))

    return run


def evaluate_nodes(
    model: NodeModel, config: NodeTask
) -> Callable[[Model, NodeData], Metrics]:
    """Factory of `evaluate`: means over clients, each of which counts the same.

    `accuracy` is in percent; `error`, by which the best round is chosen, is the share
    of wrong answers in [0, 1], NaN where the cross-entropy is not finite. Clients
    without query nodes are left out; where nobody is left, all three are NaN.
    """

    def count(logits, query):
        is_right = jnp.argmax(logits, axis=-1) == query.labels
        return masked_mean(is_right, query.mask), cross_entropy(logits, query)

    def evaluate(models: Model, data: NodeData):
        scores = map_logits(model, config, count)(models, data)
        weights = data.client_weights if len(scores[0]) > 1 else jnp.ones(1)
        weights = weights * jnp.any(data.query.mask > 0, axis=1)
        means = client_mean(trees.kept_rows(scores, weights > 0), weights)
        share_right, entropy = jax.tree.map(
            lambda x: jnp.where(jnp.any(weights > 0), x, jnp.nan), means
        )
        return {
            "error": jnp.where(jnp.isfinite(entropy), 1 - share_right, jnp.nan),
            "accuracy": 100 * share_right,
            "cross_entropy": entropy,
        }

    return evaluate


def predict_nodes(
    model: NodeModel, config: NodeTask
) -> Callable[[Model, NodeData], jax.Array]:
    """Factory of `predict`: probabilities [K or 1, L, classes] of the query nodes."""
    return map_logits(model, config, lambda logits, query: jax.nn.softmax(logits))
