"""Node classification where each client holds a whole subgraph, as in FL-AGCNS.

A client's loss is the mean over its training nodes; the federated accuracy is the sum
over clients of accuracy x share of the scored nodes (Wang et al., arXiv 2104.04141,
Section 4.1), which is the accuracy over all of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import optax

from fedjax_graph.core import clients
from fedjax_graph.core.algorithm import Metrics
from fedjax_graph.core.checks import Checked, limited, limits
from fedjax_graph.core.local import LocalResult, Model, local_steps
from fedjax_graph.core.meta_learning import masked_mean
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.core.task import Task, flipped
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.models.architecture import NUM_LAYERS, Fusion, Space
from fedjax_graph.models.fixed_gnns import FixedGNN, find_layout
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
    model: str = "gcn"  # see `models.fixed_gnns`; or "code", the network of one
    code: tuple[int, ...] = ()
    space: Space = "paper"  # of a code
    fusion: Fusion = "all"  # of a code
    width: int = limited(WIDTH, lower=1)  # of a code
    dropout: float = limited(0.0, lower=0, below=1)
    local_steps: int = limited(1, lower=1)  # of methods that take steps at the client
    optimizer: OptimizerConfig = OptimizerConfig("sgd", 0.1)  # of those
    fitness: Fitness = "loss"  # by which the best round is chosen, see MONITORS

    def module(self) -> nn.Module:
        """The network that clients train.

        Raises:
          InputError: if there is none of this name, or the code is not valid.
        """
        if self.model != "code":
            find_layout(self.model)
            return FixedGNN(self.model, self.num_classes, dropout=self.dropout)
        net = SuperNet(
            self.num_features,
            self.num_classes,
            max(len(self.code) - 2, 0) or NUM_LAYERS,
            self.width,
            self.fusion,
            self.dropout,
            self.space,
        )
        return net.network(self.code)

    def build(self) -> Task:
        module = self.module()
        loss = training_loss(module)
        return Task(
            init=lambda key: init(module, self.num_features, key),
            client_data=lambda data: data,
            update=client_update(loss, self),
            evaluate=evaluate_subgraphs(module, self.fitness),
            predict=predict_subgraphs(module),
            is_head=in_last_layer,
            train_loss=lambda params, stats, client_data, key, data: loss(
                params, stats, (client_data, key)
            ),
            flip_labels=lambda own, data, is_flipped: (
                own._replace(labels=flipped(own.labels, self.num_classes, is_flipped)),
                data,
            ),
            monitor=MONITORS[self.fitness],
        )


def in_last_layer(path: tuple[Any, ...]) -> bool:
    """`Task.is_head`: `head` of a fixed network, `output` of a code's."""
    return any(getattr(key, "key", None) in ("head", "output") for key in path)


def init(module: nn.Module, num_features: int, key: jax.Array) -> Model:
    """Fresh parameters and running statistics; no graph changes their shapes."""
    drawn = module.init(key, empty_graph(num_features))
    return {"batch_stats": {}} | drawn


def as_graph(client_data: SubgraphData) -> jraph.GraphsTuple:
    """The padded subgraph of ONE client."""
    return jraph.GraphsTuple(
        nodes=client_data.features,
        edges=client_data.edge_weights,
        senders=client_data.senders,
        receivers=client_data.receivers,
        globals=None,
        n_node=jnp.array([len(client_data.features)], jnp.int32),
        n_edge=jnp.array([len(client_data.senders)], jnp.int32),
    )


def cross_entropy(outputs: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over marked nodes of outputs [N, classes] before a softmax; 0 of none."""
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
    return masked_mean(losses, mask)


def training_loss(module: nn.Module) -> Callable[..., tuple[jax.Array, Any]]:
    """Factory of the mean loss over the training nodes of ONE client.

    Returns:
      (params, batch_stats, (client_data, key)) -> (loss, batch_stats).
    """

    def loss(params, stats, batch):
        client_data, key = batch
        outputs, new = module.apply(
            {"params": params, "batch_stats": stats},
            as_graph(client_data),
            client_data.is_real,
            is_training=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        value = cross_entropy(outputs, client_data.labels, client_data.is_trained)
        return value, new.get("batch_stats", stats)

    return loss


def client_update(loss, config: SubgraphTask) -> Callable[..., LocalResult]:
    """Factory of one client's gradient steps on its subgraph; see `Task.update`."""

    def update(start, client_data, key, data, adjust, num_rounds):
        del data, num_rounds
        steps = local_steps(
            lambda params, stats, key: loss(params, stats, (client_data, key)),
            config.optimizer.build(config.local_steps),
            adjust=adjust,
        )
        return steps(start, jax.random.split(key, config.local_steps))

    return update


# --- Scores --------------------------------------------------------------------------


def map_outputs(
    module: nn.Module, reduce: Callable[..., Any]
) -> Callable[[Model, SubgraphData], Any]:
    """Factory of a function of models' outputs on the clients' subgraphs.

    Args:
      module: the network.
      reduce: (outputs [N, classes], client_data) -> result, of one client.

    Returns:
      (models [1 or K, ...], data) -> results [K, ...].
    """

    def one(model, client_data):
        return reduce(module.apply(model, as_graph(client_data)), client_data)

    def run(models: Model, data: SubgraphData):
        return clients.map_rows(one, clients.auto_clients_per_chunk())(models, data)

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
    wrong answers in [0, 1].
    """
    counts = jnp.sum(data.is_scored, axis=1)
    shares = counts / jnp.maximum(jnp.sum(counts), 1)
    right = jnp.sum(shares * share_right)
    entropy = jnp.sum(jnp.where(counts > 0, shares * entropy, 0))
    monitored = entropy if fitness == "loss" else 1 - right
    return {
        MONITORS[fitness]: jnp.where(jnp.isfinite(entropy), monitored, jnp.nan),
        "accuracy": 100 * right,
        "cross_entropy": entropy,
    }


def evaluate_subgraphs(
    module: nn.Module, fitness: Fitness
) -> Callable[[Model, SubgraphData], Metrics]:
    """Factory of `evaluate`."""

    def evaluate(models: Model, data: SubgraphData):
        share_right, entropy = map_outputs(module, scores)(models, data)
        return federated_scores(share_right, entropy, data, fitness)

    return evaluate


def predict_subgraphs(module: nn.Module) -> Callable[[Model, SubgraphData], jax.Array]:
    """Factory of `predict`: probabilities [K, N, classes]."""
    return map_outputs(module, lambda outputs, client_data: jax.nn.softmax(outputs))
