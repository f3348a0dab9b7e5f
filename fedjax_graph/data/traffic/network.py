"""A network of sensors and what they have read, on the host."""

import dataclasses

import numpy as np

from fedjax_graph.core import arrays
from fedjax_graph.core.batching import FRACTIONS
from fedjax_graph.core.errors import InputError
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


def check(dataset: TrafficDataset) -> None:
    """Checks that the arrays of a dataset fit together.

    Raises:
      InputError: if a shape does not fit, rows are not evenly spaced, a reading is not
        finite, or a weight of the graph is negative or not finite.
    """
    speed, adjacency = dataset.speed, dataset.adjacency
    fields = ("speed", "timestamps", "sensor_ids", "adjacency")
    optional = [x for x in ("latitude", "longitude") if getattr(dataset, x) is not None]
    arrays.check_are_arrays(**{x: getattr(dataset, x) for x in (*fields, *optional)})
    arrays.check_shape("speed", speed, (None, None))
    num_sensors = speed.shape[1]
    if not num_sensors:
        raise InputError(f"speed has shape {speed.shape}, expected at least one sensor")
    expected = {
        "timestamps": (len(speed),),
        "sensor_ids": (num_sensors,),
        "adjacency": (num_sensors, num_sensors),
        "latitude": (num_sensors,),
        "longitude": (num_sensors,),
    }
    for field, shape in expected.items():
        array = getattr(dataset, field)
        if array is not None and array.shape != shape:
            raise InputError(
                f"{field} has shape {array.shape}, expected {shape} for speed of shape "
                f"{speed.shape}"
            )
    for field in ("speed", "adjacency", *optional):
        dtype = getattr(dataset, field).dtype
        if dtype.kind not in "fiub":
            raise InputError(f"{field} has type {dtype}, expected numbers")
    if not np.issubdtype(dataset.timestamps.dtype, np.datetime64):
        raise InputError(
            f"timestamps have type {dataset.timestamps.dtype}, expected datetime64"
        )
    _ = dataset.step  # raises unless rows are evenly spaced
    if not np.isfinite(speed).all():
        raise InputError(
            "readings have entries that are not finite; a missing one is 0"
        )
    if not (np.isfinite(adjacency) & (adjacency >= 0)).all():
        raise InputError(
            "adjacency has weights that are negative, NaN or infinite in float32"
        )


def check_mask(what: str, mask: np.ndarray, num_sensors: int) -> None:
    """Checks a mask of sensors, [N] bool, which indices are not.

    Raises:
      InputError: if it is none.
    """
    arrays.check_shape(what, mask, (num_sensors,))
    if mask.dtype != bool:
        raise InputError(f"{what} has type {mask.dtype}, expected bool")


def take_sensors(dataset: TrafficDataset, kept: np.ndarray) -> TrafficDataset:
    """The subgraph of the sensors at `kept`, [M] indices, in that order.

    Raises:
      InputError: if an index is none of a sensor, or stands twice.
    """
    arrays.check_indices("kept", kept, len(dataset.sensor_ids), "the sensors")
    if len(np.unique(kept)) < len(kept):
        raise InputError("kept has a sensor twice")
    return dataclasses.replace(
        dataset,
        speed=dataset.speed[:, kept],
        sensor_ids=dataset.sensor_ids[kept],
        adjacency=dataset.adjacency[np.ix_(kept, kept)],
        latitude=None if dataset.latitude is None else dataset.latitude[kept],
        longitude=None if dataset.longitude is None else dataset.longitude[kept],
    )
