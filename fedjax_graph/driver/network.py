"""The network of a traffic run: what a forecast needs besides parameters."""

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.processes import by_first
from fedjax_graph.data import files
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.network import UNKNOWN_UNIT
from fedjax_graph.data.traffic.time_steps import TimeStep
from fedjax_graph.driver.writers import replacing

DAY_NS, SECOND_NS = 86_400 * 10**9, 10**9


@dataclasses.dataclass(frozen=True)
class Network:
    """Holds the arrays of `network.npz`: ids, adjacency, scale, step and unit."""

    arrays: dict[str, np.ndarray]
    path: str = "the network of a run"  # for messages

    def __post_init__(self) -> None:
        """Checks that nothing is missing, and that the arrays fit together.

        Raises:
          InputError: naming the file.
        """
        with files.reading(self.path, "network of a run"):
            ids, adjacency = self.arrays["sensor_ids"], self.arrays["adjacency"]
            size = len(ids) if ids.ndim == 1 else None
            if adjacency.shape != (size, size):
                raise InputError(
                    f"adjacency of shape {adjacency.shape} and sensor_ids of "
                    f"{ids.shape}, expected [N, N] and [N]"
                )
            if adjacency.dtype.kind not in "fiub" or not np.isfinite(adjacency).all():
                raise InputError("adjacency: expected finite numbers")
            self._number("mean")
            if self._number("std") <= 0:
                raise InputError("std: expected more than 0")
            step = self._number("step_ns", "iu")
            if not (0 < step <= DAY_NS and DAY_NS % step == step % SECOND_NS == 0):
                raise InputError(
                    f"step_ns={step}: expected whole seconds that divide a day"
                )
            if not 1 <= self._number("num_trained", "iu", size) <= size:
                raise InputError(f"num_trained: expected 1 to {size}")

    def _number(self, key: str, kinds: str = "fiu", default: Any = None) -> Any:
        """Reads one number; without a default it has to be there."""
        if default is not None and key not in self.arrays:
            return default
        found = self.arrays[key]
        if found.shape or found.dtype.kind not in kinds or not np.isfinite(found):
            raise InputError(f"{key}: expected one finite number")
        return found.item()

    @classmethod
    def of(cls, dataset: Any, train: windows.TrafficData) -> "Network":
        """That of a dataset, with the scale of its training part."""
        arrays = {
            "sensor_ids": dataset.sensor_ids,
            "adjacency": dataset.adjacency,
            "mean": np.asarray(train.mean),
            "std": np.asarray(train.std),
            "step_ns": np.int64(dataset.step.seconds * 10**9),
            "unit": np.array(dataset.unit),
        }
        if len(train.speed) < len(dataset.sensor_ids):
            arrays["num_trained"] = np.asarray(len(train.speed))
        return cls(arrays)

    @classmethod
    def read(cls, path: pathlib.Path) -> "Network":
        """Reads a run's `network.npz`.

        Raises:
          InputError: if it is not there, or is none.
        """
        return cls(files.read_npz(path), str(path))

    @by_first
    def write(self, path: pathlib.Path) -> None:
        """Writes a run's `network.npz`, whole or not at all."""
        with replacing(path) as file:
            np.savez_compressed(file, **self.arrays)

    @property
    def step(self) -> TimeStep:
        """Between readings."""
        return TimeStep(int(self.arrays["step_ns"]) // 10**9)

    @property
    def unit(self) -> str:
        """Of readings and forecasts; unknown of a run that did not keep it."""
        return str(self.arrays.get("unit", UNKNOWN_UNIT))

    @property
    def num_sensors(self) -> int:
        """Of the whole network."""
        return len(self.arrays["adjacency"])

    def data(self, speed: np.ndarray, timestamps: np.ndarray) -> windows.TrafficData:
        """One window of all sensors.

        Args:
          speed: [24, N] readings.
          timestamps: [24] datetime64.
        """
        return windows.TrafficData(
            speed=jnp.asarray(speed.T, jnp.float32),
            clock=jnp.asarray(windows.time_of_day(timestamps)),
            week_slot=jnp.asarray(windows.week_slots(timestamps)),
            starts=jnp.zeros(1, jnp.int32),
            mean=jnp.asarray(self.arrays["mean"]),
            std=jnp.asarray(self.arrays["std"]),
            graph=graphs.from_adjacency(self.arrays["adjacency"]),
            client_ids=jnp.arange(self.num_sensors, dtype=jnp.int32),
            client_weights=jnp.ones(self.num_sensors),
            step=self.step,
        )

    def example(self) -> windows.TrafficData:
        """A window in the shape of the training part, with fewer sensors if it had."""
        stamps = np.datetime64(0, "ns") + self.step.delta * np.arange(
            windows.WINDOW_STEPS
        )
        data = self.data(np.zeros((windows.WINDOW_STEPS, self.num_sensors)), stamps)
        num_trained = int(self.arrays.get("num_trained", self.num_sensors))
        rows = ("speed", "client_ids", "client_weights")
        return data._replace(
            **{name: getattr(data, name)[:num_trained] for name in rows}
        )


def save_network(
    path: pathlib.Path,
    dataset: Any,
    train: windows.TrafficData,
    is_read_only: bool = False,
) -> None:
    """Keeps a run's network beside it.

    Args:
      path: of the file.
      dataset: the network.
      train: its training part.
      is_read_only: whether nothing is written, but what is kept there compared.

    Raises:
      InputError: if another network is kept there, with checkpoints trained on it.
    """
    network = Network.of(dataset, train)
    results = path.with_name("results.json")
    if path.exists() and (results.exists() or any(path.parent.glob("*/checkpoints/*"))):
        kept = files.read_npz(path)
        for key, value in network.arrays.items():
            if key in kept and not np.array_equal(kept[key], value):
                raise InputError(
                    f"{path}: the run was made on other data ({key} differs); resume "
                    "with the same dataset or start anew in another workdir"
                )
        if network.arrays.keys() <= kept.keys():  # else of an earlier version
            return
    if not is_read_only:
        network.write(path)
