"""Joint end-to-end training of CNFGNN's two halves: SL, SL + FedAvg and GRU + GN.

Meng, Rambhatla, Liu, "Cross-Node Federated Graph Neural Network for Spatio-Temporal
Data Modeling", KDD 2021, Section 3.2.3 and Table 10; split learning itself is Singh,
Vepakomma, Gupta, Raskar, arXiv:1909.09145. A round is one pass over all windows. For
each minibatch of windows h_c goes up, h_G comes down, its gradient goes up and that of
h_c comes down (4 n H bytes a round, Eq. 8), and both halves take a step.

- `split_learning`: each client has an encoder-decoder of its own.
- `split_learning_fedavg`: these are averaged once a round (2 n W more, Eq. 9), or with
  `average_every_step` after every minibatch, as in the released code.
- `gru_gn`: one encoder-decoder for all, data in one place, nothing crosses. Its
  gradient is that of the sum of the clients' losses, whose scale Adam does not see.

Differences from the paper: none known. Where it is silent: both optimizers last over
the rounds, and under FedAvg each client keeps its own moments. From the released code:
scheduled sampling. It takes 64 or 128 windows a minibatch, here as many as CNFGNN's
server unless told otherwise.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.cnfgnn.cnfgnn import (
    HalvesConfig,
    SplitConfig,
    make_models,
    split_algorithm,
)
from fedjax_graph.algorithms.cnfgnn.exchange import real_share
from fedjax_graph.algorithms.cnfgnn.joint_training import (
    joint_training,
    of_each_client,
    side_by_side,
)
from fedjax_graph.core import aggregation, communication
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.clients import Cohort
from fedjax_graph.data.traffic.windows import TrafficData
from fedjax_graph.tasks import forecasting

OptStates = tuple[optax.OptState, optax.OptState]  # of clients, of the server


@dataclasses.dataclass(frozen=True)
class SplitLearningFedAvgConfig(SplitConfig):
    """Configures split learning whose clients average their models."""

    average_every_step: bool = False  # or once a round


class SplitLearningState(NamedTuple):
    """Holds both halves of the model and their optimizers' states."""

    client_params: Any  # pytree of [1, ...], or [K, ...] without averages
    server_params: Any
    client_opt_state: optax.OptState  # [K, ...], or [1, ...] of one model for all
    server_opt_state: optax.OptState
    num_steps: jax.Array  # [] int32, optimization steps so far


def split_learning(config: SplitConfig) -> FederatedAlgorithm:
    """SL: each client keeps its own encoder-decoder."""
    return _joint_training(config)


def split_learning_fedavg(config: SplitLearningFedAvgConfig) -> FederatedAlgorithm:
    """SL + FedAvg: the encoder-decoders are averaged, weighted by N_i."""
    average_every = "step" if config.average_every_step else "round"
    return _joint_training(config, average_every=average_every)


def gru_gn(config: HalvesConfig) -> FederatedAlgorithm:
    """GRU + GN (centralized): one encoder-decoder for all nodes."""
    return _joint_training(config, is_centralized=True)


def average(client_params: Any, data: TrafficData) -> Any:
    """FedAvg over all clients, [K, ...] -> [1, ...]; each model crosses twice.

    Where all weights are 0 no client has trained, and the first one's model is all's.
    """
    num_clients = len(data.client_ids)
    everybody = Cohort(jnp.arange(num_clients), data.client_weights)
    mean = aggregation.weighted_mean(communication.up(client_params), everybody)
    is_any = jnp.any(data.client_weights > 0)
    mean = jax.tree.map(lambda x, m: jnp.where(is_any, m, x[:1]), client_params, mean)
    return communication.down(mean, num_clients)


def joint_gradients(
    config: HalvesConfig, is_centralized: bool = False
) -> Callable[..., Any]:
    """Factory of loss and gradients of both halves for a minibatch.

    Args:
      config: a `SplitConfig` unless centralized.
      is_centralized: whether nothing crosses.

    Returns:
      What `joint_training` takes, of (client_params, server_params).
    """
    models = make_models(config)
    bits = models.exchange_bits

    def gradients(params, data, batch):
        client_params, server_params = params
        share = real_share(data, config.server_batch_size)
        share = Fraction(0) if is_centralized else share
        gathered = forecasting.gather_all(data, batch.starts)
        h_c, pull_encoders = jax.vjp(
            lambda params: models.encode(params, gathered.inputs), client_params
        )
        h_g, pull_network = jax.vjp(
            lambda params, h_c: models.embed(params, data, h_c),
            server_params,
            communication.up(h_c, share, bits),
        )

        def loss(client_params, h_c, h_g):
            outputs, targets = models.decode(
                client_params, gathered, h_c, h_g, batch.feed_truth
            )
            return jnp.sum(batch.weights * (outputs - targets) ** 2)

        value, (decoder_grads, h_c_grads, h_g_grads) = jax.value_and_grad(
            loss, argnums=(0, 1, 2)
        )(client_params, h_c, communication.down(h_g, share, bits))
        server_grads, from_server = pull_network(
            communication.up(h_g_grads, share, bits)
        )
        h_c_grads += communication.down(from_server, share, bits)
        (encoder_grads,) = pull_encoders(h_c_grads)
        client_grads = jax.tree.map(jnp.add, decoder_grads, encoder_grads)
        return value, (client_grads, server_grads)

    return gradients


def _joint_training(
    config: HalvesConfig,
    *,
    average_every: Literal["never", "step", "round"] = "never",
    is_centralized: bool = False,
) -> FederatedAlgorithm:
    """The general method.

    Args:
      config: hyper-parameters, a `SplitConfig` unless centralized.
      average_every: when the clients' models are averaged.
      is_centralized: whether there is one model for all, and no communication.
    """
    models = make_models(config)
    optimizer = side_by_side(
        of_each_client(config.client_optimizer), config.server_optimizer.build()
    )

    def own_models(client_params, data):
        if is_centralized:
            return client_params
        return aggregation.broadcast(client_params, len(data.client_ids))

    def init(key: jax.Array, data: TrafficData) -> SplitLearningState:
        client_params, server_params = models.init(key)
        rows = own_models(client_params, data)
        opt_states = cast(OptStates, optimizer.init((rows, server_params)))
        return SplitLearningState(
            rows if average_every == "never" else client_params,
            server_params,
            opt_states[0],
            opt_states[1],
            num_steps=jnp.int32(0),
        )

    def after_step(params, data):
        if average_every != "step":
            return params
        client_params, server_params = params
        return own_models(average(client_params, data), data), server_params

    train = joint_training(
        joint_gradients(config, is_centralized),
        optimizer,
        batch_size=config.server_batch_size,
        num_epochs=1,
        sampling_decay=config.sampling_decay,
        masked_loss=config.masked_loss,
        after_step=after_step,
    )

    def round_(state: SplitLearningState, data: TrafficData, key: jax.Array):
        (client_params, server_params), opt_states, loss, steps = train(
            (own_models(state.client_params, data), state.server_params),
            (state.client_opt_state, state.server_opt_state),
            data,
            key,
            state.num_steps,
        )
        if average_every == "step":
            client_params = jax.tree.map(lambda x: x[:1], client_params)
        elif average_every == "round":
            client_params = average(client_params, data)
        num_steps = state.num_steps + steps
        client_opt_state, server_opt_state = cast(OptStates, opt_states)
        state = SplitLearningState(
            client_params, server_params, client_opt_state, server_opt_state, num_steps
        )
        return state, {"train_loss": loss}

    return split_algorithm(config, init, round_)
