"""Readers of a user's own sensor network: a .npz archive, or tables in csv."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files, limits
from fedjax_graph.data.traffic import formats
from fedjax_graph.data.traffic.formats import Graph, node_indices, numbers

_STAMP_KEYS = ("timestamps", "timestamps_ns")
_NAMES = {  # what is often meant: key -> names that others give it
    "speed": ("data", "x", "readings", "values", "flow", "volume", "traffic"),
    "timestamps": ("time", "times", "date", "dates", "datetime", "index", "t"),
    "adjacency": ("adj", "adj_mx", "adjacency_matrix", "weights", "A", "W"),
}
_OF_GRAPHS = {"edges", "edge", "edge_index", "labels", "y"}  # where no hint is right
_ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
BESIDE = {  # what a table of readings NAME.csv may have beside it
    "adjacency": "{}_adjacency.csv",
    "distances": "{}_distances.csv",
    "locations": "{}_locations.csv",
}


def beside(path: Path, what: str) -> Path:
    """The place of a table that belongs to one of readings: see `BESIDE`."""
    return path.with_name(BESIDE[what].format(path.stem))


# --- .npz ----------------------------------------------------------------------------


def read_npz(path: str | os.PathLike, needs_graph: bool = True) -> dict[str, Any]:
    """Reads a .npz file with the keys that `datasets.load` lists.

    Without a graph, where none is needed, the adjacency is that of self edges alone.

    Returns:
      The arrays of `TrafficDataset`, and its unit if the file has one; that the
      shapes of the arrays fit together is left to check.
    """
    arrays = files.read_npz(path)
    with files.reading(path, "traffic dataset"):
        speed = _speed(arrays)
        num_steps, num_sensors = speed.shape
        sensor_ids = arrays.get("sensor_ids", np.arange(num_sensors))
        return {
            "speed": speed,
            "timestamps": _timestamps(arrays, num_steps),
            "sensor_ids": sensor_ids,
            "adjacency": _adjacency(arrays, sensor_ids, needs_graph),
            "latitude": arrays.get("latitude"),
            "longitude": arrays.get("longitude"),
        } | _unit(arrays)


def _required(arrays: dict[str, np.ndarray], key: str) -> None:
    """Raises `InputError`, with a hint, where an array is missing."""
    if key in arrays:
        return
    meant = next((name for name in _NAMES.get(key, ()) if name in arrays), None)
    meant = None if _OF_GRAPHS & arrays.keys() else meant
    hint = f"; if {meant!r} is meant, save it as {key!r}" if meant else ""
    raise InputError(f"no array {key!r}; found {', '.join(sorted(arrays))}{hint}")


def _speed(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The readings [T, N], NaN where the mask is False."""
    _required(arrays, "speed")
    if arrays["speed"].ndim == 3:
        raise InputError(
            f"speed has shape {arrays['speed'].shape}, expected [T, N]: save the one "
            "channel that is to be forecast, such as speed[:, :, 0]"
        )
    speed = numbers(arrays, "speed", ndim=2)
    stamps = next((arrays[key] for key in _STAMP_KEYS if key in arrays), None)
    if stamps is not None and stamps.shape == speed.shape[1:] != speed.shape[:1]:
        raise InputError(
            f"speed has shape {speed.shape} for {len(stamps)} time stamps, expected "
            "[T, N]: save speed.T"
        )
    if "mask" not in arrays:
        return speed
    mask = arrays["mask"]
    if mask.shape != speed.shape or mask.dtype != bool:
        raise InputError(
            f"mask has shape {mask.shape} and type {mask.dtype}, expected "
            f"{speed.shape} and bool: True where a reading is there; for 0 and 1 save "
            "mask.astype(bool)"
        )
    return np.where(mask, speed, np.nan)


def _timestamps(arrays: dict[str, np.ndarray], num_steps: int) -> np.ndarray:
    """Time stamps [T] datetime64[ns], of whichever form there is."""
    key = next((key for key in _STAMP_KEYS if key in arrays), None)
    if key is not None:
        return _as_stamps(key, arrays[key])
    if "start_ns" not in arrays:
        _required(arrays, "timestamps")
    start, step = (int(numbers(arrays, key, 0)) for key in ("start_ns", "freq_ns"))
    return (start + step * np.arange(num_steps)).astype("M8[ns]")


def _as_stamps(key: str, stamps: np.ndarray) -> np.ndarray:
    """datetime64 of any unit, text in ISO 8601, or nanoseconds since 1970."""
    kind = stamps.dtype.kind
    if stamps.ndim != 1 or kind not in "MUiuf":
        raise InputError(
            f"{key} has shape {stamps.shape} and type {stamps.dtype}, expected [T] of "
            "datetime64, of text such as 2012-03-01T00:05, or of integers"
        )
    if kind in "iuf":
        if key == "timestamps":
            raise InputError(
                "timestamps has numbers, expected datetime64 or text; save nanoseconds "
                "since 1970 as 'timestamps_ns', or seconds by "
                "timestamps.astype('datetime64[s]')"
            )
        return stamps.astype("M8[ns]")
    if kind == "U":
        zoned = next((x for x in stamps.tolist() if _ZONE.search(x)), None)
        if zoned is not None:
            raise InputError(
                f"{key} has {zoned!a}, expected wall-clock time without a zone"
            )
        try:
            stamps = stamps.astype("M8[us]")
        except ValueError as error:
            raise InputError(
                f"{key}: {error}; expected text such as 2012-03-01T00:05"
            ) from error
    with np.errstate(over="ignore"):
        found = stamps.astype("M8[ns]")
    is_same = (found.astype(stamps.dtype) == stamps) | np.isnat(stamps)
    if not is_same.all():
        first = np.datetime_as_string(stamps[np.argmin(is_same)])
        raise InputError(f"{key} has {first}, expected years 1678 to 2261")
    return found


def _adjacency(
    arrays: dict[str, np.ndarray], sensor_ids: Sequence, needs_graph: bool
) -> np.ndarray:
    ends = [arrays[key] for key in ("distance_from", "distance_to") if key in arrays]
    for end in ends:
        node_indices(end, sensor_ids)
    if not needs_graph and "adjacency" not in arrays and not ends:
        return np.eye(len(sensor_ids))
    if "adjacency" in arrays or len(ends) < 2:
        _required(arrays, "adjacency")
        if arrays["adjacency"].dtype == bool and arrays["adjacency"].ndim == 2:
            return arrays["adjacency"].astype(np.float32)
        return numbers(arrays, "adjacency", ndim=2)
    cost = numbers(arrays, "distance_cost", ndim=1)
    return formats.gaussian_kernel_adjacency(ends[0], ends[1], cost, sensor_ids)


def _unit(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    if "unit" not in arrays:
        return {}
    unit = arrays["unit"]
    is_text = not unit.shape and unit.dtype.kind == "U"
    if not is_text or not unit.item().strip() or not unit.item().isprintable():
        raise InputError(
            f"unit has shape {unit.shape} and type {unit.dtype}, expected one line "
            "of text that is not empty, such as 'mph'"
        )
    return {"unit": unit.item()}


# --- .csv ----------------------------------------------------------------------------


def read_csv(path: Path, needs_graph: bool = True) -> dict[str, Any]:
    """Reads a table of readings and what lies beside it; see `BESIDE`.

    Returns:
      As `read_npz`, without coordinates.
    """
    readings = formats.read_csv(path)
    matrix, roads = beside(path, "adjacency"), beside(path, "distances")
    adjacency = np.eye(len(readings.sensor_ids))
    if matrix.exists():
        with files.reading(matrix, "table of weights"):
            graph = _read_matrix(matrix, readings.sensor_ids)
            readings, adjacency = formats.match(readings, graph)
    elif roads.exists():
        with files.reading(roads, "list of road distances"):
            triples = formats.read_triples(roads)
            adjacency = formats.gaussian_kernel_adjacency(*triples, readings.sensor_ids)
    elif needs_graph:
        raise InputError(
            f"{path}: no graph; put {matrix.name} beside it, a row and a column for "
            f"each sensor, or {roads.name} with rows from,to,distance"
        )
    return {
        "speed": readings.speed,
        "timestamps": readings.timestamps,
        "sensor_ids": np.array(readings.sensor_ids),
        "adjacency": adjacency,
    }


def _read_matrix(path: Path, sensor_ids: tuple[str, ...]) -> Graph:
    """A table of weights: numbers alone, or with ids as first line and column."""
    with limits.open_text(path) as file:
        rows = [line.strip().split(",") for line in file if line.strip()]
    if not rows:
        raise InputError("no rows")
    if not files.is_number(rows[0][0]):
        sensor_ids = formats.id_texts([x.strip('" ') for x in rows[0][1:]])
        first = formats.id_texts([row[0].strip('" ') for row in rows[1:]])
        if first != sensor_ids:
            raise InputError("the ids of its rows are not those of its columns")
        rows = [row[1:] for row in rows[1:]]
    size = len(sensor_ids)
    if [len(row) for row in rows] != [size] * size:
        raise InputError(
            f"{len(rows)} rows of {len(rows[0]) if rows else 0} weights, expected a "
            f"row and a column for each of {size} sensors"
        )
    return Graph(np.array(rows).astype(np.float64), sensor_ids)
