"""GRU (centralized), a baseline of CNFGNN's Table 7.

Meng, Rambhatla, Liu, "Cross-Node Federated Graph Neural Network for Spatio-Temporal
Data Modeling", KDD 2021: one GRU encoder-decoder on the windows of all sensors in one
place; nothing crosses. A round is one pass, a minibatch is drawn from all pairs of a
sensor and a window, and the optimiser lasts over the rounds. Differences from the
paper: none known; its released code draws windows, and takes all sensors of each.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph import clients, devices, forecasting
from fedjax_graph.algorithm import FederatedAlgorithm
from fedjax_graph.algorithms.gru_fed_avg import (
    GRUConfig,
    first_params,
    make_model,
    scored,
)
from fedjax_graph.data import windows
from fedjax_graph.data.windows import TrafficData


class GRUCentralizedState(NamedTuple):
    client_params: Any  # pytree of [1, ...]
    opt_state: optax.OptState
    num_steps: jax.Array  # [] int32, optimisation steps so far


def gru_centralized(config: GRUConfig) -> FederatedAlgorithm:
    """One GRU for all sensors, trained on their pooled windows."""
    model, optimiser = make_model(config), optax.adam(config.learning_rate)

    def init(key: jax.Array, data: TrafficData) -> GRUCentralizedState:
        del data
        params = first_params(config, key)
        return GRUCentralizedState(params, optimiser.init(params), jnp.int32(0))

    def gradients(stacked_params, data, places, weights, feed_truth):
        owners, starts = jnp.divmod(places, len(data.starts))
        inputs, targets = windows.gather_pairs(data, owners, data.starts[starts])
        embedding = jnp.zeros((len(places), config.embedding_size))

        def loss(stacked_params):
            params = jax.tree.map(lambda x: x[0], stacked_params)
            outputs = model.apply(
                {"params": params}, inputs, embedding, targets, feed_truth
            )
            return jnp.sum(weights * (outputs - targets[..., 0]) ** 2)

        return jax.value_and_grad(loss)(stacked_params)

    def round_(state: GRUCentralizedState, data: TrafficData, key: jax.Array):
        def step(carry, batch):
            params, opt_state = carry
            owners, starts = jnp.divmod(batch.places, len(data.starts))
            truth = windows.truth_of_pairs(data, owners, data.starts[starts])
            weights = forecasting.target_weights(truth, batch.mask, config.masked_loss)
            loss, grads = devices.sum_parts(
                gradients, in_axes=(None, None, 0, 1, None)
            )(
                params,
                data,
                batch.places,
                weights,
                batch.feed_truth,
            )
            updates, opt_state = optimiser.update(grads, opt_state, params)
            moved = (optax.apply_updates(params, updates), opt_state)
            # Padded clients may have the last batches to themselves.
            is_real = jnp.sum(batch.mask) > 0
            kept = jax.tree.map(lambda x, new: jnp.where(is_real, new, x), carry, moved)
            return kept, (loss, is_real)

        batches = pooled_batches(config, data, key, state.num_steps)
        (params, opt_state), (losses, are_real) = jax.lax.scan(
            step, (state.client_params, state.opt_state), batches
        )
        num_real = jnp.sum(are_real, dtype=jnp.int32)
        state = GRUCentralizedState(params, opt_state, state.num_steps + num_real)
        return state, {"train_loss": jnp.sum(losses) / num_real}

    return scored(config, init, round_)


def pooled_batches(
    config: GRUConfig, data: TrafficData, key: jax.Array, first_step: jax.Array
) -> forecasting.Batch:
    """Shuffled minibatches of a pass over all pairs of a client and a window.

    The order is that of draws from the clients' keys. Pairs of clients of weight 0 come
    last, and are masked.

    Returns:
      Minibatches whose places are client * S + window.
    """
    shuffle_key, feed_key = jax.random.split(key)
    num_windows = len(data.starts)
    draws = jax.vmap(lambda key: jax.random.uniform(key, (num_windows,)))(
        clients.client_keys(shuffle_key, data.client_ids)
    )
    draws = jnp.where(data.client_weights[:, None] > 0, draws, 1)
    order = jnp.argsort(draws.reshape(-1)).astype(jnp.int32)
    places, mask = windows.batches(order, config.batch_size)
    mask = mask * (data.client_weights[places // num_windows] > 0)
    feed_truth = forecasting.feed_draws(
        feed_key, len(places), first_step, config.sampling_decay
    )
    return forecasting.for_all_devices(forecasting.Batch(places, mask, feed_truth))
