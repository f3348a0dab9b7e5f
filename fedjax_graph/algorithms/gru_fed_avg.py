"""GRU + FedAvg, the baseline of CNFGNN's Table 7.

Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1) of a GRU
encoder-decoder, one local pass a round: Meng, Rambhatla, Liu, "Cross-Node Federated
Graph Neural Network for Spatio-Temporal Data Modeling", KDD 2021. Differences from the
paper: none known. From the released code: `sampling_decay` is 1, which is no scheduled
sampling after the first steps.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph import aggregation, forecasting
from fedjax_graph.algorithm import FederatedAlgorithm
from fedjax_graph.data.windows import TrafficData
from fedjax_graph.federated import federated_round
from fedjax_graph.models import gru_seq2seq


@dataclasses.dataclass(frozen=True)
class GRUFedAvgConfig:
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


class GRUFedAvgState(NamedTuple):
    client_params: Any  # pytree of [1, ...]
    num_steps: jax.Array  # [] int32, optimisation steps so far


def gru_fed_avg(
    config: GRUFedAvgConfig,
    aggregate: aggregation.Aggregator = aggregation.weighted_mean,
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

    def init(key: jax.Array, data: TrafficData) -> GRUFedAvgState:
        params = gru_seq2seq.init_params(model, key)
        params = jax.tree.map(lambda x: x[None], params)
        num_clients = len(data.client_ids)
        return GRUFedAvgState(
            aggregation.initial(aggregate, params, num_clients), jnp.int32(0)
        )

    def round_(state: GRUFedAvgState, data: TrafficData, key: jax.Array):
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
        return GRUFedAvgState(params, num_steps), {"train_loss": loss}

    def predict_batch(state: GRUFedAvgState, data: TrafficData, starts: jax.Array):
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
