"""Forecasts without training: the yardsticks that every method must beat.

Persistence repeats the last reading. The historical average repeats the mean of the
slot of the week in the training part (missing readings left out), as in Li, Yu,
Shahabi, Liu, "Diffusion Convolutional Recurrent Neural Network", ICLR 2018. A slot of
the week never seen falls back to the slot of the day, and that to the sensor's mean.
Both stay on the client: nothing is exchanged.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_graph.core import client_rows
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.data.traffic.windows import INPUT_STEPS, TARGET_STEPS, WINDOW_STEPS
from fedjax_graph.tasks import forecasting

SLOTS_PER_DAY, SLOTS_PER_WEEK = 288, 2016


@dataclasses.dataclass(frozen=True)
class NaiveConfig(Checked):
    """Configures predictors that learn nothing: windows that are scored at once."""

    eval_batch_size: int = limited(48, lower=1)


def _no_round(state, data, key):
    del data, key
    return state, {"train_loss": jnp.float32(0)}


def _untrained(init, predict_batch, config: NaiveConfig) -> FederatedAlgorithm:
    return forecasting.forecaster(
        init, _no_round, predict_batch, config.eval_batch_size
    )


def persistence(config: NaiveConfig) -> FederatedAlgorithm:
    """The last reading, missing or not, for all 12 steps."""

    def init(key, data):
        del key, data
        return jnp.float32(0)  # nothing to remember; a leaf for the axis of seeds

    def predict_batch(state, data, starts):
        del state
        last = client_rows.columns(data.speed, starts + INPUT_STEPS - 1)  # [K, B]
        return jnp.broadcast_to(last[..., None], (*last.shape, TARGET_STEPS))

    return _untrained(init, predict_batch, config)


def historical_average(config: NaiveConfig) -> FederatedAlgorithm:
    """Mean of the slot of the week; the state is that table, [K, 2016]."""

    def init(key, data):
        del key
        steps = data.starts[0] + jnp.arange(len(data.starts) + WINDOW_STEPS - 1)
        slots = data.week_slot[steps]
        speed = data.speed[:, steps].T  # [T, K]
        present = (speed != 0).astype(jnp.float32)

        def sums(slots, num_slots):
            total = jax.ops.segment_sum(present * speed, slots, num_slots)
            return total, jax.ops.segment_sum(present, slots, num_slots)

        def mean_or(fallback, total, count):
            return jnp.where(count > 0, total / jnp.maximum(count, 1), fallback)

        overall = mean_or(data.mean, jnp.sum(present * speed, 0), jnp.sum(present, 0))
        by_day = mean_or(overall, *sums(slots % SLOTS_PER_DAY, SLOTS_PER_DAY))
        days = SLOTS_PER_WEEK // SLOTS_PER_DAY
        by_week = mean_or(jnp.tile(by_day, (days, 1)), *sums(slots, SLOTS_PER_WEEK))
        return by_week.T

    def predict_batch(table, data, starts):
        steps = starts[:, None] + INPUT_STEPS + jnp.arange(TARGET_STEPS)
        return table[:, data.week_slot[steps]]

    return _untrained(init, predict_batch, config)
