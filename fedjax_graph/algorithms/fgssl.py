"""FGSSL: the server's model teaches clients which nodes and neighbours are alike.

Huang, Wan, Ye, Du, "Federated Graph Semantic and Structural Learning", IJCAI 2023. In
each step a client's model sees a graph that lost many edges and features, and the
server's, which is fixed, one that lost fewer. With h and h^g what their last layers
read, s the cosine, e_ij = exp(s(h_i, h_j^g) / tau):

    L_C = mean_i mean_p -log e_ip / (e_ip + sum_k e_ik)                    (1)
    q_ij = softmax over the neighbours j of i of s(h_i, h_j) / tau         (2)
    L_D = mean_i KL(q_i^g || q_i)                                          (3)
    L = L_CE + lambda_C L_C + lambda_D L_D                                 (4)

i are training nodes in Eq. 1, p those of the same class, k those of others; in Eq. 3
nodes with neighbours. Numbers are those of this list. tau, lambda_D and the shares that
are dropped are the released code's; lambda_C = 0.1 is our choice.

Differences from the paper: L_CE alone sees the whole graph; neighbours are compared by
a cosine. The released code, and OpenFGL 1.1.0, leave L_C out, `contrast_weight=0`, and
have `structure="edges"`: in Eq. 2 the softmax of |h_i - h_j| / tau over its dimensions,
in Eq. 3 the mean over edges.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_graph.algorithms.fed_avg import FedAvgConfig, fed_avg
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.building import embedding_task
from fedjax_graph.core.checks import limited
from fedjax_graph.core.client_state import task_of
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.masks import masked_mean
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.models.normalization import unit_rows

FAR = -1e9  # logit of what is left out


@dataclasses.dataclass(frozen=True)
class FGSSLConfig(FedAvgConfig):
    """Configures FGSSL: its two losses, and how views of a graph are drawn."""

    contrast_weight: float = limited(0.1, lower=0)  # lambda_C
    structure_weight: float = limited(0.1, lower=0)  # lambda_D
    temperature: float = limited(0.1, above=0)  # tau
    structure: Literal["similarity", "edges"] = "similarity"  # of Eqs. 2 and 3
    # shares of edges and features that are dropped for the client's and server's model
    client_edges: float = limited(0.8, lower=0, below=1)
    client_features: float = limited(0.5, lower=0, below=1)
    server_edges: float = limited(0.3, lower=0, below=1)
    server_features: float = limited(0.3, lower=0, below=1)


def augment(
    key: jax.Array, own: SubgraphData, edges: float, features: float
) -> SubgraphData:
    """Drops shares of the edges, each way on its own, and of the features."""
    edge_key, feature_key = jax.random.split(key)
    is_kept = jax.random.bernoulli(edge_key, 1 - edges, own.edge_weights.shape)
    is_seen = jax.random.bernoulli(feature_key, 1 - features, own.features.shape[-1:])
    return own._replace(
        edge_weights=own.edge_weights * is_kept, features=own.features * is_seen
    )


def contrast(
    h: jax.Array,
    taught: jax.Array,
    labels: jax.Array,
    is_trained: jax.Array,
    temperature: float,
) -> jax.Array:
    """Computes L_C (Eq. 1) of a client's nodes h [N, D] and the server's [N, D]."""
    logits = unit_rows(h) @ unit_rows(taught).T / temperature
    is_alike = labels[:, None] == labels
    is_other = ~is_alike & (is_trained > 0)
    others = jax.nn.logsumexp(jnp.where(is_other, logits, FAR), axis=1, keepdims=True)
    losses = jax.nn.softplus(others - logits)
    by_node = jax.vmap(masked_mean)(losses, is_alike * is_trained)
    return masked_mean(by_node, is_trained)


def similarity_distance(
    h: jax.Array, taught: jax.Array, own: SubgraphData, temperature: float
) -> jax.Array:
    """Computes L_D (Eqs. 2 and 3) of embeddings [N, D]."""
    size, is_edge = len(h), own.edge_weights > 0

    def log_shares(x: jax.Array) -> jax.Array:  # q, of each edge
        unit = unit_rows(x)
        logits = jnp.sum(unit[own.senders] * unit[own.receivers], 1) / temperature
        logits = jnp.where(is_edge, logits, FAR)
        peaks = jax.ops.segment_max(logits, own.receivers, size)
        logits = logits - jax.lax.stop_gradient(peaks)[own.receivers]
        totals = jax.ops.segment_sum(is_edge * jnp.exp(logits), own.receivers, size)
        return logits - jnp.log(jnp.where(totals > 0, totals, 1))[own.receivers]

    ours, theirs = log_shares(h), log_shares(taught)
    gaps = jnp.where(is_edge, jnp.exp(theirs) * (theirs - ours), 0)
    has_any = jax.ops.segment_max(is_edge, own.receivers, size)
    return jnp.sum(gaps) / jnp.maximum(jnp.sum(has_any), 1)


def edge_distance(
    h: jax.Array, taught: jax.Array, own: SubgraphData, temperature: float
) -> jax.Array:
    """Computes the released code's L_D, between the differences along the edges."""

    def log_shares(x: jax.Array) -> jax.Array:  # [E, D]
        gaps = jnp.abs(x[own.senders] - x[own.receivers])
        return jax.nn.log_softmax(gaps / temperature)

    ours, theirs = map(log_shares, (h, taught))
    divergences = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=1)
    return masked_mean(divergences, jnp.sign(own.edge_weights))


def fgssl(config: FGSSLConfig) -> FederatedAlgorithm:
    """Factory of FGSSL; `InputError` without embeddings, in a round without graphs."""
    _, embed = embedding_task(task_of(config), "fgssl")
    distances = {"similarity": similarity_distance, "edges": edge_distance}
    distance, tau = distances[config.structure], config.temperature

    def update(task, w, own, key, data, num_rounds):
        if not isinstance(own, SubgraphData):
            raise InputError(
                f"fgssl: clients of the task {config.task.kind!r} hold no graph; use "
                "subgraphs"
            )

        def add(params, seen, key):
            keys = jax.random.split(key, 3)  # of the two views and the dropout
            weak = augment(keys[0], own, config.server_edges, config.server_features)
            strong = augment(keys[1], own, config.client_edges, config.client_features)
            taught = embed(w, weak, data).embeddings
            h = embed(w | {"params": params}, strong, data, keys[2]).embeddings
            semantic = contrast(h, taught, seen.labels, seen.is_trained, tau)
            structural = distance(h, taught, own, tau)
            weights = config.contrast_weight, config.structure_weight
            return weights[0] * semantic + weights[1] * structural  # Eq. 4

        has_any = config.contrast_weight or config.structure_weight
        term = (lambda embed: add) if has_any else None
        result = task.update(w, own, key, data, None, num_rounds, term=term)
        return result.model, result.loss

    return fed_avg(config, update=update)
