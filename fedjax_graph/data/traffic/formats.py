"""Readers of the file formats in which sensor networks are published.

Each reader checks the structure of its file and raises `InputError`, one line that
names the file. Sensors are named by their ids as text, whatever the file has.
"""

import collections
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files, limits, safe_pickle
from fedjax_graph.data.traffic import time_steps

_STAMP_BYTES = 256  # of a row of a table, more than a short text takes
_ID_BYTES = 64  # of a short text as Python keeps it
_PEMS_CHANNELS = ("flow", "occupancy", "speed")


class Readings(NamedTuple):
    """A table of readings, one column per sensor, as its file has it."""

    speed: np.ndarray  # [T, N] what is forecast; NaN where the file has no value
    timestamps: np.ndarray  # [T] datetime64[ns], wall-clock time
    sensor_ids: tuple[str, ...]  # N


class Graph(NamedTuple):
    """A weighted sensor graph, as its file has it."""

    adjacency: np.ndarray  # [M, M]; [i, j] = edge from sender i to receiver j
    sensor_ids: tuple[str, ...]  # M


class Triples(NamedTuple):
    """Rows of a csv: distances (from, to, cost) or coordinates (id, lat., long.)."""

    first: np.ndarray  # [R] text
    second: np.ndarray  # [R] text
    third: np.ndarray  # [R] float64


def numbers(arrays: dict[str, np.ndarray], key: str, ndim: int) -> np.ndarray:
    """An array of numbers with that many axes, out of those of a .npz file.

    Raises:
      InputError: if there is none.
    """
    if key not in arrays:
        raise InputError(f"no array {key!r}; found {', '.join(sorted(arrays))}")
    array = arrays[key]
    if array.ndim != ndim or array.dtype.kind not in "fiu":
        raise InputError(
            f"{key} has shape {array.shape} and type {array.dtype}, expected numbers "
            f"with {ndim} axes"
        )
    return array


def read_pems(
    path: str | os.PathLike,
    start: str,
    shape: tuple[int, int, int],
    sensor_ids: tuple[str, ...] | None = None,
) -> Readings:
    """Reads pems04.npz and its like: an array `data` without time stamps or ids.

    Its first channel is taken, the flow (vehicles per 5 minutes). PEMSD4 and PEMSD8
    have occupancy and speed behind it, PEMSD3 and PEMSD7 have the flow alone. Rows are
    5 minutes apart.

    Args:
      path: the file.
      start: wall-clock time of the first row.
      shape: (T, N, channels) that the file has to have: only the whole file begins at
        `start`.
      sensor_ids: N, in the order of the readings; None for 0 to N - 1.
    """
    arrays = files.read_npz(path)
    with files.reading(path, "archive of PeMS readings"):
        data = numbers(arrays, "data", ndim=3)
        if data.shape != shape:
            raise InputError(
                f"data has shape {data.shape}, expected {shape}: all steps and sensors "
                f"as published, with {', '.join(_PEMS_CHANNELS[: shape[2]])}; replace "
                "it with the published file"
            )
        steps = np.arange(shape[0]) * np.timedelta64(5, "m")
        timestamps = np.datetime64(start, "ns") + steps
        return Readings(data[:, :, 0], timestamps, sensor_ids or _numbered(shape[1]))


def read_ids(path: str | os.PathLike, num_sensors: int) -> tuple[str, ...]:
    """Reads a list of sensor ids, one on a line: PEMS03.txt."""
    kind = "list of sensor ids"
    with files.reading(path, kind), limits.open_text(path) as file:
        sensor_ids = id_texts(file.read().split())
        if len(sensor_ids) != num_sensors or len(set(sensor_ids)) != num_sensors:
            raise InputError(
                f"{len(set(sensor_ids))} different ids in {len(sensor_ids)}, expected "
                f"those of {num_sensors} sensors, each once"
            )
        return sensor_ids


def _numbered(num_sensors: int) -> tuple[str, ...]:
    return tuple(map(str, range(num_sensors)))


def read_csv(path: str | os.PathLike) -> Readings:
    """Reads a table with a header of sensor ids and a first column of time stamps.

    An empty field is a missing reading.
    """
    kind = ".csv file of readings"
    with files.reading(path, kind), limits.open_text(path) as file:
        header = next(file, "").strip().replace('"', "").split(",")
        first, *ids = [cell.strip() for cell in header]
        sensor_ids = id_texts(ids)
        if not sensor_ids or time_steps.is_stamp(first):
            raise InputError("expected a header line of sensor ids")
        if "" in sensor_ids:
            raise InputError(
                "a column without a sensor id in the header; name it, or take out the "
                "comma at the end of each line"
            )
        repeated = [
            x for x, count in collections.Counter(sensor_ids).items() if count > 1
        ]
        if repeated:
            raise InputError(f"sensor {repeated[0]} has several columns, expected one")
        stamps = []
        # The row of zeros fixes the number of columns, even of an empty table.
        rows = itertools.chain([",".join("0" * len(sensor_ids))], _rows(file, stamps))
        speed = np.loadtxt(rows, np.float32, comments=None, delimiter=",", ndmin=2)[1:]
        timestamps = time_steps.as_stamps(
            "the first column", text_array("its time stamps", stamps)
        )
        return Readings(speed, timestamps, sensor_ids)


def _rows(lines: Iterable[str], stamps: list[str]) -> Iterator[str]:
    """Moves the time stamp of each line to `stamps`; `nan` for empty fields."""
    for line in limits.filled_lines(lines):
        stamp, _, row = line.strip().partition(",")
        stamps.append(stamp.strip('"'))
        limits.check_bytes("its time stamps", len(stamps) * _STAMP_BYTES)
        yield re.sub(r"(?<![^,])(?=,|$)", "nan", row) if ",," in f",{row}," else row


def read_graph_pickle(path: str | os.PathLike) -> Graph:
    """Reads (sensor_ids, id_to_index, adjacency): adj_mx.pkl, adj_mx_bay.pkl."""
    with files.reading(path, "sensor graph pickle"):
        content = safe_pickle.load(path)
        if not isinstance(content, list | tuple) or len(content) != 3:
            raise InputError("expected (sensor_ids, id_to_index, adjacency)")
        sensor_ids, id_to_index, adjacency = content
        sensor_ids, adjacency = id_texts(sensor_ids), np.asarray(adjacency)
        if adjacency.shape != 2 * (len(sensor_ids),):
            raise InputError(
                f"adjacency has shape {adjacency.shape} for {len(sensor_ids)} sensors"
            )
        if adjacency.dtype.kind not in "fiub":
            raise InputError(f"adjacency has type {adjacency.dtype}, expected numbers")
        indices = zip(id_texts(id_to_index), id_to_index.values(), strict=True)
        if dict(indices) != {sensor: i for i, sensor in enumerate(sensor_ids)}:
            raise InputError("id_to_index and sensor_ids do not agree")
        return Graph(adjacency, sensor_ids)


def read_triples(path: str | os.PathLike) -> Triples:
    """Reads the last three columns of a csv file, with or without a header line.

    That is distances_*.csv (from, to, metres) and graph_sensor_locations*.csv
    ([index,] id, latitude, longitude).
    """
    first, second, third = [], [], []
    kind = ".csv file with three columns or more"
    with files.reading(path, kind), limits.open_text(path, share=64) as file:
        for number, line in enumerate(limits.filled_lines(file)):
            row = line.rsplit(",", 3)[-3:]
            if number == 0 and not files.is_number(row[-1]):
                continue
            if len(row) != 3:
                raise InputError("expected rows of three columns")
            first.append(row[0].strip())
            second.append(row[1].strip())
            third.append(float(row[2]))
        if not third:
            raise InputError("expected rows of three columns")
        first, second = text_array("its ids", first), text_array("its ids", second)
        return Triples(first, second, np.array(third))


def text_array(what: str, texts: Sequence[str]) -> np.ndarray:
    """An array of text, each of which takes the room of the longest.

    Raises:
      InputError: if that is too much; see `limits.check_bytes`.
    """
    longest = max(map(len, texts), default=0)
    limits.check_shape(what, (len(texts), longest), 4)
    return np.array(texts, f"U{max(longest, 1)}")


def gaussian_kernel_adjacency(
    distances_from: Sequence,
    to: Sequence,
    cost: Sequence,
    sensor_ids: Sequence,
    threshold: float = 0.1,
    both_ways: bool = False,
) -> np.ndarray:
    """Weights exp(-(d / sigma)^2) of road distances d, as DCRNN makes them.

    sigma is the standard deviation of all distances listed, those of sensors to
    themselves included; a pair that is not listed has no edge.

    Args:
      distances_from: [R] ids of senders.
      to: [R] ids of receivers.
      cost: [R] road distances, of any one unit.
      sensor_ids: [N] ids in the order of rows and columns.
      threshold: weights below it become 0.
      both_ways: whether a road listed one way leads back as well; if both ways are
        listed, the shorter distance holds.

    Returns:
      [N, N] float32 adjacency with diagonal 1.

    Raises:
      InputError: if an id is not among `sensor_ids`, or distances are negative, not
        finite, too few or all equal.
    """
    senders = node_indices(distances_from, sensor_ids)
    receivers = node_indices(to, sensor_ids)
    costs = np.asarray(cost, np.float64)
    if not len(senders) == len(receivers) == len(costs):
        raise InputError("distances need as many senders as receivers and costs")
    if not (np.isfinite(costs) & (costs >= 0)).all():
        raise InputError("distances have to be finite and not negative")
    size = len(sensor_ids)
    limits.check_shape("the adjacency of its sensors", (size, size), 8)
    distances = np.full((size, size), np.inf)
    distances[senders, receivers] = costs
    if both_ways:
        distances = np.minimum(distances, distances.T)
    listed = distances[np.isfinite(distances)]
    sigma = listed.std() if listed.size else 0.0
    if not sigma > 0:
        raise InputError("distances that differ are needed for the Gaussian kernel")
    np.fill_diagonal(distances, 0)
    weights = np.exp(-np.square(distances / sigma))
    return np.where(weights < threshold, 0, weights).astype(np.float32)


def self_edges(num_sensors: int) -> np.ndarray:
    """The adjacency [N, N] of sensors of which no two are joined.

    Raises:
      InputError: if it is too large; see `limits.check_shape`.
    """
    limits.check_shape("the adjacency of its sensors", (num_sensors, num_sensors), 8)
    return np.eye(num_sensors)


def graph_from_distances(triples: Triples, sensor_ids: Sequence[str]) -> Graph:
    """The graph of some sensors; the public lists name others too, which are left."""
    inside = np.isin(triples.first, sensor_ids) & np.isin(triples.second, sensor_ids)
    first, second, third = (column[inside] for column in triples)
    adjacency = gaussian_kernel_adjacency(first, second, third, sensor_ids)
    return Graph(adjacency, tuple(sensor_ids))


def graph_from_roads(roads: Triples, sensor_ids: Sequence[str]) -> Graph:
    """The graph of sensors along roads that are used both ways.

    Raises:
      InputError: if a road names another sensor, or a sensor has no road: that is the
        list of another network, or only a part.
    """
    named = {*roads.first.tolist(), *roads.second.tolist()}
    strangers = sorted(named.difference(sensor_ids))
    without = [sensor for sensor in sensor_ids if sensor not in named]
    if strangers or without:
        problem = (
            f"names {strangers[0]}" if strangers else f"has no road of {without[0]}"
        )
        raise InputError(
            f"{problem}; expected roads of all sensors from {sensor_ids[0]} to "
            f"{sensor_ids[-1]} and no others: replace it with the whole list of this "
            "network"
        )
    adjacency = gaussian_kernel_adjacency(*roads, sensor_ids, both_ways=True)
    return Graph(adjacency, tuple(sensor_ids))


def match(readings: Readings, graph: Graph) -> tuple[Readings, np.ndarray]:
    """Brings readings and graph into one order of sensors, the graph's.

    Sensors of the graph without readings are left out.

    Returns:
      The readings with columns in that order, and the adjacency [N, N].

    Raises:
      InputError: if a sensor with readings is not in the graph.
    """
    column = {sensor: index for index, sensor in enumerate(readings.sensor_ids)}
    missing = sorted(column.keys() - set(graph.sensor_ids))
    if missing:
        raise InputError(f"sensor {missing[0]} has readings but is not in the graph")
    nodes = [i for i, sensor in enumerate(graph.sensor_ids) if sensor in column]
    sensor_ids = tuple(graph.sensor_ids[node] for node in nodes)
    speed = readings.speed[:, [column[sensor] for sensor in sensor_ids]]
    ordered = Readings(speed, readings.timestamps, sensor_ids)
    return ordered, graph.adjacency[np.ix_(nodes, nodes)]


def node_indices(ids: Sequence, sensor_ids: Sequence) -> list[int]:
    """Places of `ids` in `sensor_ids`.

    Raises:
      InputError: if one of them is not there.
    """
    index = {sensor: i for i, sensor in enumerate(id_texts(sensor_ids))}
    try:
        return [index[sensor] for sensor in id_texts(ids)]
    except KeyError as error:
        raise InputError(
            f"an edge or distance names sensor {error.args[0]}, which is not among the "
            f"{len(index)} sensors"
        ) from None


def id_texts(ids: Sequence) -> tuple[str, ...]:
    """Sensor ids as text; integers, text and bytes name the same sensor.

    Raises:
      InputError: if an id is of another type.
    """
    limits.check_shape("its sensor ids", (len(ids),), _ID_BYTES)
    plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if not all(isinstance(i, int | str | bytes) for i in plain):
        raise InputError("sensor ids have to be integers or text")
    texts = tuple(i.decode() if isinstance(i, bytes) else str(i) for i in plain)
    files.check_texts("sensor ids", texts)
    longest = max(map(len, texts), default=0)  # as an array, see `text_array`
    limits.check_shape("its sensor ids", (len(texts), longest), 4)
    return texts
