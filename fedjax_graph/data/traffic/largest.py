"""Readers of LargeST: flows of California's loop detectors, as they are published.

X. Liu, Y. Xia, Y. Liang, J. Hu, Y. Wang, L. Bai, C. Huang, Z. Liu, B. Hooi,
R. Zimmermann, "LargeST: A Benchmark Dataset for Large-Scale Traffic Forecasting",
NeurIPS 2023, Datasets and Benchmarks. Data: kaggle.com/datasets/liuxu77/largest
(CC BY-NC 4.0); scripts that prepare them: github.com/liuxu77/LargeST. The files:

    ca_his_raw_2019.h5  table in pandas' fixed format, key `t`: 105,120 rows 5 minutes
                        apart, 8,600 columns labelled by sensor ids, float64 vehicles
                        per 5 minutes; NaN where a reading is missing
    ca_his_2019.h5      the same after the publisher's first script: 35,040 means over
                        15 minutes of the readings that are there, rounded; 0 for none
    ca_meta.csv         ID, Lat, Lng, District, County, Fwy, Lanes, Type, Direction and
                        ID2, the sensor's row in
    ca_rn_adj.npy       [8600, 8600] float64: weights in [0, 1] made of distances along
                        roads, 0 below 0.01; not symmetric, taken as they are

and `sd_his_2019.h5`, `sd_meta.csv`, `sd_rn_adj.npy` (`gba`, `gla`), which further
scripts cut out of those by the districts of PeMS: 11 is SD, 4 GBA, 7, 8 and 12 GLA.
Without self edges the publisher counts 17,319 edges in SD, 61,246 in GBA, 98,703 in GLA
and 201,363 in CA.

Raw readings become means here as the publisher's script makes them: the mean is one of
vehicles per 5 minutes. Windows are split 60/20/20 as in the paper; of 35,017 windows
the publisher rounds validation to 7,003 and leaves 7,004 for the test, here it is the
other way round.
"""

import csv
import os
from collections.abc import Sequence
from typing import NamedTuple

import h5py
import numpy as np

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files, limits
from fedjax_graph.data.traffic import formats, hdf

STEP = np.timedelta64(15, "m").astype("timedelta64[ns]")
ROWS_PER_STEP = 3  # of the raw readings
_BLOCK_BYTES = 1 << 26  # of readings that are in memory as float64 at a time


class Sensors(NamedTuple):
    """The sensors of some districts, in the order of their file."""

    ids: tuple[str, ...]  # N
    matrix_rows: np.ndarray  # [N] int64, rows and columns in California's matrix
    latitude: np.ndarray  # [N] degrees
    longitude: np.ndarray  # [N] degrees


def read_sensors(path: str | os.PathLike, districts: Sequence[int]) -> Sensors:
    """Reads ca_meta.csv, sd_meta.csv and their like.

    Args:
      path: the file.
      districts: of PeMS; sensors of others are left out.

    Raises:
      InputError: one line; the file is broken, or lacks a column or the districts.
    """
    kind = "table of sensors"
    with files.reading(path, kind), limits.open_text(path, share=64) as file:
        table = csv.DictReader(file)
        for column in ("ID", "Lat", "Lng", "District", "ID2"):
            if column not in (table.fieldnames or ()):
                raise InputError(
                    f"no column {column!r}; found {', '.join(table.fieldnames or ())}"
                )
        rows = [row for row in table if int(row["District"]) in districts]
        if not rows:
            raise InputError(f"no sensor of district {', '.join(map(str, districts))}")
        return Sensors(
            ids=formats.id_texts([row["ID"] for row in rows]),
            matrix_rows=np.array([int(row["ID2"]) for row in rows]),
            latitude=np.array([float(row["Lat"]) for row in rows]),
            longitude=np.array([float(row["Lng"]) for row in rows]),
        )


def read_adjacency(
    path: str | os.PathLike, rows: np.ndarray | None, num_sensors: int
) -> np.ndarray:
    """Reads ca_rn_adj.npy and its like, of which only a part need be in memory.

    Args:
      path: the file.
      rows: [N] rows and columns to take, in this order; None for all, which then have
        to be as many as there are sensors.
      num_sensors: N.

    Returns:
      [N, N] float32.

    Raises:
      InputError: one line; the file is broken, or has another shape.
    """
    with files.reading(path, "NumPy .npy file of a matrix"):
        matrix = np.lib.format.open_memmap(path, mode="r")
        size = num_sensors if rows is None else max(len(matrix), int(rows.max()) + 1)
        if matrix.shape != (size, size) or matrix.dtype.kind not in "fiu":
            raise InputError(
                f"matrix has shape {matrix.shape} and type {matrix.dtype}, expected "
                f"numbers, {size} by {size}"
            )
        rows = np.arange(size) if rows is None else rows
        if rows.min() < 0 or len(np.unique(rows)) != num_sensors:
            raise InputError("sensors share a row of the matrix, or have none (ID2)")
        adjacency = np.empty((num_sensors, num_sensors), np.float32)
        with np.errstate(over="ignore"):  # beyond float32 is infinite, refused later
            for i, row in enumerate(rows):
                adjacency[i] = matrix[row][rows]
        return adjacency


def read_flows(
    path: str | os.PathLike, sensor_ids: Sequence[str], most_steps: int
) -> formats.Readings:
    """Reads ca_his_raw_2019.h5, ca_his_2019.h5, sd_his_2019.h5 and their like.

    Readings become means over 15 minutes of those that are there, rounded to whole
    numbers; what has such steps already stays. Memory: the result in float32 and some
    blocks of rows.

    Args:
      path: the file.
      sensor_ids: columns to take, in this order.
      most_steps: steps of 15 minutes that the file may span.

    Returns:
      The means, NaN where there is no reading.

    Raises:
      InputError: one line; the file is broken, too long, or lacks a sensor.
    """
    with files.reading(path, "pandas fixed-format .h5 file"), h5py.File(path) as file:
        table, labels, timestamps = hdf.table_of(file, ROWS_PER_STEP * most_steps)
        values = hdf.array_of(table, "block0_values", is_whole=False)
        items = formats.id_texts(hdf.array_of(table, "block0_items")[()])
        shape = (len(timestamps), len(items))
        if values.shape != shape or values.dtype.kind != "f":
            raise InputError(
                f"block0_values has shape {values.shape} and type {values.dtype}, "
                f"expected floats, a row for each of {shape[0]} time stamps and a "
                f"column for each of {shape[1]} sensors"
            )
        if sorted(items) != sorted(labels):
            raise InputError("expected one block with the readings of all sensors")
        columns = _columns(sensor_ids, items)
        first_step, steps = _steps(timestamps, most_steps)
        flows = np.full((steps[-1] + 1, len(columns)), np.nan, np.float32)
        firsts = np.flatnonzero(np.diff(steps, prepend=-1))  # a row of each step
        num_blocks = -(-values.dtype.itemsize * shape[0] * shape[1] // _BLOCK_BYTES)
        for block in np.array_split(firsts, min(num_blocks, len(firsts))):
            after = np.searchsorted(firsts, block[-1], side="right")
            stop = firsts[after] if after < len(firsts) else len(steps)
            rows = np.take(values[block[0] : stop], columns, axis=1)
            flows[steps[block]] = _means(rows, block - block[0])
    stamps = (first_step + np.arange(len(flows))) * STEP
    return formats.Readings(flows, stamps.astype("M8[ns]"), tuple(sensor_ids))


def _columns(sensor_ids: Sequence[str], items: Sequence[str]) -> list[int]:
    column = {sensor: index for index, sensor in enumerate(items)}
    missing = next((sensor for sensor in sensor_ids if sensor not in column), None)
    if missing is not None:
        raise InputError(f"no readings of sensor {missing}")
    return [column[sensor] for sensor in sensor_ids]


def _steps(timestamps: np.ndarray, most_steps: int) -> tuple[int, np.ndarray]:
    """The first step of 15 minutes since 1970, and [T] how many later each row is."""
    if (
        len(timestamps) == 0
        or not (np.diff(timestamps) > np.timedelta64(0, "ns")).all()
    ):
        raise InputError("time stamps have to increase from row to row")
    steps = timestamps.astype(np.int64) // STEP.astype(np.int64)
    num_steps = int(steps[-1] - steps[0]) + 1
    if num_steps > most_steps:
        raise InputError(
            f"readings span {num_steps} steps of 15 minutes, expected at most "
            f"{most_steps}: those of one year"
        )
    return int(steps[0]), steps - steps[0]


def _means(rows: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Rounded means of the readings from each of `firsts` on; NaN where none is."""
    if (np.isinf(rows) | (rows < 0)).any():
        raise InputError("readings have infinite or negative entries")
    is_there = ~np.isnan(rows)
    total = np.add.reduceat(np.where(is_there, rows, 0), firsts, axis=0)
    count = np.add.reduceat(is_there, firsts, axis=0, dtype=np.int64)
    none = np.full_like(total, np.nan)
    return np.round(np.divide(total, count, none, where=count > 0))
