"""FedProto: clients exchange the mean representation of each class, and no models.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022, Algorithm 1. With z what the last layer reads:

    C_i^j = mean of z over the examples of class j of client i    (1)
    C^j = sum_i (N_ij / N_j) C_i^j over the clients with class j  (2)
    l_i = l_S + lambda sum_j d(C_i^j, C^j)                        (3)

Equation numbers are those of this list. In Eq. 3 a client's own prototypes are those of
the examples of a step, and d is the squared distance divided by the number of
dimensions. lambda = 1 is the released code's default. That code has neither of our two
distances: it takes one mean over the examples of a step, of all classes, of |z - C^j|^2
divided by the number of dimensions, 0 for a class without a C^j, so that classes count
by their examples; and in Eq. 2 clients count alike.

Differences from the paper: its weights in Eq. 2 are divided by the number of clients
once more, though they sum to 1 already; a class that nobody in a cohort has keeps its
prototype; all clients have one architecture and start from one model; classes are told
by the last layer, not by the nearest prototype. `distance="examples"` takes the mean
over the examples of a class of their own distances, as OpenFGL 1.1.0 does, which in
Eq. 2 weighs clients by their nodes, and counts a class that a client lacks as 0.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import aggregation, channel, client_rows
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.building import embedding_task
from fedjax_graph.core.checks import limited
from fedjax_graph.core.federated import FederatedConfig, task_algorithm, task_round
from fedjax_graph.core.task import Embedded


@dataclasses.dataclass(frozen=True)
class FedProtoConfig(FederatedConfig):
    """Configures FedProto: the pull of embeddings to the classes' prototypes."""

    prototype_weight: float = limited(1.0, lower=0)  # lambda
    distance: Literal["prototypes", "examples"] = "prototypes"  # d of what, in Eq. 3


class Prototypes(NamedTuple):
    """Holds the mean embeddings of the classes, of one client or of all."""

    means: jax.Array  # [..., classes, D] float32, 0 for a class without examples
    # [..., classes] numbers of examples: int32 as sent, float32 where they are kept
    counts: jax.Array


class FedProtoState(NamedTuple):
    """What clients keep, and the server's prototypes."""

    models: Any  # leaves [K, ...]
    num_rounds: jax.Array  # [] int32
    prototypes: Prototypes  # leaves [1, ...]


def prototypes_of(seen: Embedded, num_classes: int) -> Prototypes:
    """Computes the prototypes of ONE client (Eq. 1)."""
    members = jax.nn.one_hot(seen.labels, num_classes) * seen.is_trained[:, None]
    counts = jnp.sum(members, axis=0).astype(jnp.int32)
    sums = members.T @ seen.embeddings
    return Prototypes(sums / jnp.maximum(counts, 1)[:, None], counts)


def merge(before: Prototypes) -> aggregation.Aggregator:
    """Factory of Eq. 2 on {"prototypes": [C, ...]}; what nobody has stays as before."""

    def aggregate(stacked, cohort):
        means, counts = stacked["prototypes"]
        counts = counts * (cohort.weights > 0)[:, None]
        totals = jnp.sum(counts, axis=0, keepdims=True, dtype=counts.dtype)
        shares = counts / jnp.maximum(totals, 1)
        mean = jnp.sum(shares[..., None] * means, axis=0, keepdims=True)
        is_seen = totals > 0
        merged = Prototypes(
            jnp.where(is_seen[..., None], mean, before.means),
            jnp.where(is_seen, totals.astype(before.counts.dtype), before.counts),
        )
        return stacked | {"prototypes": merged}

    return aggregate


def distances(seen: Embedded, targets: Prototypes, config: FedProtoConfig) -> jax.Array:
    """Sums d over the classes that both the examples and the server have (Eq. 3)."""
    num_classes = len(targets.counts)
    if config.distance == "examples":
        gaps = seen.embeddings - targets.means[seen.labels]
        own = jnp.mean(gaps**2, axis=1, keepdims=True)
        means, counts = prototypes_of(seen._replace(embeddings=own), num_classes)
        each = means[:, 0]
    else:
        means, counts = prototypes_of(seen, num_classes)
        each = jnp.mean((means - targets.means) ** 2, axis=1)
    return jnp.sum(jnp.where((counts > 0) & (targets.counts > 0), each, 0))


def fed_proto(config: FedProtoConfig) -> FederatedAlgorithm:
    """Factory of FedProto; `InputError` for a task without embeddings, or privacy."""
    sent = "fed_proto's clients send prototypes, which are neither clipped nor noised"
    channel.refuse(config, sent, "privacy")
    channel.check_aggregator(config)
    task, embed = embedding_task(config.task, "fed_proto")

    def update(own, client_data, key, data, num_rounds):
        def add(params, seen, key):
            del params, key
            penalty = distances(seen, own["prototypes"], config)
            return config.prototype_weight * penalty

        term = (lambda embed: add) if config.prototype_weight else None
        result = task.update(
            own["model"], client_data, key, data, None, num_rounds, term=term
        )
        seen = embed(result.model, client_data, data)
        sent = prototypes_of(seen, task.num_classes)
        return {"model": result.model, "prototypes": sent}, result.loss

    def init(key, data):
        model, size = task.init(key), len(data.client_ids)
        models = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), model)
        first = client_rows.first_row(task.client_data(data))
        width = jax.eval_shape(embed, model, first, data).embeddings.shape[-1]
        none = Prototypes(
            jnp.zeros((1, task.num_classes, width)), jnp.zeros((1, task.num_classes))
        )
        return FedProtoState(models, jnp.int32(0), none)

    def round_(state, data, key):
        train_key, _ = task.round_keys(key)
        run = task_round(
            config,
            task,
            update,
            merge(state.prototypes),
            is_personal=lambda path: path[0].key == "model",
        )
        own = {"model": state.models, "prototypes": state.prototypes}
        own, loss = run(own, data, train_key, state.num_rounds)
        after = FedProtoState(own["model"], state.num_rounds + 1, own["prototypes"])
        return after, {"train_loss": loss}

    return task_algorithm(task, init, round_, config)
