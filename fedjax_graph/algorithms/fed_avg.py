"""Federated averaging, and the client phase that other methods share.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.

`gru_fed_avg` is the baseline "GRU + FedAvg" of CNFGNN's Table 7: a GRU
encoder-decoder, one local pass a round. Differences from the paper: none known. From
the released code: `sampling_decay` is 1, which is no scheduled sampling after the
first steps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph import aggregation, clients, communication, forecasting
from fedjax_graph.algorithm import FederatedAlgorithm
from fedjax_graph.data.windows import TrafficData
from fedjax_graph.models import gru_seq2seq


def federated_round(
    update: Callable[..., tuple[Any, jax.Array]],
    aggregate: aggregation.Aggregator,
    *,
    participation: float = 1.0,
    clients_per_chunk: int | None = None,
):
    """Factory of one round of local updates on a cohort, and their aggregation.

    Args:
      update: (params, client data, key, *shared) -> (params, loss), of ONE client.
      aggregate: stacked parameters and weights to stacked parameters.
      participation: share of the clients that take part.
      clients_per_chunk: see `clients.map_clients`.

    Returns:
      (params [1 or K, ...], client data [K, ...], client_ids [K], weights [K], key,
      *shared) -> (params [1 or K, ...], mean loss of the cohort).
    """

    exchanges = aggregate is not aggregation.none

    def round_(params, client_data, client_ids, weights, key, *shared):
        cohort_key, update_key = jax.random.split(key)
        num_clients = client_ids.shape[0]
        cohort, weights = clients.sample_cohort(
            cohort_key, client_ids, weights, participation
        )
        own = aggregation.broadcast(params, num_clients)
        if len(cohort) < num_clients:  # else no copy of what may fill the memory
            own, client_data = clients.take((own, client_data), cohort)
        updated, losses = clients.map_clients(update, clients_per_chunk)(
            communication.down(own) if exchanges else own,
            client_data,
            clients.client_keys(update_key, client_ids[cohort]),
            shared=shared,
        )
        merged = aggregate(communication.up(updated) if exchanges else updated, weights)
        if aggregation.num_models(params) == num_clients:  # the others keep theirs
            takes_part = weights > 0

            def place(x, new):
                is_new = takes_part.reshape(-1, *[1] * (x.ndim - 1))
                return x.at[cohort].set(jnp.where(is_new, new, x[cohort]))

            merged = jax.tree.map(place, params, merged)
        return merged, jnp.sum(weights * losses) / jnp.sum(weights)

    return round_


@dataclasses.dataclass(frozen=True)
class FedAvgConfig:
    """Hyper-parameters of `gru_fed_avg`; defaults: the 63K baseline on METR-LA."""

    hidden_size: int = 100
    num_layers: int = 1
    learning_rate: float = 1e-3
    batch_size: int = 128
    client_rounds: int = 1
    sampling_decay: float = 1.0
    participation: float = 1.0
    clients_per_chunk: int | None = None
    eval_batch_size: int = 48


class FedAvgState(NamedTuple):
    client_params: Any  # pytree of [1, ...]
    num_steps: jax.Array  # [] int32, optimisation steps so far


def gru_fed_avg(
    config: FedAvgConfig, aggregate: aggregation.Aggregator = aggregation.weighted_mean
) -> FederatedAlgorithm:
    """GRU + FedAvg on traffic; another aggregator makes another method."""
    model = gru_seq2seq.Seq2Seq(config.hidden_size, 0, config.num_layers)
    update = forecasting.client_update(
        model,
        optax.adam(config.learning_rate),
        batch_size=config.batch_size,
        num_epochs=config.client_rounds,
        sampling_decay=config.sampling_decay,
    )

    def init(key: jax.Array, data: TrafficData) -> FedAvgState:
        params = gru_seq2seq.init_params(model, key)
        num_clients = len(data.client_ids)
        return FedAvgState(
            aggregation.initial(aggregate, params, num_clients), jnp.int32(0)
        )

    def round_(state: FedAvgState, data: TrafficData, key: jax.Array):
        num_clients, num_windows = len(data.client_ids), len(data.starts)
        params, loss = federated_round(
            update,
            aggregate,
            participation=config.participation,
            clients_per_chunk=config.clients_per_chunk,
        )(
            state.client_params,
            forecasting.ClientData(data.speed, no_embeddings(data, num_clients)),
            data.client_ids,
            data.client_weights,
            key,
            data,
            state.num_steps,
        )
        steps = forecasting.steps_per_epoch(num_windows, config.batch_size)
        num_steps = state.num_steps + config.client_rounds * steps
        return FedAvgState(params, num_steps), {"train_loss": loss}

    def predict_batch(state: FedAvgState, data: TrafficData, starts: jax.Array):
        inputs, targets = forecasting.gather_all(data, starts)

        def forecast(params, inputs, targets):
            embedding = jnp.zeros((inputs.shape[1], 0))
            feed_truth = jnp.zeros(len(targets), bool)
            outputs = model.apply(
                {"params": params}, inputs, embedding, targets, feed_truth
            )
            return outputs[..., None]

        outputs = forecasting.apply_models(
            forecast, state.client_params, inputs, targets
        )
        return jnp.swapaxes(outputs[..., 0], 1, 2) * data.std + data.mean

    return FederatedAlgorithm(
        init=init,
        round=round_,
        evaluate=forecasting.evaluate_forecasts(predict_batch, config.eval_batch_size),
        predict=forecasting.predict_forecasts(predict_batch, config.eval_batch_size),
    )


def no_embeddings(data: TrafficData, num_clients: int) -> jax.Array:
    """Embeddings of width 0, for models without a server part."""
    return jnp.zeros((num_clients, len(data.starts), 0), jnp.float32)
