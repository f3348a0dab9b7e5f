"""FedGTA: clients mix models with those whose propagated labels have like moments.

Li, Wu, Zhang, Zhu, Li, Wang, "FedGTA: Topology-aware Averaging for Federated Graph
Learning", PVLDB 17(1), 2023. After its local steps a client i propagates the soft
labels P of its model over its subgraph, and sends with its model theta_i (numbers of
equations are ours):

    Y <- kappa S Y + (1 - kappa) Y_0, clipped to [0, 1], k times            (1)
    H_i = sum_v d_v sum_c [1/e + q_vc log q_vc], q = softmax(Y / T)         (2)
    M_i = the raw and the central moments of order 1 to m, over nodes, of
          softmax(Y), class by class                                        (3)

S is the normalised adjacency without self edges, d_v the degree of a node; training
nodes have their labels for q and softmax(Y) in Eqs. 2 and 3. The server mixes

    u_i = sum_{j in A_i} H_j theta_j / sum_{j in A_i} H_j                   (4)
    A_i = {j: cos(M_i, M_j) > epsilon}                                      (5)

Differences from the paper: as in OpenFGL, whose authors are the paper's, Y_0 is P at
the training nodes and 0 elsewhere, d_v counts an edge twice, and `score` is of the
model after local steps; k = 5, kappa = 1/2, T = 20, m = 10, epsilon = 1/2 are its.
Eq. 1 is OpenFGL's too: the authors' first code has self edges in S, clips nothing, and
begins from the labels at training nodes and P elsewhere.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_graph.core import (
    aggregation,
    channel,
    client_rows,
    clients,
    communication,
    misbehaviour,
)
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.building import logits_task
from fedjax_graph.core.checks import limited
from fedjax_graph.core.client_state import Score, aggregated
from fedjax_graph.core.federated import FederatedConfig, federated
from fedjax_graph.models import normalization
from fedjax_graph.tasks.subgraphs import structure_of

LOG_FLOOR = 1e-8  # added in a logarithm


@dataclasses.dataclass(frozen=True)
class FedGTAConfig(FederatedConfig):
    """Configures FedGTA: label propagation, moments, and who counts as alike."""

    propagation_steps: int = limited(5, lower=0)  # k
    kappa: float = limited(0.5, lower=0, upper=1)
    temperature: float = limited(20.0, above=0)  # T
    num_moments: int = limited(10, lower=1)  # m
    similarity: float = limited(0.5, lower=-1, below=1)  # epsilon
    score: Score = "local"  # v_i after local steps, or u_i


def fed_gta(config: FedGTAConfig) -> FederatedAlgorithm:
    """Factory of FedGTA on tasks of subgraphs.

    Raises:
      InputError: if the task is of something else, or clients are to be private.
    """
    besides = "fed_gta's clients send confidences and moments besides their models"
    channel.refuse(config, besides, "privacy", "secure_aggregation")
    task, logits = logits_task(config.task, "fed_gta")

    def aggregator(state, data, key):
        del state, key

        def aggregate(stacked, cohort):
            own = data.by_client()
            if len(cohort.indices) < len(data.client_ids):
                own = client_rows.take(own, cohort.indices)
            outputs = logits(aggregated(stacked), own)
            own = misbehaviour.flipped_data(
                config.misbehaviour, task, own, cohort.indices, data
            )
            measured = clients.map_clients(
                lambda *one: measure(config, *one), config.clients_per_chunk
            )
            confidences, moments = communication.up(measured(own, outputs))
            is_like = normalization.cosines(moments) > config.similarity  # Eq. 5
            confidences = jnp.where(cohort.weights > 0, confidences, 0)
            return aggregation.mix_rows(stacked, is_like * confidences)  # Eq. 4

        return aggregate

    return federated(config, aggregator)


def measure(config: FedGTAConfig, own, logits) -> tuple[jax.Array, jax.Array]:
    """ONE client's confidence H_i [] and moments M_i [2 m C], of logits [N, C]."""
    structure = structure_of(own)
    is_trained = own.is_trained[:, None]
    first = jax.nn.softmax(logits) * is_trained
    labels = first
    for _ in range(config.propagation_steps):  # Eq. 1
        spread = structure.normalised_sum(labels, self_weight=0)
        labels = config.kappa * spread + (1 - config.kappa) * first
        labels = jnp.clip(labels, 0, 1)
    known = jax.nn.one_hot(own.labels, logits.shape[1], dtype=logits.dtype)

    def soft(temperature):
        return jnp.where(is_trained > 0, known, jax.nn.softmax(labels / temperature))

    shares, is_real = soft(config.temperature), own.is_real[:, None]
    degrees = 2 * structure.degrees * own.is_real
    entropies = jnp.sum(shares * jnp.log(shares + LOG_FLOOR), axis=1)
    num_classes = logits.shape[1]
    confidence = jnp.sum(degrees * (num_classes * jnp.exp(-1.0) + entropies))  # Eq. 2
    num_nodes = jnp.maximum(jnp.sum(is_real), 1)
    plain = soft(1.0)
    centred = plain - jnp.sum(plain * is_real, axis=0) / num_nodes
    moments = [  # Eq. 3
        jnp.sum(values**order * is_real, axis=0) / num_nodes
        for values in (plain, centred)
        for order in range(1, config.num_moments + 1)
    ]
    return confidence, jnp.concatenate(moments)
