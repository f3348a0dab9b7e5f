"""FED-PUB: personal masks, and models mixed by what they compute on a random graph.

Baek, Jeong, Jin, Yoon, Hwang, "Personalized Subgraph Federated Learning", ICML 2023. A
client trains weights theta_i and a mask mu_i of its own (numbers of equations are ours)

    min L_i(theta_i * mu_i) + lambda_1 |mu_i|_1 + lambda_2 |theta_i - u_i|^2  (1)

from the u_i that the server sent, and sends theta_i with its functional embedding

    h_i = mean over nodes of f(G; theta_i * mu_i), G a random graph           (2)
    a_ij = exp(tau cos(h_i, h_j)) / sum_k exp(tau cos(h_i, h_k))              (3)
    u_i = sum_j a_ij theta_j                                                  (4)

G has blocks of nodes with random edges inside and normal features; all clients draw it
from one seed, so that no ledger has it (OpenFGL's server sends it). Masks are of
kernels, begin at 1, and where |mu| is below 1e-3 count as 0 when a model is used.

Differences from the paper: the lambdas are 0 by default, as in the released code and in
OpenFGL, whose penalties are of detached tensors and have no gradient (a live 1e-3 is
larger than the gradient of most mask entries); f are the logits, where that code takes
the layer before a classifier that ours has not; G has a given number of edges; `score`
is of theta_i * mu_i after local steps.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import aggregation, channel, client_state, communication, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.building import logits_task
from fedjax_graph.core.checks import limited
from fedjax_graph.core.client_state import Score, aggregated, is_local
from fedjax_graph.core.federated import (
    FederatedConfig,
    cohort_update,
    plain_update,
    task_algorithm,
    write_back,
)
from fedjax_graph.core.task import TaskConfig
from fedjax_graph.models import normalization
from fedjax_graph.tasks.masked_weights import MaskedWeights, is_mask
from fedjax_graph.tasks.subgraphs import random_blocks


@dataclasses.dataclass(frozen=True)
class FedPubConfig(FederatedConfig):
    """Configures FED-PUB: its similarities, penalties, and the random graph G."""

    sharpness: float = limited(10.0, lower=0)  # tau
    mask_weight: float = limited(0.0, lower=0)  # lambda_1
    pull_weight: float = limited(0.0, lower=0)  # lambda_2
    num_blocks: int = limited(5, lower=1)  # of G
    block_size: int = limited(100, lower=2)  # nodes
    edge_share: float = limited(0.1, above=0, upper=1)  # of a block's pairs of nodes
    score: Score = "local"  # theta_i * mu_i after local steps, or u_i * mu_i


class FedPubState(NamedTuple):
    """Holds each client's weights and masks, and the graph that compares them."""

    models: Any  # u_i and mu_i, leaves [K, ...]
    num_rounds: jax.Array  # [] int32
    proxy: Any  # G, `SubgraphData` of one client


def stays(path: tuple[Any, ...]) -> bool:
    """Path of a leaf in a model -> whether it stays with its client."""
    return is_local(path) or is_mask(path) or trees.is_of_optimizer(path)


def fed_pub(config: FedPubConfig) -> FederatedAlgorithm:
    """Factory of FED-PUB on tasks of subgraphs.

    Raises:
      InputError: if the task is of something else, or the config asks for a channel,
        see `channel.refuse`.
    """
    channel.refuse(config, "fed_pub does not have it")
    logits_task(config.task, "fed_pub")  # raises where there are none
    weights = config.mask_weight, config.pull_weight
    steps = getattr(config.task, "optimizer", None)  # of weights and masks alike
    own: TaskConfig = MaskedWeights(config.task, *weights, optimizer=steps)  # Eq. 1
    _, logits = logits_task(own, "fed_pub")
    keeping = client_state.task_of(dataclasses.replace(config, task=own))
    task = client_state.build_task(keeping)
    train = cohort_update(
        partial(plain_update, task),
        is_personal=stays,
        participation=config.participation,
        clients_per_chunk=config.clients_per_chunk,
    )

    def init(key, data):
        one = trees.one_row(task.init(key))
        models = aggregation.broadcast(one, len(data.client_ids))
        sizes = (config.num_blocks, config.block_size, config.edge_share)
        proxy = random_blocks(
            jax.random.fold_in(key, 1), data.features.shape[2], *sizes
        )
        return FedPubState(models, jnp.int32(0), proxy)

    def round_(state, data, key):
        ids, weights = data.client_ids, data.client_weights
        rows = task.client_data(data)
        updated, loss, cohort = train(
            state.models, rows, ids, weights, key, data, state.num_rounds
        )
        outputs = logits(aggregated(updated), state.proxy)  # Eq. 2
        embeddings = communication.up(jnp.mean(outputs, axis=1))
        cosines = normalization.cosines(embeddings)
        scaled = config.sharpness * (cosines - 1)  # at most 0: no share overflows
        mixing = jnp.where(cohort.weights > 0, jnp.exp(scaled), 0)  # Eq. 3
        shared, personal = trees.partition(updated, stays)
        merged = trees.combine(aggregation.mix_rows(shared, mixing), personal)  # Eq. 4
        models = write_back(state.models, merged, cohort, len(ids), stays)
        state = FedPubState(models, state.num_rounds + 1, state.proxy)
        return state, {"train_loss": loss}

    algorithm = task_algorithm(task, init, round_, config)
    return algorithm._replace(kept=lambda x: algorithm.kept(x._replace(proxy=None)))
