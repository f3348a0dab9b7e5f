"""A network of sensors and what they have read, on the host."""

import dataclasses

import numpy as np

from fedjax_graph.core.batching import FRACTIONS
from fedjax_graph.data.traffic.time_steps import TimeStep, step_of

UNKNOWN_UNIT = "units of the data"


@dataclasses.dataclass(frozen=True)
class TrafficDataset:
    """Readings of a sensor network and the graph between its sensors, on the host.

    `speed` holds whatever quantity is forecast, be it speed or flow; `unit` tells.
    """

    name: str
    speed: np.ndarray  # [T, N] float32, what is forecast, in `unit`; 0 = missing
    timestamps: np.ndarray  # [T] datetime64[ns], wall-clock time of each row
    sensor_ids: np.ndarray  # [N]
    adjacency: np.ndarray  # [N, N] float32; [i, j] = edge from sender i to receiver j
    latitude: np.ndarray | None = None  # [N], degrees
    longitude: np.ndarray | None = None  # [N], degrees
    notes: tuple[str, ...] = ()  # what was done to the data since it was published
    unit: str = UNKNOWN_UNIT  # of `speed`
    fractions: tuple[float, float, float] = FRACTIONS  # train, validation and test

    @property
    def step(self) -> TimeStep:
        """The time from one row to the next; raises as `time_steps.step_of`."""
        return step_of(self.timestamps)


def take_sensors(dataset: TrafficDataset, kept: np.ndarray) -> TrafficDataset:
    """The subgraph of the sensors at `kept`, [M] indices, in that order."""
    return dataclasses.replace(
        dataset,
        speed=dataset.speed[:, kept],
        sensor_ids=dataset.sensor_ids[kept],
        adjacency=dataset.adjacency[np.ix_(kept, kept)],
        latitude=None if dataset.latitude is None else dataset.latitude[kept],
        longitude=None if dataset.longitude is None else dataset.longitude[kept],
    )
