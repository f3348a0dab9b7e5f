"""Forecasts from a finished run: a checkpoint and the last 12 readings.

forecaster = load_forecaster("runs/my_run", "cnfgnn")
ahead = forecaster(readings, timestamps)  # [12, N] and [12] -> [12, N]
print(forecaster.unit, forecaster.step)  # of both: mph, 5 min
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph import algorithms
from fedjax_graph.core import graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.processes import by_first
from fedjax_graph.data import files
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.network import UNKNOWN_UNIT
from fedjax_graph.data.traffic.time_steps import TimeStep
from fedjax_graph.driver import rounds
from fedjax_graph.driver.checkpoint import Checkpoints


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


def save_network(path: pathlib.Path, dataset: Any, train: windows.TrafficData) -> None:
    """Keeps beside a run what a forecast needs besides parameters.

    Raises:
      InputError: if another network is kept there, with checkpoints trained on it.
    """
    network = {
        "sensor_ids": dataset.sensor_ids,
        "adjacency": dataset.adjacency,
        "mean": np.asarray(train.mean),
        "std": np.asarray(train.std),
        "step_ns": np.int64(dataset.step.seconds * 10**9),
        "unit": np.array(dataset.unit),
    }
    if len(train.speed) < len(dataset.sensor_ids):
        network["num_trained"] = np.asarray(len(train.speed))
    results = path.with_name("results.json")
    if path.exists() and (results.exists() or any(path.parent.glob("*/checkpoints/*"))):
        kept = files.read_npz(path)
        for key, value in network.items():
            if key in kept and not np.array_equal(kept[key], value):
                raise InputError(
                    f"{path}: the run was made on other data ({key} differs); resume "
                    "with the same dataset or start anew in another workdir"
                )
        if network.keys() <= kept.keys():  # else of an earlier version
            return
    _write_network(path, network)


@by_first
def _write_network(path: pathlib.Path, network: dict[str, np.ndarray]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        np.savez_compressed(file, **network)
    os.replace(temporary, path)


def load_forecaster(workdir: str | pathlib.Path, method: str = "cnfgnn") -> Forecaster:
    """Loads the best state of a run (of its first seed).

    Of several processes all have to call it, and the forecaster as well.

    Args:
      workdir: of a run of `experiments.cnfgnn`, or of `experiments.sfl` on traffic.
      method: a trained method of that run.

    Returns:
      A function of the last 12 readings and their time stamps, which says their unit
      and the step between them.

    Raises:
      InputError: if there is no such run, it cannot be read or its method is not
        registered.
    """
    workdir = pathlib.Path(workdir)
    folder, network = workdir / method / "checkpoints", workdir / "network.npz"
    if not folder.is_dir() or not network.exists():
        raise InputError(f"{workdir}: no finished round of {method} to forecast from")
    arrays = files.read_npz(network)
    with files.reading(network, "network of a run"):
        adjacency, mean, std = (arrays[key] for key in ("adjacency", "mean", "std"))
        sensor_ids = arrays["sensor_ids"]
        num_trained = int(arrays.get("num_trained", len(adjacency)))
        step = TimeStep(int(arrays["step_ns"]) // 10**9)
        unit = str(arrays.get("unit", UNKNOWN_UNIT))  # of a run that did not keep it
    num_clients = len(adjacency)

    def make_data(speed, timestamps) -> windows.TrafficData:
        return windows.TrafficData(
            speed=jnp.asarray(speed.T, jnp.float32),
            clock=jnp.asarray(windows.time_of_day(timestamps)),
            week_slot=jnp.asarray(windows.week_slots(timestamps)),
            starts=jnp.zeros(1, jnp.int32),
            mean=jnp.asarray(mean),
            std=jnp.asarray(std),
            graph=graphs.from_adjacency(adjacency),
            client_ids=jnp.arange(num_clients, dtype=jnp.int32),
            client_weights=jnp.ones(num_clients),
            step=step,
        )

    stamps = np.datetime64(0, "ns") + step.delta * np.arange(windows.WINDOW_STEPS)
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        settings = checkpoints.settings()
        name = settings["method"]  # `method` under its registered name
        if name not in algorithms.REGISTRY:
            raise InputError(
                f"{workdir}: its method {name!r} is unknown; load its plugin first "
                "(fg.plugins.load)"
            )
        config = algorithms.make_config(name, settings["config"])
        algorithm = algorithms.get_method(name).factory(config)
        data = make_data(np.zeros((windows.WINDOW_STEPS, num_clients)), stamps)
        rows = ("speed", "client_ids", "client_weights")
        data = data._replace(
            **{name: getattr(data, name)[:num_trained] for name in rows}
        )
        like = rounds.abstract_seeds(algorithm, settings["seeds"], data)
        seed_states, _ = checkpoints.restore((like, np.float64(0)))
    state = jax.tree.map(lambda x: jnp.asarray(x[0]), seed_states.best_state)
    predict = jax.jit(algorithm.predict)

    def forecast(readings: np.ndarray, timestamps: np.ndarray) -> np.ndarray:
        ahead = timestamps[-1] + step.delta * np.arange(1, windows.TARGET_STEPS + 1)
        speed = np.concatenate([readings, np.zeros_like(readings)])
        data = make_data(speed, np.concatenate([timestamps, ahead]))
        return np.asarray(predict(state, data)[0]).T

    return Forecaster(forecast, sensor_ids, unit, step)


def _checked(
    readings: np.ndarray, timestamps: np.ndarray, num_clients: int, step: TimeStep
) -> tuple[np.ndarray, np.ndarray]:
    """The last readings [12, N] and their stamps [12], if forecasts can follow."""
    readings = np.nan_to_num(np.asarray(readings, np.float32), posinf=np.inf)
    timestamps = np.asarray(timestamps, "datetime64[ns]")
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
