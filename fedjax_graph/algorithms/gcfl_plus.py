"""GCFL+: FedAvg in clusters of clients, split by how their gradients' norms went.

Xie, Ma, Xiong, Yang, "Federated Graph Classification over Non-IID Graphs", NeurIPS
2021. All clients begin in one cluster C. In a round, with d_i what client i's steps add
to its model (numbers of equations are ours),

    u_C <- u_C + sum_{i in C} (N_i / N_C) d_i                              (1)

A cluster of more than two clients is split in two where its updates have died down as a
whole, yet not one by one:

    |mean_{i in C} d_i| < eps_1 and max_{i in C} |d_i| > eps_2             (2)

by the minimum cut of a graph with weights max(D) - D, where D are the distances by
dynamic time warping of the clients' norms of the gradient over the last rounds.

Differences from the paper: experiments there are on whole graphs, here on any task; its
code shares graph convolutions alone, this all layers. As in OpenFGL clients count alike
in Eq. 2, the norm is that of a round's last gradient, splits begin after `first_rounds`
rounds, one cluster a round is split, of the lowest client, and norms gathered anew, of
each client `num_norms`. Eq. 2 is of who came.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import aggregation, channel, client_state, clustering, trees
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import limited
from fedjax_graph.core.clients import Cohort
from fedjax_graph.core.federated import (
    FederatedConfig,
    cohort_update,
    rows_of,
    task_algorithm,
    write_back,
)
from fedjax_graph.core.proximal import last_norm


@dataclasses.dataclass(frozen=True)
class GCFLPlusConfig(FederatedConfig):
    """Configures GCFL+: when a cluster is split, and by which rounds' norms."""

    mean_below: float = limited(0.05, lower=0)  # eps_1
    largest_above: float = limited(0.1, lower=0)  # eps_2
    num_norms: int = limited(5, lower=1)  # rounds that are compared
    first_rounds: int = limited(20, lower=0)  # the last one without a split, from 0


class GCFLPlusState(NamedTuple):
    """Holds each client's model, who is with whom, and the last norms."""

    models: Any  # u of each client's cluster, leaves [K, ...]
    num_rounds: jax.Array  # [] int32
    together: jax.Array  # [K, K] float32, 1 for two clients of one cluster
    norms: jax.Array  # [K, T], the last ones
    num_norms: jax.Array  # [K] int32, rounds that each was in since the last split


def gcfl_plus(config: GCFLPlusConfig) -> FederatedAlgorithm:
    """Factory of GCFL+ on any task; `InputError` for a channel (`channel.refuse`)."""
    channel.refuse(config, "gcfl_plus does not have it")
    task = client_state.build_task(config.task)

    def update(model, client_data, key, data, num_rounds):
        args = client_data, key, data, last_norm(), num_rounds
        result = task.update(model, *args)
        return result.model | {"norm": result.opt_state[0]}, result.loss

    train = cohort_update(
        update,
        is_personal=trees.is_of_optimizer,
        participation=config.participation,
        clients_per_chunk=config.clients_per_chunk,
    )

    def init(key, data):
        one = trees.one_row(task.init(key))
        size = len(data.client_ids)
        models = aggregation.broadcast(one, size)
        norms, none = jnp.zeros((size, config.num_norms)), jnp.zeros(size, jnp.int32)
        return GCFLPlusState(models, jnp.int32(0), jnp.ones((size, size)), norms, none)

    def round_(state, data, key):
        ids, weights, size = data.client_ids, data.client_weights, len(data.client_ids)
        args = task.client_data(data), ids, weights, key, data, state.num_rounds
        sent, loss, cohort = train(state.models, *args)
        before, last = state.norms[cohort.indices, 1:], sent.pop("norm")[:, None]
        new = jnp.concatenate([before, last], 1), state.num_norms[cohort.indices] + 1
        norms, num_norms = write_back((state.norms, state.num_norms), new, cohort, size)
        changes = jax.tree.map(jnp.subtract, sent, rows_of(state.models, cohort, ids))
        is_late = state.num_rounds > config.first_rounds
        is_time = is_late & jnp.all((num_norms >= config.num_norms) | (weights <= 0))
        args = state.together, weights > 0, norms, changes["params"], cohort, is_time
        together, is_split = split(config, *args)
        held = write_back(state.models, sent, cohort, size, trees.is_of_optimizer)
        shares = together * jnp.zeros(size).at[cohort.indices].set(cohort.weights)
        mix = aggregation.partial(
            lambda models, _: aggregation.mix_rows(models, shares),
            trees.is_of_optimizer,
        )
        models = mix(held, cohort)  # Eq. 1, of who takes part, for the whole cluster
        num_norms = jnp.where(is_split, 0, num_norms)
        state = GCFLPlusState(models, state.num_rounds + 1, together, norms, num_norms)
        return state, {"train_loss": loss}

    return task_algorithm(task, init, round_, config)._replace(reads_all_clients=True)


def split(
    config: GCFLPlusConfig,
    together: jax.Array,
    is_real: jax.Array,
    norms: jax.Array,
    changes: Any,
    cohort: Cohort,
    is_time: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Who is with whom after a round, [K, K], and whether a cluster was split."""
    finite = jax.tree.map(lambda x: jnp.nan_to_num(x, posinf=0, neginf=0), changes)
    products = sum(_products(x.reshape(len(x), -1)) for x in jax.tree.leaves(finite))
    is_member = together[:, cohort.indices] * (cohort.weights > 0)
    counts = jnp.sum(is_member, axis=1)
    squares = jnp.einsum("kc,cd,kd->k", is_member, products, is_member)
    mean_norm = jnp.sqrt(jnp.maximum(squares, 0)) / jnp.maximum(counts, 1)
    largest = jnp.sqrt(jnp.max(is_member * jnp.diagonal(products), axis=1))
    is_ready = mean_norm < config.mean_below  # Eq. 2
    is_ready &= largest > config.largest_above
    is_known = jnp.all(jnp.isfinite(norms), axis=1)
    is_whole = ~jnp.any((together > 0) & ~is_known, axis=1)  # all norms are numbers
    sizes = jnp.sum(together * is_real, axis=1)
    is_ready = is_ready & (sizes > 2) & is_time & is_real & is_whole
    is_cluster = together[jnp.argmax(is_ready)] > 0
    is_inside = is_cluster & is_real  # who trains on nothing stays on one side

    def cut(together):
        side = clustering.cut_by_sequences(norms, is_inside)
        is_pair = is_cluster[:, None] & is_cluster
        return jnp.where(is_pair & (side[:, None] != side), 0, together)

    is_split = jnp.any(is_ready)
    return jax.lax.cond(is_split, cut, lambda together: together, together), is_split


def _products(x: jax.Array) -> jax.Array:
    return jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST)
