"""GRU + FedAvg and GRU (local), baselines of CNFGNN's Table 7.

Federated averaging (McMahan et al., AISTATS 2017, Algorithm 1) of a GRU
encoder-decoder, one local pass a round, and the same without averages: Meng,
Rambhatla, Liu, "Cross-Node Federated Graph Neural Network for Spatio-Temporal Data
Modeling", KDD 2021. Differences from the paper: none known. From the released code: a
fresh optimizer each round in both, and `sampling_decay`, which under FedAvg is 1: no
scheduled sampling after the first steps.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import aggregation, batching
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.federated import federated_round
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.windows import TrafficData
from fedjax_graph.models import seq2seq
from fedjax_graph.tasks import forecasting


@dataclasses.dataclass(frozen=True)
class GRUConfig:
    """What all methods of the plain GRU have; defaults: the 63K model."""

    hidden_size: int = 100  # 200 for the 727K model
    num_layers: int = 1  # 2 for the 727K model
    embedding_size: int = 0  # width of zeros where CNFGNN has h_G
    learning_rate: float = 1e-3
    batch_size: int = 128
    sampling_decay: float = 1000.0
    eval_batch_size: int = 48
    masked_loss: bool = False  # leaves missing readings out


@dataclasses.dataclass(frozen=True)
class GRULocalConfig(GRUConfig):
    """Hyper-parameters of `gru_local`."""

    client_rounds: int = 1
    participation: float = 1.0
    clients_per_chunk: int | None = None


@dataclasses.dataclass(frozen=True)
class GRUFedAvgConfig(GRULocalConfig):
    """Hyper-parameters of `gru_fed_avg`."""

    sampling_decay: float = 1.0


class GRUFedAvgState(NamedTuple):
    client_params: Any  # pytree of [1, ...], or [K, ...] without averages
    num_steps: jax.Array  # [] int32, optimization steps so far


def gru_fed_avg(
    config: GRULocalConfig,
    aggregate: aggregation.Aggregator = aggregation.weighted_mean,
) -> FederatedAlgorithm:
    """GRU + FedAvg on traffic; another aggregator makes another method."""
    update = forecasting.client_update(
        make_model(config),
        optax.adam(config.learning_rate),
        batch_size=config.batch_size,
        num_epochs=config.client_rounds,
        sampling_decay=config.sampling_decay,
        masked_loss=config.masked_loss,
    )

    def round_(state: GRUFedAvgState, data: TrafficData, key: jax.Array):
        params, loss = federated_round(
            update,
            aggregate,
            participation=config.participation,
            clients_per_chunk=config.clients_per_chunk,
        )(
            state.client_params,
            client_data(config, data),
            data.client_ids,
            data.client_weights,
            key,
            data,
            state.num_steps,
        )
        steps = batching.steps_per_epoch(len(data.starts), config.batch_size)
        num_steps = state.num_steps + config.client_rounds * steps
        return GRUFedAvgState(params, num_steps), {"train_loss": loss}

    return scored(
        config,
        first_state(config, aggregate),
        round_,
        clients_per_chunk=config.clients_per_chunk,
    )


def gru_local(config: GRULocalConfig) -> FederatedAlgorithm:
    """GRU (local): each client its own model and data, nothing crosses."""
    return gru_fed_avg(config, aggregation.none)


# --- What all methods of the plain GRU share ------------------------------------------


def make_model(config: GRUConfig) -> seq2seq.Seq2Seq:
    return seq2seq.Seq2Seq(config.hidden_size, config.embedding_size, config.num_layers)


def first_params(config: GRUConfig, key: jax.Array):
    """Everybody's first model, a pytree of [1, ...]."""
    params = seq2seq.init_params(make_model(config), key)
    return jax.tree.map(lambda x: x[None], params)


def first_state(config: GRUConfig, aggregate: aggregation.Aggregator):
    """Factory of `init`, with as many models as `aggregate` returns."""

    def init(key: jax.Array, data: TrafficData) -> GRUFedAvgState:
        params = first_params(config, key)
        params = aggregation.initial(aggregate, params, len(data.client_ids))
        return GRUFedAvgState(params, jnp.int32(0))

    return init


def client_data(config: GRUConfig, data: TrafficData) -> forecasting.ClientData:
    """All clients' series, with zeros for h_G."""
    shape = (len(data.client_ids), len(data.starts), config.embedding_size)
    return forecasting.ClientData(data.speed, jnp.zeros(shape, jnp.float32))


def apply_all(
    config: GRUConfig,
    client_params,
    data: TrafficData,
    starts: jax.Array,
    feed_truth: jax.Array,
    clients_per_chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """All clients' models on the windows at `starts` [B].

    Returns:
      Normalised outputs and targets, both [K, 12, B].
    """
    inputs, targets = forecasting.gather_all(data, starts)

    def apply_one(params, inputs, targets):
        embedding = jnp.zeros((inputs.shape[1], config.embedding_size))
        outputs = make_model(config).apply(
            {"params": params}, inputs, embedding, targets, feed_truth
        )
        return outputs[..., None]

    chunk = forecasting.own_chunk(client_params, clients_per_chunk)
    outputs = forecasting.apply_models(
        apply_one, client_params, inputs, targets, clients_per_chunk=chunk
    )
    return outputs[..., 0], targets[..., 0]


def scored(
    config: GRUConfig, init, round_, clients_per_chunk: int | None = None
) -> FederatedAlgorithm:
    """A method whose states have `client_params` of the plain GRU.

    Args:
      config: model, and batches of the evaluation.
      init, round_: of the method.
      clients_per_chunk: of forecasts, where clients have models of their own.
    """

    def predict_batch(state, data: TrafficData, starts: jax.Array):
        outputs, _ = apply_all(
            config,
            state.client_params,
            data,
            starts,
            jnp.zeros(windows.TARGET_STEPS, bool),
            clients_per_chunk,
        )
        return jnp.swapaxes(outputs, 1, 2) * data.std + data.mean

    return forecasting.forecaster(
        init, round_, predict_batch, config.eval_batch_size, config.masked_loss
    )
