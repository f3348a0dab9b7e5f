"""Reader of pandas' fixed HDF5 format, in which sensor networks are published.

What a file links to in other files is not read, nor looked at.
"""

import os
import re
from typing import cast

import h5py
import numpy as np

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files, limits
from fedjax_graph.data.traffic import formats, time_steps


def read(path: str | os.PathLike) -> formats.Readings:
    """Reads a table in pandas' fixed HDF5 format: metr-la.h5, pems-bay.h5.

    The file holds one table, under any key (`df` and `speed` in those two). Column
    labels are sensor ids, integers or text; row labels are time stamps.
    """
    with files.reading(path, "pandas fixed-format .h5 file"), h5py.File(path) as file:
        table, sensor_ids, timestamps = table_of(file)
        limits.check_shape("its table", (len(timestamps), len(sensor_ids)), 8)
        speed = np.full((len(timestamps), len(sensor_ids)), np.nan, np.float32)
        column = {sensor: index for index, sensor in enumerate(sensor_ids)}
        for key in (key for key in table if re.fullmatch(r"block\d+_values", str(key))):
            values = array_of(table, key)
            items = formats.id_texts(
                array_of(table, key.replace("values", "items"))[()]
            )
            shape = (len(timestamps), len(items))
            if values.shape != shape or values.dtype.kind == "S":
                raise InputError(
                    f"{key} has shape {values.shape} and type {values.dtype}, expected "
                    f"numbers, a row for each of {shape[0]} time stamps and a column "
                    f"for each of {shape[1]} sensors"
                )
            speed[:, [column.pop(item) for item in items]] = values[()]
        if column:
            raise InputError(f"no readings of sensor {next(iter(column))}")
    return formats.Readings(speed, timestamps, sensor_ids)


def table_of(
    file: h5py.File, most_rows: int | None = None
) -> tuple[h5py.Group, tuple[str, ...], np.ndarray]:
    """The one table in pandas' fixed format of a file, without its readings.

    Args:
      file: open.
      most_rows: how many rows it may have; None for any number.

    Returns:
      The group, the column labels N, and the row labels [T] datetime64[ns].

    Raises:
      InputError: there is no such table, or it is larger or labelled by something else.
    """
    tables = [
        key
        for key in file
        if _is_own(file, key)
        and isinstance(file[key], h5py.Group)
        and "axis0" in list(file[key])
    ]
    if len(tables) != 1:
        raise InputError(
            "expected one table in pandas' fixed format (key 'df' or 'speed'), "
            f"found {len(tables)} under the keys {sorted(file)}"
        )
    table = cast(h5py.Group, file[tables[0]])
    rows = array_of(table, "axis1")
    if most_rows is not None and len(rows) > most_rows:
        raise InputError(f"{len(rows)} rows, expected at most {most_rows}")
    sensor_ids = formats.id_texts(array_of(table, "axis0")[()])
    return table, sensor_ids, _timestamps(rows)


def array_of(table: h5py.Group, key: str, is_whole: bool = True) -> h5py.Dataset:
    """An array of a table, not read yet; its content has to lie in the file itself.

    Args:
      table: where it is.
      key: its name.
      is_whole: whether all of it is going to be read at a time.

    Raises:
      InputError: there is none, it is a link to another file or made from parts, or
        more is to be read at a time than there may be.
    """
    array = table[key] if _is_own(table, key) else None
    if not isinstance(array, h5py.Dataset) or array.external or array.is_virtual:
        raise InputError(f"{key} is not an array that lies in this file")
    if array.dtype.kind not in "fiuS":  # others may be of any length, or no numbers
        is_text = h5py.check_string_dtype(array.dtype) is not None
        found = "text of any length" if is_text else f"type {array.dtype}"
        raise InputError(
            f"{key} has {found}, expected numbers or text of a fixed length, as pandas "
            "writes it"
        )
    for shape in (array.shape if is_whole else (), array.chunks or ()):
        limits.check_shape(f"its array {key}", shape or (), array.dtype.itemsize)
    return array


def _timestamps(axis: h5py.Dataset) -> np.ndarray:
    kind = _text_of(axis, "kind") or "datetime64"
    match = re.fullmatch(r"datetime64(?:\[(\w+)\])?", kind)
    if match is None or axis.dtype.kind != "i":
        raise InputError(f"rows are labelled by {kind}, expected time stamps")
    if "tz" in axis.attrs:
        raise InputError("rows have a time zone, expected wall-clock time without one")
    stamps = axis[()].astype(f"M8[{match[1] or 'ns'}]")
    return time_steps.as_stamps("its axis of rows", stamps)


def _text_of(array: h5py.Dataset, name: str) -> str:
    """An attribute that is one text; "" where there is none."""
    if name not in array.attrs:
        return ""
    attribute = array.attrs.get_id(name)
    if attribute.shape or attribute.dtype.kind not in "OS":
        raise InputError(f"the attribute {name} of its axis is no text")
    if attribute.dtype.kind == "O":  # of any length, in the file as it is
        limits.check_file(array.file.filename)
    text = array.attrs[name]
    return text.decode() if isinstance(text, bytes) else str(text)


def _is_own(group: h5py.Group, key: str) -> bool:
    """Whether a group has an object itself: no link is followed to find out."""
    if key not in list(group):
        return False
    link = group.id.links.get_info(key.encode(errors="surrogateescape"))
    return link.type == h5py.h5l.TYPE_HARD
