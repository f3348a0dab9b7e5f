"""Readers of a user's own sensor network: a .npz archive, or tables in csv.

An archive is one of `numpy.savez`, without object arrays:

    speed [T, N]            what is forecast; 0 or NaN where a reading is missing
    mask [T, N]             optional: bool, False where one is missing
    timestamps [T]          wall-clock time, evenly spaced (see
                            `time_steps.step_of`): datetime64, or text in ISO 8601;
    timestamps_ns [T]       or integers, ns since 1970-01-01;
    start_ns, freq_ns       or the first time stamp and the step between rows
    adjacency [N, N]        weights >= 0; [i, j] is an edge from sensor i to j;
    distance_from [R], distance_to [R], distance_cost [R]
                            or ids of two sensors and the road distance between them,
                            for `gaussian_kernel_adjacency`
    sensor_ids [N]          optional: integers or text; 0 to N - 1 if absent
    latitude [N], longitude [N]
                            optional: degrees
    unit                    optional: text, the unit of `speed`, such as "mph" or
                            "veh/5min"; "units of the data" if absent

Tables are `NAME.csv`, a header of sensor ids and a first column of time stamps, with
`NAME_adjacency.csv`, a row and a column for each sensor, or `NAME_distances.csv`, rows
from,to,distance, beside it, and where there are coordinates `NAME_locations.csv`, rows
id,latitude,longitude.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files, limits
from fedjax_graph.data.traffic import formats, time_steps
from fedjax_graph.data.traffic.formats import Graph, node_indices, numbers

_STAMP_KEYS = ("timestamps", "timestamps_ns")
_PLACES = ("latitude", "longitude")
_MOST_OF_UNIT = 40  # characters, in captions and on axes
_NAMES = {  # what is often meant: key -> names that others give it
    "speed": ("data", "x", "readings", "values", "flow", "volume", "traffic"),
    "timestamps": ("time", "times", "date", "dates", "datetime", "index", "t"),
    "adjacency": ("adj", "adj_mx", "adjacency_matrix", "weights", "A", "W"),
}
_OF_GRAPHS = {"edges", "edge", "edge_index", "labels", "y"}  # where no hint is right
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
    """Reads an archive of the keys above.

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
            **{key: numbers(arrays, key, ndim=1) for key in _PLACES if key in arrays},
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
    if not speed.size:
        raise InputError(
            f"speed has shape {speed.shape}, expected at least one step and one sensor"
        )
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
        return time_steps.as_stamps(key, arrays[key])
    if "start_ns" not in arrays:
        _required(arrays, "timestamps")
    start, step = (int(numbers(arrays, key, 0)) for key in ("start_ns", "freq_ns"))
    for stamp in (start, step, start + step * num_steps):
        time_steps.as_stamps("start_ns with freq_ns", np.array([stamp], np.float64))
    return (start + step * np.arange(num_steps)).astype("M8[ns]")


def _adjacency(
    arrays: dict[str, np.ndarray], sensor_ids: Sequence, needs_graph: bool
) -> np.ndarray:
    ends = [arrays[key] for key in ("distance_from", "distance_to") if key in arrays]
    for end in ends:
        node_indices(end, sensor_ids)
    if not needs_graph and "adjacency" not in arrays and not ends:
        return formats.self_edges(len(sensor_ids))
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
    text = str(unit.item()) if is_text else ""
    if not text.strip() or not text.isprintable() or len(text) > _MOST_OF_UNIT:
        raise InputError(
            f"unit has shape {unit.shape} and type {unit.dtype}, expected one line "
            f"of text, 1 to {_MOST_OF_UNIT} characters such as 'mph'"
        )
    return {"unit": text}


# --- .csv ----------------------------------------------------------------------------


def read_csv(path: Path, needs_graph: bool = True) -> dict[str, Any]:
    """Reads a table of readings and what lies beside it; see `BESIDE`.

    Returns:
      As `read_npz`, without coordinates.
    """
    readings = formats.read_csv(path)
    matrix, roads = beside(path, "adjacency"), beside(path, "distances")
    adjacency = formats.self_edges(len(readings.sensor_ids))
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
        lines = (line.strip() for line in limits.filled_lines(file))
        first = next(lines, None)
        if first is None:
            raise InputError("no rows")
        has_ids = not files.is_number(first.partition(",")[0])
        size = first.count(",") + (not has_ids)
        limits.check_shape("its weights", (size, size), 8)
        rows = (("", line) for line in itertools.chain([first], lines))
        if has_ids:
            sensor_ids = formats.id_texts([_id(x) for x in first.split(",")[1:]])
            rows = (line.partition(",")[::2] for line in lines)
        elif size != len(sensor_ids):
            num_rows = sum(1 for _ in rows)
            raise _no_square(f"{num_rows} rows of {size} weights", len(sensor_ids))
        weights, number = np.zeros((size, size)), 0
        for number, (key, row) in enumerate(rows, 1):
            if has_ids and [_id(key)] != list(sensor_ids[number - 1 : number]):
                raise InputError("the ids of its rows are not those of its columns")
            if number > size or row.count(",") + 1 != size:
                found = f"{row.count(',') + 1} weights in row {number}"
                raise _no_square(found, size)
            weights[number - 1] = [float(x) for x in row.split(",")]
        if number < size:
            raise _no_square(f"{number} rows of {size} weights", size)
        return Graph(weights, sensor_ids)


def _id(cell: str) -> str:
    return cell.strip('" ')


def _no_square(found: str, size: int) -> InputError:
    return InputError(
        f"{found}, expected a row and a column for each of {size} sensors"
    )
