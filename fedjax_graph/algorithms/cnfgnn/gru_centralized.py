"""GRU (centralized), a baseline of CNFGNN's Table 7.

Meng, Rambhatla, Liu, "Cross-Node Federated Graph Neural Network for Spatio-Temporal
Data Modeling", KDD 2021: one GRU encoder-decoder on the windows of all sensors in one
place; nothing crosses. A round is one pass over the windows, and the optimizer lasts
over the rounds. Differences from the paper: none known. From the released code, where
it is silent: a minibatch is of windows, each of all sensors, and scheduled sampling.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.algorithms.cnfgnn.gru_fed_avg import (
    GRUConfig,
    apply_all,
    first_params,
    scored,
)
from fedjax_graph.core import mesh
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.data.traffic.windows import TrafficData
from fedjax_graph.tasks import forecasting


class GRUCentralizedState(NamedTuple):
    client_params: Any  # pytree of [1, ...]
    opt_state: optax.OptState
    num_steps: jax.Array  # [] int32, optimization steps so far


def gru_centralized(config: GRUConfig) -> FederatedAlgorithm:
    """One GRU for all sensors, trained on their windows together."""
    optimizer = optax.adam(config.learning_rate)

    def init(key: jax.Array, data: TrafficData) -> GRUCentralizedState:
        del data
        params = first_params(config, key)
        return GRUCentralizedState(params, optimizer.init(params), jnp.int32(0))

    def gradients(params, data, starts, weights, feed_truth):
        def loss(params):
            outputs, targets = apply_all(config, params, data, starts, feed_truth)
            return jnp.sum(weights * (outputs - targets) ** 2)

        return jax.value_and_grad(loss)(params)

    def round_(state: GRUCentralizedState, data: TrafficData, key: jax.Array):
        def step(carry, batch):
            params, opt_state = carry
            weights = forecasting.joint_weights(data, batch, config.masked_loss)
            loss, grads = mesh.sum_parts(gradients, in_axes=(None, None, 0, 2, None))(
                params, data, data.starts[batch.indices], weights, batch.feed_truth
            )
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        batches = forecasting.joint_batches(
            key,
            len(data.starts),
            config.batch_size,
            1,
            state.num_steps,
            config.sampling_decay,
        )
        (params, opt_state), losses = jax.lax.scan(
            step, (state.client_params, state.opt_state), batches
        )
        state = GRUCentralizedState(params, opt_state, state.num_steps + len(losses))
        loss = jnp.mean(losses) / jnp.sum(data.client_weights > 0)
        return state, {"train_loss": loss}

    return scored(config, init, round_)
