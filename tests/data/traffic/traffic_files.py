"""A network of four sensors in every format, and what is expected of it."""

import pickle

import h5py
import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import datasets as traffic

NUM_STEPS = 40
IDS = (717447, 773869, 400001, 767541)
START = np.datetime64("2012-03-01T00:00", "ns")
STEP = np.timedelta64(5, "m")
SPEED = np.random.default_rng(0).integers(0, 8, (NUM_STEPS, 4)) * np.float32(8.75)
TIMESTAMPS = START + STEP * np.arange(NUM_STEPS)
ADJACENCY = np.float32([[1, 0.5, 0, 0], [0, 1, 0.25, 0], [0, 0, 1, 0], [0.75, 0, 0, 1]])
LATITUDE = np.array([34.1, 34.2, 34.3, 34.4])
LONGITUDE = np.array([-118.4, -118.3, -118.2, -118.1])


def write_npz(path, remove=(), **changes):
    arrays = {
        "speed": SPEED,
        "timestamps_ns": TIMESTAMPS.astype(np.int64),
        "sensor_ids": np.array(IDS),
        "adjacency": ADJACENCY,
        "latitude": LATITUDE,
        "longitude": LONGITUDE,
    } | changes
    np.savez(path, **{key: v for key, v in arrays.items() if key not in remove})
    return path


def write_h5(path, key="df", ids=IDS, blocks=((0, 1, 2, 3),), speed=SPEED):
    """What `pandas.DataFrame.to_hdf` writes in its fixed format."""
    ids = np.array(ids)
    ids = ids.astype("S") if ids.dtype.kind == "U" else ids
    with h5py.File(path, "w") as file:
        table = file.create_group(key)
        table.attrs["pandas_type"] = np.bytes_(b"frame")
        table["axis0"] = ids
        table["axis1"] = TIMESTAMPS.astype(np.int64)
        table["axis1"].attrs["kind"] = np.bytes_(b"datetime64[ns]")
        for index, columns in enumerate(blocks):
            table[f"block{index}_items"] = ids[list(columns)]
            table[f"block{index}_values"] = speed[:, list(columns)].astype(float)
    return path


def write_csv(path, speed=SPEED, ids=IDS, timestamps=TIMESTAMPS):
    with open(path, "w", encoding="utf-8") as file:
        print("", *ids, sep=",", file=file)
        for time, row in zip(timestamps, speed.tolist(), strict=True):
            stamp = str(time.astype("M8[s]")).replace("T", " ")
            cells = ("" if np.isnan(value) else value for value in row)
            print(stamp, *cells, sep=",", file=file)
    return path


def write_graph(path, order=(2, 0, 3, 1), ids=IDS):
    ids = [str(ids[i]) for i in order]
    index = {sensor: i for i, sensor in enumerate(ids)}
    content = [ids, index, ADJACENCY[np.ix_(order, order)]]
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def assert_small(dataset, order=(0, 1, 2, 3)):
    order = list(order)
    np.testing.assert_array_equal(dataset.speed, SPEED[:, order])
    assert dataset.speed.dtype == np.float32
    np.testing.assert_array_equal(dataset.timestamps, TIMESTAMPS)
    assert dataset.timestamps.dtype == "M8[ns]"
    assert dataset.sensor_ids.tolist() == [IDS[i] for i in order]
    np.testing.assert_array_equal(dataset.adjacency, ADJACENCY[np.ix_(order, order)])
    assert dataset.adjacency.dtype == np.float32


def fails(match, name="metr_la", data_dir=None, path=None):
    """Loads, expects one line about the file, and returns it."""
    with pytest.raises(InputError, match=match) as raised:
        traffic.load(str(name), data_dir)
    message = str(raised.value)
    assert "\n" not in message
    assert path is None or message.startswith(f"{path}: ")
    return message
