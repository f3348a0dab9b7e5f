"""Forecasting as a task: the client's loss and update, predictions, and their errors.

Every traffic method supplies `predict_batch(state, data, starts) -> [K, B, 12]` in mph
and gets `evaluate` and `predict` from here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_graph.core import aggregation, batching, clients, mesh
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.batching import shuffled_batches
from fedjax_graph.core.local import local_update
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.windows import TARGET_STEPS, TrafficData, Windows
from fedjax_graph.models.seq2seq import Seq2Seq

PredictBatch = Callable[[Any, TrafficData, jax.Array], jax.Array]
HORIZONS = {"15": 3, "30": 6, "60": 12}  # minutes ahead: steps of 5 minutes


# --- Training on one client ----------------------------------------------------------


class ClientData(NamedTuple):
    """What one client trains on (with a leading client axis where stacked)."""

    speed: jax.Array  # [T] mph
    embeddings: jax.Array  # [S, E], h_G of each training window; E = 0 without server


class Batch(NamedTuple):
    """One minibatch of a client's windows."""

    indices: jax.Array  # [B] int32, indices into the split's windows
    mask: jax.Array  # [B] float32, 0 for padding
    feed_truth: jax.Array  # [12] bool


def sampling_probability(step: jax.Array, decay: float) -> jax.Array:
    """Probability k / (k + exp(i / k)) of feeding the truth at optimization step i.

    Bengio et al., "Scheduled Sampling for Sequence Prediction with Recurrent Neural
    Networks", NeurIPS 2015: inverse sigmoid decay.
    """
    return decay / (decay + jnp.exp(step / decay))


def feed_draws(
    key: jax.Array, num_steps: int, first_step: jax.Array, decay: float
) -> jax.Array:
    """Whether the truth is fed, [num_steps, 12] bool, from `first_step` on."""
    probability = sampling_probability(first_step + jnp.arange(num_steps), decay)
    draws = jax.random.uniform(key, (num_steps, TARGET_STEPS))
    return draws < probability[:, None]


def epoch_batches(
    key: jax.Array,
    num_windows: int,
    batch_size: int,
    num_epochs: int,
    first_step: jax.Array,
    sampling_decay: float,
) -> Batch:
    """Shuffled minibatches of `num_epochs` passes, `[num_epochs * steps, ...]`.

    The last batch of a pass is padded and masked. Each batch draws once for each
    decoding step whether the truth is fed.

    Args:
      key: of the client and round.
      num_windows: S, windows in a pass.
      batch_size: B.
      num_epochs: passes.
      first_step: [] optimization steps taken so far.
      sampling_decay: k of `sampling_probability`.
    """
    shuffle_key, feed_key = jax.random.split(key)
    indices, mask = shuffled_batches(shuffle_key, num_windows, batch_size, num_epochs)
    feed_truth = feed_draws(feed_key, len(indices), first_step, sampling_decay)
    return Batch(indices, mask, feed_truth)


def joint_batches(*args) -> Batch:
    """`epoch_batches`, padded to a size that the devices divide."""
    batches = epoch_batches(*args)
    size = batches.indices.shape[1]
    extra = ((0, 0), (0, mesh.padded_size(size) - size))
    return batches._replace(
        indices=jnp.pad(batches.indices, extra), mask=jnp.pad(batches.mask, extra)
    )


def target_weights(
    truth: jax.Array, mask: jax.Array, skip_missing: bool = False
) -> jax.Array:
    """Factors that make a sum over steps and windows the mean over those that count.

    Args:
      truth: [12, B] mph, what is to be forecast; 0 = missing.
      mask: [B], 0 for padding.
      skip_missing: whether missing readings do not count.

    Returns:
      [12, B].
    """
    counts = mask * (truth != 0) if skip_missing else mask * jnp.ones_like(truth)
    return counts / jnp.maximum(jnp.sum(counts), 1)


def joint_weights(
    data: TrafficData, batch: Batch, masked_loss: bool = False
) -> jax.Array:
    """Factors [K, 12, B] that make squared errors the sum of the clients' losses.

    Those of padded clients are 0.
    """

    def of_client(speed):
        truth = windows.truth(speed, data.starts[batch.indices])
        return target_weights(truth, batch.mask, masked_loss)

    real = (data.client_weights > 0).astype(jnp.float32)[:, None, None]
    return real * jax.vmap(of_client)(data.speed)


def client_update(
    model: Seq2Seq,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    num_epochs: int,
    sampling_decay: float,
    masked_loss: bool = False,
):
    """ClientUpdate of Algorithm 2: passes over one client's windows, h_G fixed.

    Args:
      model: the client's.
      optimizer: starts anew with each call.
      batch_size: windows in a minibatch.
      num_epochs: passes.
      sampling_decay: see `epoch_batches`.
      masked_loss: whether missing readings are left out of the loss.

    Returns:
      (params, ClientData, key, TrafficData, first_step) -> (params, mean loss).
    """

    def update(params, client, key, data, first_step):
        def loss(params, batch):
            starts = data.starts[batch.indices]
            inputs, targets = windows.gather(data, client.speed, starts)
            outputs = model.apply(
                {"params": params},
                inputs,
                client.embeddings[batch.indices],
                targets,
                batch.feed_truth,
            )
            truth = windows.truth(client.speed, starts)
            weights = target_weights(truth, batch.mask, masked_loss)
            return jnp.sum(weights * (outputs - targets[..., 0]) ** 2)

        minibatches = epoch_batches(
            key, len(data.starts), batch_size, num_epochs, first_step, sampling_decay
        )
        return local_update(loss, optimizer)(params, minibatches)

    return update


# --- All clients at once -------------------------------------------------------------


def gather_all(data: TrafficData, starts: jax.Array) -> Windows:
    """The windows at `starts` [B] of all clients: [K, 12, B, 2]."""
    return jax.vmap(lambda speed: windows.gather(data, speed, starts))(data.speed)


def apply_models(
    fn: Callable[..., jax.Array],
    stacked_params,
    *args,
    clients_per_chunk: int | None = None,
) -> jax.Array:
    """Applies each client's model to its data.

    One model for all folds the clients into the batch, one large product and not K,
    unless clients are to run in chunks: on a CPU a small model's states then stay in
    the cache.

    Args:
      fn: (params, *args) -> [..., B, F], of arguments [..., B, F'].
      stacked_params: pytree of [1, ...] or [K, ...], also in one tree.
      *args: arrays [K, ..., B, F'].
      clients_per_chunk: see `clients.map_axis`.

    Returns:
      [K, ..., B, F].
    """
    num_clients = args[0].shape[0]
    has_own = aggregation.num_models(stacked_params) == num_clients
    if has_own or clients_per_chunk is not None:
        own = aggregation.broadcast(stacked_params, num_clients)
        return clients.map_axis(fn, clients_per_chunk)(own, *args)
    params = jax.tree.map(lambda x: x[0], stacked_params)

    def fold(x):  # [K, ..., B, F] -> [..., K B, F]
        x = jnp.moveaxis(x, 0, -3)
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])

    folded = fn(params, *map(fold, args))
    unfolded = folded.reshape(*folded.shape[:-2], num_clients, -1, folded.shape[-1])
    return jnp.moveaxis(unfolded, -3, 0)


def own_chunk(stacked_params, clients_per_chunk: int | None) -> int | None:
    """`clients_per_chunk` where clients have models of their own; one model folds."""
    return clients_per_chunk if aggregation.num_models(stacked_params) > 1 else None


# --- Predictions and their errors ----------------------------------------------------


class ErrorSums(NamedTuple):
    """Sums over windows for each client and each of the 12 steps ahead."""

    count: jax.Array  # [K, 12]
    squared: jax.Array  # [K, 12] mph^2
    absolute: jax.Array  # [K, 12] mph
    masked_count: jax.Array  # [K, 12], readings that are not missing
    masked_squared: jax.Array
    masked_absolute: jax.Array
    masked_relative: jax.Array


def error_sums(forecast: jax.Array, truth: jax.Array, weights: jax.Array) -> ErrorSums:
    """Sums of errors.

    Args:
      forecast: [K, B, 12] mph.
      truth: [K, B, 12] mph; 0 = missing.
      weights: [K, B], 1 where the forecast counts.
    """
    error = forecast - truth
    weights = jnp.broadcast_to(weights[..., None], error.shape)
    present = weights * (truth != 0)
    relative = jnp.abs(error) / jnp.where(truth != 0, jnp.abs(truth), 1)

    def total(x):
        return jnp.sum(x, axis=1)

    return ErrorSums(
        count=total(weights),
        squared=total(weights * error**2),
        absolute=total(weights * jnp.abs(error)),
        masked_count=total(present),
        masked_squared=total(present * error**2),
        masked_absolute=total(present * jnp.abs(error)),
        masked_relative=total(present * relative),
    )


def masked_errors(sums: ErrorSums) -> dict[str, jax.Array]:
    """MAE, RMSE and MAPE (percent) without missing readings, of sums of any shape."""
    count = jnp.maximum(sums.masked_count, 1)
    return {
        "mae": sums.masked_absolute / count,
        "rmse": jnp.sqrt(sums.masked_squared / count),
        "mape": 100 * sums.masked_relative / count,
    }


def client_errors(sums: ErrorSums, minutes: str = "60") -> dict[str, jax.Array]:
    """`masked_errors` of each client at a horizon, averaged over the clients.

    Clients without a reading to compare with are left out.
    """
    at = jax.tree.map(lambda x: x[:, HORIZONS[minutes] - 1], sums)
    has_any = at.masked_count > 0
    num_clients = jnp.maximum(jnp.sum(has_any), 1)
    return jax.tree.map(
        lambda x: jnp.sum(jnp.where(has_any, x, 0)) / num_clients, masked_errors(at)
    )


def error_metrics(
    sums: ErrorSums, std: jax.Array, masked_loss: bool = False
) -> dict[str, Any]:
    """The paper's figures and those of the traffic literature, from sums.

    `rmse` and `mae` run over everything, missing readings (0) included, as in the
    paper. `masked` leaves them out, and so does `loss` under `masked_loss`. MAPE is in
    percent, the others in mph.
    """

    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)  # over clients, [12]
    squared = jnp.sum(sums.squared) / jnp.sum(sums.count)
    at = {
        minutes: masked_errors(jax.tree.map(lambda x, step=step: x[step - 1], sums))
        for minutes, step in HORIZONS.items()
    }
    masked = {**at, "all": masked_errors(jax.tree.map(jnp.sum, sums))}
    return {
        "loss": (masked["all"]["rmse"] ** 2 if masked_loss else squared) / std**2,
        "rmse": jnp.sqrt(squared),
        "mae": jnp.sum(sums.absolute) / jnp.sum(sums.count),
        "rmse_by_horizon": jnp.sqrt(sums.squared / sums.count),
        "masked": masked,
    }


def evaluate_forecasts(
    predict_batch: PredictBatch,
    batch_size: int,
    metrics: Callable[[ErrorSums, jax.Array], dict[str, Any]] = error_metrics,
):
    """Factory of `evaluate`: errors over all windows, one batch at a time."""

    def sums(state, data, starts, mask):  # [batches, B]
        real = (data.client_weights > 0).astype(jnp.float32)

        def step(sums, batch):
            starts, mask = batch
            forecast = predict_batch(state, data, starts)
            truth = jax.vmap(windows.truth, (0, None), 0)(data.speed, starts)
            truth = jnp.swapaxes(truth, 1, 2)  # [K, B, 12]
            new = error_sums(forecast, truth, real[:, None] * mask)
            return jax.tree.map(jnp.add, sums, new), None

        zeros = jnp.zeros((len(data.client_ids), TARGET_STEPS))
        start = ErrorSums(*[zeros] * len(ErrorSums._fields))
        return jax.lax.scan(step, start, (starts, mask))[0]

    def evaluate(state, data: TrafficData):
        starts, mask = batching.batches(data.starts, batch_size)
        extra = ((0, mesh.padded_size(len(starts)) - len(starts)), (0, 0))
        total = mesh.sum_parts(sums, in_axes=(None, None, 0, 0))(
            state, data, jnp.pad(starts, extra), jnp.pad(mask, extra)
        )
        return metrics(total, data.std)

    return evaluate


def predict_forecasts(predict_batch: PredictBatch, batch_size: int):
    """Factory of `predict`: forecasts [S, K, 12] in mph for all windows of a split."""

    def predict(state, data: TrafficData):
        starts, _ = batching.batches(data.starts, batch_size)
        forecasts = jax.lax.map(lambda s: predict_batch(state, data, s), starts)
        forecasts = jnp.swapaxes(forecasts, 1, 2)  # [batches, B, K, 12]
        return forecasts.reshape(-1, *forecasts.shape[2:])[: len(data.starts)]

    return predict


def forecaster(
    init,
    round_,
    predict_batch: PredictBatch,
    batch_size: int,
    masked_loss: bool = False,
) -> FederatedAlgorithm:
    """A method from how its states start, train and forecast.

    Args:
      init, round_: see `FederatedAlgorithm`.
      predict_batch: (state, data, starts [B]) -> [K, B, 12] in mph.
      batch_size: of an evaluation.
      masked_loss: see `error_metrics`.
    """
    metrics = functools.partial(error_metrics, masked_loss=masked_loss)
    return FederatedAlgorithm(
        init=init,
        round=round_,
        evaluate=evaluate_forecasts(predict_batch, batch_size, metrics),
        predict=predict_forecasts(predict_batch, batch_size),
    )
