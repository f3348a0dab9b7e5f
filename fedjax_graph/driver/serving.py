"""Forecasts from a run's checkpoint, or a pretrained model, and the last 12 readings.

forecaster = load_forecaster("runs/my_run", "cnfgnn")
ahead = forecaster(readings, timestamps)  # [12, N] and [12] -> [12, N]
print(forecaster.unit, forecaster.step)  # of both: mph, 5 min
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core.errors import InputError, one_line
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.time_steps import TimeStep, as_stamps
from fedjax_graph.driver import pretrained


@dataclasses.dataclass(frozen=True)
class Forecaster:
    """Forecasts the next 12 readings of a network from the last 12."""

    predict: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """Readings [12, N] and time stamps [12] that fit -> forecasts [12, N]."""
    sensor_ids: np.ndarray  # [N], in the order of the readings
    unit: str  # of readings and forecasts
    step: TimeStep  # between them

    def __call__(self, readings: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        """Forecasts.

        Args:
          readings: [12, N] the last ones, in `unit`; 0 or NaN = missing.
          timestamps: [12] datetime64, `step` apart.

        Returns:
          The next 12 readings [12, N].

        Raises:
          InputError: if readings or time stamps have the wrong shape or make no sense.
        """
        num_sensors = len(self.sensor_ids)
        return self.predict(*_checked(readings, timestamps, num_sensors, self.step))


def load_forecaster(workdir: str | pathlib.Path, method: str = "cnfgnn") -> Forecaster:
    """Loads the best state of a run (of its first seed), or a pretrained model.

    Of several processes all have to call it, and the forecaster as well.

    Args:
      workdir: of a run of `experiments.cnfgnn`, or of `experiments.sfl` on traffic; or
        one of `pretrained.names()`, or a file that `pretrained.pack` wrote.
      method: a trained method of that run; a pretrained model knows its own.

    Returns:
      A function of the last 12 readings and their time stamps, which says their unit
      and the step between them.

    Raises:
      InputError: if there is no such run or model, it cannot be read or its method is
        not registered.
    """
    if str(workdir) in pretrained.names() or str(workdir).endswith(".npz"):
        with tempfile.TemporaryDirectory() as folder:
            method = pretrained.unpack(str(workdir), pathlib.Path(folder))
            return load_forecaster(folder, method)
    network, _, algorithm, seeds = pretrained.read_run(pathlib.Path(workdir), method)
    state = jax.tree.map(lambda x: jnp.asarray(x[0]), seeds.best_state)
    step = network.step

    @jax.jit
    def predict(state, data):
        return algorithm.predict(state, algorithm.prepared(data))

    def forecast(readings: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        ahead = timestamps[-1] + step.delta * np.arange(1, windows.TARGET_STEPS + 1)
        speed = np.concatenate([readings, np.zeros_like(readings)])
        data = network.data(speed, np.concatenate([timestamps, ahead]))
        return np.asarray(predict(state, data)[0]).T

    return Forecaster(forecast, network.arrays["sensor_ids"], network.unit, step)


def _checked(
    readings: np.ndarray, timestamps: np.ndarray, num_clients: int, step: TimeStep
) -> tuple[np.ndarray, np.ndarray]:
    """The last readings [12, N] and their stamps [12], if forecasts can follow."""
    try:
        readings = np.nan_to_num(np.asarray(readings, np.float32), posinf=np.inf)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"readings: expected numbers ({one_line(str(error))})"
        ) from error
    timestamps = np.asarray(timestamps)
    if readings.shape != (windows.INPUT_STEPS, num_clients):
        raise InputError(
            f"readings have shape {readings.shape}, expected "
            f"{(windows.INPUT_STEPS, num_clients)}: 12 steps of every sensor"
        )
    if timestamps.shape != (windows.INPUT_STEPS,):
        raise InputError(
            f"timestamps have shape {timestamps.shape}, expected "
            f"{(windows.INPUT_STEPS,)}: one for each step of the readings"
        )
    timestamps = as_stamps("timestamps", timestamps)
    if not np.all(np.diff(timestamps) == step.delta):  # NaT is no step
        raise InputError(
            f"timestamps: expected steps of {step.words(minutes=' minutes')}, as in "
            "training"
        )
    if not np.all((readings >= 0) & np.isfinite(readings)):
        raise InputError(
            "readings are infinite or negative; a missing reading is 0 or NaN"
        )
    return readings, timestamps
