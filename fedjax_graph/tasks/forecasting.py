"""Forecasts as a task's outputs: predictions of all clients, and their errors.

Every traffic method supplies `predict_batch(state, data, starts) -> [K, B, 12]` in
the unit of the readings, and gets `evaluate` and `predict` from here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import (
    aggregation,
    arrays,
    batching,
    client_rows,
    clients,
    mesh,
    sharding,
)
from fedjax_graph.core.algorithm import FederatedAlgorithm, Metrics
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.masks import masked_mean
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.time_steps import TimeStep
from fedjax_graph.data.traffic.windows import TARGET_STEPS, TrafficData, Windows

PredictBatch = Callable[[Any, TrafficData, jax.Array], jax.Array]
HORIZONS = (3, 6, TARGET_STEPS)  # steps ahead that are scored on their own


# --- All clients at once -------------------------------------------------------------


def gather_all(data: TrafficData, starts: jax.Array) -> Windows:
    """The windows at `starts` [B] of all clients: [K, 12, B, 2]."""
    steps = windows.window_steps(starts)
    readings = client_rows.columns(data.speed, steps)
    return jax.vmap(lambda one: windows.of_readings(data, one, steps))(readings)


def truth_of_all(data: TrafficData, starts: jax.Array) -> jax.Array:
    """`windows.truth` at `starts` [B] of all clients: [K, 12, B]."""
    return client_rows.columns(data.speed, windows.target_steps(starts))


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

    Raises:
      InputError: if there is neither one model for all nor one for each client.
    """
    num_clients = args[0].shape[0]
    num_models = aggregation.num_models(stacked_params)
    has_own = num_models == num_clients
    if not has_own and num_models != 1:
        raise InputError(
            f"{num_models} models for {num_clients} clients, expected one for all or "
            "one for each"
        )
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
    squared: jax.Array  # [K, 12] square of the unit of the readings
    absolute: jax.Array  # [K, 12] unit of the readings
    masked_count: jax.Array  # [K, 12], readings that are not missing
    masked_squared: jax.Array
    masked_absolute: jax.Array
    masked_relative: jax.Array


def error_sums(forecast: jax.Array, truth: jax.Array, weights: jax.Array) -> ErrorSums:
    """Sums of errors.

    Args:
      forecast: [K, B, 12] in the unit of the readings.
      truth: [K, B, 12] likewise; 0 = missing.
      weights: [K, B], 1 where the forecast counts.

    Raises:
      InputError: if they have not these shapes.
    """
    arrays.check_same_shape(forecast=forecast, truth=truth)
    arrays.check_shape("weights", weights, forecast.shape[:2])
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
    """MAE, RMSE and MAPE (percent) without missing readings, of sums of any shape.

    NaN where all are missing.
    """
    count = jnp.maximum(sums.masked_count, 1)
    errors = {
        "mae": sums.masked_absolute / count,
        "rmse": jnp.sqrt(sums.masked_squared / count),
        "mape": 100 * sums.masked_relative / count,
    }
    is_read = sums.masked_count > 0
    return {name: jnp.where(is_read, x, jnp.nan) for name, x in errors.items()}


def client_errors(
    sums: ErrorSums, steps_ahead: int = TARGET_STEPS
) -> dict[str, jax.Array]:
    """`masked_errors` of each client so many steps ahead, averaged over the clients.

    Clients without a reading to compare with are left out; NaN where all are.

    Raises:
      InputError: if there is no such horizon.
    """
    if not 1 <= steps_ahead <= TARGET_STEPS:
        raise InputError(
            f"steps_ahead={steps_ahead}: expected 1 to {TARGET_STEPS}, as forecast"
        )
    at = jax.tree.map(lambda x: x[:, steps_ahead - 1], sums)
    has_any = at.masked_count > 0
    means = {k: masked_mean(x, has_any) for k, x in masked_errors(at).items()}
    return {k: jnp.where(jnp.any(has_any), x, jnp.nan) for k, x in means.items()}


def error_metrics(
    sums: ErrorSums, std: jax.Array, step: TimeStep, masked_loss: bool = False
) -> dict[str, Any]:
    """The paper's figures and those of the traffic literature, from sums.

    `rmse` and `mae` run over everything, missing readings (0) included, as in the
    paper. `masked` leaves them out, and so does `loss` under `masked_loss`; its keys
    are the minutes ahead of `HORIZONS`, and `all`. MAPE is in percent, the others in
    the unit of the readings. Over no window at all `loss`, `rmse` and `mae` are NaN, so
    that no round is chosen by it, and so is what leaves out all readings.

    Args:
      sums: of all windows.
      std: of the readings, the unit of `loss`.
      step: from one reading to the next.
      masked_loss: whether missing readings leave `loss`.
    """
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)  # over clients, [12]
    squared = jnp.sum(sums.squared) / jnp.sum(sums.count)
    at = {
        step.minutes(n): masked_errors(jax.tree.map(lambda x, n=n: x[n - 1], sums))
        for n in HORIZONS
    }
    in_all = jax.tree.map(jnp.sum, sums)
    masked = {**at, "all": masked_errors(in_all)}
    squared_loss = masked["all"]["rmse"] ** 2 if masked_loss else squared
    return {
        "loss": squared_loss / std**2,
        "rmse": jnp.sqrt(squared),
        "mae": jnp.sum(sums.absolute) / jnp.sum(sums.count),
        "rmse_by_horizon": jnp.sqrt(sums.squared / sums.count),
        "masked": masked,
    }


def evaluate_forecasts(
    predict_batch: PredictBatch,
    batch_size: int,
    metrics: Callable[[ErrorSums, jax.Array, TimeStep], dict[str, Any]] = error_metrics,
) -> Callable[[Any, TrafficData], Metrics]:
    """Factory of `evaluate`: errors over all windows, one batch at a time.

    Args:
      predict_batch: see `forecaster`.
      batch_size: windows at a time.
      metrics: (sums, standard deviation of the readings, time between them) -> scores.
    """

    def sums(state, data, starts, mask):  # [batches, B]
        real = (data.client_weights > 0).astype(jnp.float32)

        def step(sums, batch):
            starts, mask = batch
            forecast = predict_batch(state, data, starts)
            truth = jnp.swapaxes(truth_of_all(data, starts), 1, 2)  # [K, B, 12]
            new = error_sums(forecast, truth, real[:, None] * mask)
            return jax.tree.map(jnp.add, sums, new), None

        zeros = jnp.zeros((len(data.client_ids), TARGET_STEPS))
        start = mesh.varying(ErrorSums(*[zeros] * len(ErrorSums._fields)))
        return jax.lax.scan(step, start, (starts, mask))[0]

    def evaluate(state, data: TrafficData):
        starts, mask = batching.batches(data.starts, mesh.share_size(batch_size))
        extra = ((0, mesh.padded_size(len(starts)) - len(starts)), (0, 0))
        total = sharding.sum_parts(sums, in_axes=(None, None, 0, 0))(
            state, data, jnp.pad(starts, extra), jnp.pad(mask, extra)
        )
        return metrics(total, data.std, data.step)

    return evaluate


def predict_forecasts(
    predict_batch: PredictBatch, batch_size: int
) -> Callable[[Any, TrafficData], jax.Array]:
    """Factory of `predict`: forecasts [S, K, 12] for all windows of a split."""

    def forecast_all(starts, state, data):  # [batches, B]
        return jax.lax.map(lambda s: predict_batch(state, data, s), starts)

    def predict(state, data: TrafficData):
        starts, _ = batching.batches(data.starts, mesh.share_size(batch_size))
        forecasts = sharding.concat_parts(forecast_all)(starts, shared=(state, data))
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
      predict_batch: (state, data, starts [B]) -> [K, B, 12], forecasts.
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
