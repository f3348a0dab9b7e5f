"""Traffic networks: one sensor, one series of readings; roads as a weighted graph.

`load` reads the networks of `published` in the forms that users have them, or a user's
own .npz file; `cut` and `take_sensors` make a dataset smaller, `statistics` counts what
is in it.
"""

import dataclasses
from pathlib import Path

import numpy as np

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files
from fedjax_graph.data.traffic import formats as traffic_formats
from fedjax_graph.data.traffic import hdf, largest, network, own_files, windows
from fedjax_graph.data.traffic.formats import gaussian_kernel_adjacency, id_texts
from fedjax_graph.data.traffic.network import (
    UNKNOWN_UNIT,
    TrafficDataset,
    take_sensors,
)
from fedjax_graph.data.traffic.published import PUBLISHED, Published

__all__ = [
    "PUBLISHED",
    "TrafficDataset",
    "cut",
    "gaussian_kernel_adjacency",
    "load",
    "locate",
    "statistics",
    "take_sensors",
]


PATHS = ("of a .npz or .csv file",)  # of a user's own dataset

# Name of the road distances of PEMSD3 to PEMSD8: only found beside the readings.
_BESIDE = "distance.csv"


def load(
    name: str, data_dir: files.Folder = None, needs_graph: bool = True
) -> TrafficDataset:
    """Loads a dataset by name, or a user's own file.

    Published datasets are looked for in `data_dir`, else in $FEDJAX_GRAPH_DATA, and
    then in the download cache, under the names that `published` lists; the forms of a
    user's own file stand in `own_files`.

    Args:
      name: a name of `PUBLISHED`, or a path that ends in `.npz` or `.csv`.
      data_dir: folder with the files.
      needs_graph: whether a graph has to be there; else, where there is none, the
        adjacency is that of self edges alone, and a note says so.

    Raises:
      InputError: one line; a file is missing, broken or not what it should be.
    """
    if name.endswith(".npz"):
        return _read_npz(Path(name), Path(name).stem, needs_graph)
    if name.endswith(".csv"):
        return _read_own_csv(Path(name), needs_graph)
    path = locate(name, data_dir)
    published = PUBLISHED[name]
    if path is None:
        raise _not_found(name, published.readings, data_dir)
    if path.name == f"{name}.npz":
        dataset = _read_npz(path, name, needs_graph, published.unit)
    elif published.districts:
        dataset = _read_largest(path, name, data_dir, needs_graph)
    else:
        dataset = _read_canonical(path, name, data_dir, needs_graph)
    num_steps, num_sensors = dataset.speed.shape
    if num_sensors != published.num_sensors:
        raise InputError(
            f"{path}: expected the {published.num_sensors} sensors of {name}, found "
            f"{num_sensors}; name the dataset that it is, or pass the path of a .npz"
        )
    notes = published.notes + dataset.notes
    if num_steps != published.num_steps:
        notes += (f"{num_steps} steps, where {published.num_steps} were published",)
    return dataclasses.replace(dataset, notes=notes, fractions=published.fractions)


def reads(path: str) -> bool:
    """Whether a path may be that of a user's own dataset."""
    return path.endswith((".npz", ".csv"))


def locate(name: str, data_dir: files.Folder = None) -> Path | None:
    """The file with the readings of a published dataset, or None if there is none.

    Raises:
      InputError: if the dataset is not known or the folder does not exist.
    """
    if name not in PUBLISHED:
        raise files.unknown("traffic", name, PUBLISHED, PATHS)
    return _find(PUBLISHED[name].readings, name, data_dir)


def _find(names, dataset, data_dir) -> Path | None:
    return files.find(names, files.folders(data_dir), PUBLISHED[dataset].subfolders)


def _not_found(
    name: str, wanted: tuple[str, ...], data_dir: files.Folder
) -> InputError:
    """The error where none of the files `wanted` is there."""
    published = PUBLISHED[name]
    by_hand = " and ".join((published.readings[:2][-1], *published.graphs[:1]))
    if published.districts:
        by_hand = " and ".join(
            names[-1]
            for names in (published.readings, published.graphs, published.coordinates)
        )
    by_hand = f"put {by_hand} there, or name their folder with data_dir"
    return files.not_found(name, wanted, data_dir, by_hand=by_hand)


def _read_npz(
    path: Path, name: str, needs_graph: bool, unit: str = UNKNOWN_UNIT
) -> TrafficDataset:
    fields = {"unit": unit} | own_files.read_npz(path, needs_graph)
    with files.reading(path, "traffic dataset"):
        return _noted(_checked(TrafficDataset(name, **fields)), needs_graph)


def _read_own_csv(path: Path, needs_graph: bool) -> TrafficDataset:
    fields = own_files.read_csv(path, needs_graph)
    places = own_files.beside(path, "locations")
    if places.exists():
        ids = tuple(fields["sensor_ids"].tolist())
        fields["latitude"], fields["longitude"] = _coordinates(places, ids)
    with files.reading(path, "traffic dataset"):
        return _noted(_checked(TrafficDataset(path.stem, **fields)), needs_graph)


def _noted(dataset: TrafficDataset, needs_graph: bool) -> TrafficDataset:
    """Says where self edges are all there is, and that was not asked for."""
    bare = traffic_formats.self_edges(0 if needs_graph else len(dataset.sensor_ids))
    if not np.array_equal(dataset.adjacency, bare):
        return dataset
    return dataclasses.replace(dataset, notes=(*dataset.notes, "no graph is given"))


def _read_canonical(
    path: Path, name: str, data_dir, needs_graph: bool
) -> TrafficDataset:
    """Readings as published, the graph and the coordinates beside them."""
    published = PUBLISHED[name]
    readings = _readings(path, published, _listed_ids(name, data_dir))
    graph_path = _find(published.graphs, name, data_dir)
    if graph_path is None and published.start:
        graph_path = files.find([_BESIDE], [path.parent])
    if graph_path is None and needs_graph:
        raise _not_found(name, published.graphs, data_dir)
    adjacency = traffic_formats.self_edges(len(readings.sensor_ids))
    if graph_path is not None:
        with files.reading(graph_path, "sensor graph"):
            graph = _graph(graph_path, readings.sensor_ids, published)
            readings, adjacency = traffic_formats.match(readings, graph)
    latitude = longitude = None
    coordinates_path = _find(published.coordinates, name, data_dir)
    if coordinates_path is not None:
        latitude, longitude = _coordinates(coordinates_path, readings.sensor_ids)
    places = (latitude, longitude)
    return _assembled(path, name, readings, adjacency, places, needs_graph)


def _read_largest(path: Path, name: str, data_dir, needs_graph: bool) -> TrafficDataset:
    """A part of LargeST out of the files of that part, or of all California."""
    published = PUBLISHED[name]
    places = []
    for names in (published.coordinates, published.graphs):
        place = _find(names, name, data_dir)
        if place is None and (needs_graph or names is published.coordinates):
            raise _not_found(name, names, data_dir)
        places.append(place)
    sensors_path, graph_path = places
    sensors = largest.read_sensors(sensors_path, published.districts)
    adjacency = traffic_formats.self_edges(len(sensors.ids)).astype(np.float32)
    if graph_path is not None:
        is_whole = graph_path.name == published.graphs[-1]
        adjacency = largest.read_adjacency(
            graph_path, sensors.matrix_rows if is_whole else None, len(sensors.ids)
        )
    readings = largest.read_flows(path, sensors.ids, published.num_steps)
    places = (sensors.latitude, sensors.longitude)
    return _assembled(path, name, readings, adjacency, places, needs_graph)


def _assembled(
    path: Path,
    name: str,
    readings: traffic_formats.Readings,
    adjacency: np.ndarray,
    places: tuple[np.ndarray | None, np.ndarray | None],
    needs_graph: bool,
) -> TrafficDataset:
    """A published dataset of its parts, checked; places: latitude and longitude."""
    dataset = TrafficDataset(
        name,
        readings.speed,
        readings.timestamps,
        np.array(readings.sensor_ids),
        adjacency,
        *places,
        unit=PUBLISHED[name].unit,
    )
    with files.reading(path, "traffic dataset"):
        return _noted(_checked(dataset), needs_graph)


def _listed_ids(name: str, data_dir) -> tuple[str, ...] | None:
    """Ids from a list beside the readings, for a dataset that has one."""
    published = PUBLISHED[name]
    if not published.ids:
        return None
    path = _find(published.ids, name, data_dir)
    if path is None:
        raise _not_found(name, published.ids, data_dir)
    return traffic_formats.read_ids(path, published.num_sensors)


def _readings(
    path: Path, published: Published, sensor_ids: tuple[str, ...] | None
) -> traffic_formats.Readings:
    if path.suffix == ".h5":
        return hdf.read(path)
    if path.suffix == ".csv":
        return traffic_formats.read_csv(path)
    shape = (published.num_steps, published.num_sensors, published.num_channels)
    return traffic_formats.read_pems(path, published.start, shape, sensor_ids)


def _graph(path: Path, sensor_ids, published: Published) -> traffic_formats.Graph:
    if path.suffix == ".pkl":
        return traffic_formats.read_graph_pickle(path)
    distances = traffic_formats.read_triples(path)
    if published.start:
        return traffic_formats.graph_from_roads(distances, sensor_ids)
    return traffic_formats.graph_from_distances(distances, sensor_ids)


def _coordinates(path: Path, sensor_ids) -> tuple[np.ndarray, np.ndarray]:
    with files.reading(path, "list of sensor locations"):
        table = traffic_formats.read_triples(path)
        row = {sensor: index for index, sensor in enumerate(table.first)}
        missing = next((sensor for sensor in sensor_ids if sensor not in row), None)
        if missing is not None:
            raise InputError(f"no location of sensor {missing}")
        rows = [row[sensor] for sensor in sensor_ids]
        return table.second[rows].astype(np.float64), table.third[rows]


def _checked(dataset: TrafficDataset) -> TrafficDataset:
    """Checks that the arrays fit together; missing readings become 0.

    Raises:
      InputError: if they do not fit. The message does not name the file.
    """
    speed = np.where(np.isnan(dataset.speed), 0, dataset.speed)
    with np.errstate(over="ignore"):  # beyond float32 is infinite
        adjacency = dataset.adjacency.astype(np.float32, copy=False)
        speed = speed.astype(np.float32, copy=False)
    dataset = dataclasses.replace(dataset, speed=speed, adjacency=adjacency)
    if not (np.isfinite(speed) & (speed >= 0)).all():
        raise InputError(
            "readings have infinite or negative entries; a missing one is 0 or NaN"
        )
    windows.split_sizes(len(speed), dataset.fractions)
    network.check(dataset)
    for axis in (dataset.latitude, dataset.longitude):
        if axis is not None and not np.isfinite(axis).all():
            raise InputError("latitude or longitude has entries that are not finite")
    return dataclasses.replace(dataset, sensor_ids=_plain_ids(dataset.sensor_ids))


def _plain_ids(sensor_ids: np.ndarray) -> np.ndarray:
    """Ids as int64 where all are whole numbers, else as text; all must differ."""
    texts = id_texts(sensor_ids)
    if len(set(texts)) != len(texts):
        raise InputError("two sensors have the same id")
    plain = all(text.isdecimal() and str(int(text)) == text for text in texts)
    return np.array(texts).astype(np.int64) if plain else np.array(texts)


def cut(
    dataset: TrafficDataset, num_sensors: int | None = None, num_days: int | None = None
) -> TrafficDataset:
    """Makes a dataset smaller: some connected sensors, the first days.

    Sensors are chosen from the first one on, by repeatedly adding the sensor with the
    largest max(W_ij, W_ji) to any already chosen (the first of equals), and stay in
    the order of the dataset. A day is 24 hours from the first time stamp on.

    Args:
      dataset: what to cut; arrays that do not change are shared with the result.
      num_sensors: how many to keep; None keeps all.
      num_days: how many to keep; None keeps all.

    Returns:
      The smaller dataset, with a line in `notes` for each cut.

    Raises:
      InputError: if there are not as many sensors or days, or too few steps are left.
    """
    if num_days is not None:
        dataset = _cut_days(dataset, num_days)
    if num_sensors is not None:
        dataset = _cut_sensors(dataset, num_sensors)
    return dataset


def _cut_days(dataset: TrafficDataset, num_days: int) -> TrafficDataset:
    days = (dataset.timestamps - dataset.timestamps[0]) // np.timedelta64(1, "D")
    total = int(days[-1]) + 1
    if not 1 <= num_days <= total:
        raise InputError(f"{dataset.name} has {total} days: cannot take {num_days}")
    if num_days == total:
        return dataset
    num_steps = int(np.searchsorted(days, num_days))
    windows.split_sizes(num_steps, dataset.fractions)
    note = f"cut to the first {num_days} of {total} days ({num_steps} steps)"
    return dataclasses.replace(
        dataset,
        speed=dataset.speed[:num_steps],
        timestamps=dataset.timestamps[:num_steps],
        notes=(*dataset.notes, note),
    )


def _cut_sensors(dataset: TrafficDataset, num_sensors: int) -> TrafficDataset:
    total = len(dataset.sensor_ids)
    if not 1 <= num_sensors <= total:
        raise InputError(
            f"{dataset.name} has {total} sensors: cannot take {num_sensors}"
        )
    kept = _grow(dataset.adjacency, num_sensors)
    if num_sensors == total:
        return dataset
    note = f"cut to {num_sensors} of {total} sensors, grown from the first one"
    dataset = take_sensors(dataset, kept)
    return dataclasses.replace(dataset, notes=(*dataset.notes, note))


def _grow(adjacency: np.ndarray, size: int) -> np.ndarray:
    """Indices, sorted, of a node set grown from node 0 along the largest weights."""
    weights = np.maximum(adjacency, adjacency.T)
    chosen = [0]
    reach = weights[0].copy()  # largest weight to any chosen node; -1 once chosen
    for _ in range(size - 1):
        reach[chosen[-1]] = -1
        chosen.append(int(np.argmax(reach)))
        reach = np.where(reach < 0, -1, np.maximum(reach, weights[chosen[-1]]))
    return np.sort(chosen)


def statistics(dataset: TrafficDataset) -> dict:
    """Counts of sensors, edges, steps and windows, and what the readings are.

    Edges are the non-zero entries of the adjacency, self edges included unless the
    key says otherwise.
    """
    num_steps = len(dataset.speed)
    train, validation, test = windows.split_sizes(num_steps, dataset.fractions)
    edges = dataset.adjacency != 0
    return {
        "name": dataset.name,
        "num_nodes": len(dataset.sensor_ids),
        "num_edges": int(edges.sum()),
        "num_nonself_edges": int(edges.sum() - np.trace(edges)),
        "num_steps": num_steps,
        "step_seconds": dataset.step.seconds,
        "unit": dataset.unit,
        "train_windows": train,
        "validation_windows": validation,
        "test_windows": test,
        "missing_fraction": float(np.mean(~(dataset.speed != 0))),
        "notes": list(dataset.notes),
    }
