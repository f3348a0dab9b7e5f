import functools
import os
import pickle
import re

import h5py
import numpy as np
import pytest

from fedjax_graph.data import download, safe_pickle, traffic, traffic_formats, windows
from fedjax_graph.errors import InputError

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


@pytest.fixture
def small(cache, monkeypatch, tmp_path):
    """A data folder for a METR-LA of the four sensors above."""
    published = traffic.PUBLISHED["metr_la"]
    small = published._replace(num_sensors=4, num_steps=NUM_STEPS)
    monkeypatch.setitem(traffic.PUBLISHED, "metr_la", small)
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


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


# --- the formats ---------------------------------------------------------------


def test_a_users_npz(cache, tmp_path):
    dataset = traffic.load(str(write_npz(tmp_path / "mine.npz")))
    assert_small(dataset)
    assert (dataset.name, dataset.notes) == ("mine", ())
    np.testing.assert_array_equal(dataset.latitude, LATITUDE)
    np.testing.assert_array_equal(dataset.longitude, LONGITUDE)


def test_a_users_npz_of_the_least_content(cache, tmp_path):
    optional = ("timestamps_ns", "sensor_ids", "latitude", "longitude", "adjacency")
    path = write_npz(
        tmp_path / "mine.npz",
        remove=optional,
        start_ns=START.astype(np.int64),
        freq_ns=np.int64(300 * 10**9),
        distance_from=np.array([0, 1, 3]),
        distance_to=np.array([1, 2, 2]),
        distance_cost=np.array([100.0, 300.0, 1000.0]),
    )
    dataset = traffic.load(str(path))
    np.testing.assert_array_equal(dataset.timestamps, TIMESTAMPS)
    assert dataset.sensor_ids.tolist() == [0, 1, 2, 3]
    assert dataset.latitude is None and dataset.longitude is None
    variance = (366.666**2 + 166.666**2 + 533.333**2) / 3
    expected = np.eye(4)
    expected[0, 1] = np.exp(-(100.0**2) / variance)
    expected[1, 2] = np.exp(-(300.0**2) / variance)  # and 3 to 2 is below 0.1
    np.testing.assert_allclose(dataset.adjacency, expected, rtol=1e-5)


def test_missing_readings_are_zero(cache, tmp_path):
    speed = np.where(SPEED == 0, np.nan, SPEED)
    dataset = traffic.load(str(write_npz(tmp_path / "mine.npz", speed=speed)))
    assert_small(dataset)
    missing = traffic.statistics(dataset)["missing_fraction"]
    assert missing == np.mean(SPEED == 0) > 0


@pytest.mark.parametrize("ids", [IDS, tuple(map(str, IDS))], ids=["integer", "text"])
@pytest.mark.parametrize("key", ["df", "speed"])
@pytest.mark.parametrize("blocks", [((0, 1, 2, 3),), ((3, 1), (0, 2))])
def test_readings_in_hdf5_follow_the_order_of_the_graph(small, ids, key, blocks):
    write_h5(small / "metr-la.h5", key, ids, blocks)
    write_graph(small / "adj_mx.pkl")
    assert_small(traffic.load("metr_la", small), order=(2, 0, 3, 1))


def test_readings_in_csv(small):
    (small / "METR-LA").mkdir()
    write_csv(small / "METR-LA" / "metr-la.csv", np.where(SPEED == 0, np.nan, SPEED))
    write_graph(small / "adj_mx.pkl", order=(0, 1, 2, 3))
    with open(small / "graph_sensor_locations.csv", "w", encoding="utf-8") as file:
        print("index,sensor_id,latitude,longitude", file=file)
        for i in (3, 0, 1, 2):
            print(i, IDS[i], LATITUDE[i], LONGITUDE[i], sep=",", file=file)
    dataset = traffic.load("metr_la", small)
    assert_small(dataset)
    np.testing.assert_array_equal(dataset.latitude, LATITUDE)
    np.testing.assert_array_equal(dataset.longitude, LONGITUDE)


@pytest.mark.parametrize("header", ["", "from,to,cost\n"])
def test_a_graph_from_distances_leaves_sensors_without_readings_out(small, header):
    write_h5(small / "metr-la.h5")
    distances = "717447,773869,100.0\n773869,717447,400\n1,717447,5.0\n1,1,0.0\n"
    (small / "distances_la_2012.csv").write_text(header + distances)
    adjacency = traffic.load("metr_la", small).adjacency
    expected = np.eye(4)  # the standard deviation of 100 and 400 is 150
    expected[0, 1] = np.exp(-((100 / 150) ** 2))
    np.testing.assert_allclose(adjacency, expected, rtol=1e-6)


def test_the_compact_file_comes_first_and_the_environment_counts(small, monkeypatch):
    write_npz(small / "metr_la.npz")
    (small / "metr-la.h5").write_text("not read")
    monkeypatch.setenv("FEDJAX_GRAPH_DATA", str(small))
    assert_small(traffic.load("metr_la"))


def test_downloads_are_found_in_the_cache(small, cache):
    cache.mkdir()
    write_h5(cache / "metr-la.h5")
    write_graph(cache / "adj_mx.pkl", order=(0, 1, 2, 3))
    assert_small(traffic.load("metr_la"))
    assert_small(traffic.load("metr_la", small))  # a folder without the files


def test_fewer_steps_than_published_are_noted(small, monkeypatch):
    published = traffic.PUBLISHED["metr_la"]._replace(num_steps=99)
    monkeypatch.setitem(traffic.PUBLISHED, "metr_la", published)
    write_npz(small / "metr_la.npz")
    assert traffic.load("metr_la", small).notes == (
        "40 steps, where 99 were published",
    )


def test_a_users_npz_may_name_its_unit(cache, tmp_path):
    path = tmp_path / "mine.npz"
    assert traffic.load(str(write_npz(path))).unit == "mph"
    dataset = traffic.load(str(write_npz(path, unit="km/h")))
    assert dataset.unit == "km/h"
    assert traffic.cut(dataset, num_sensors=2).unit == "km/h"


# --- PEMSD4 and PEMSD8 -----------------------------------------------------------

# Sensor 3 is reached from 2 alone, by the longest road: below the threshold.
ROADS = ((0, 1, 100.0), (1, 2, 200.0), (1, 2, 200.0), (2, 3, 1000.0), (2, 1, 250.0))


def write_pems(path, remove=(), **changes):
    """Channels: flow, and two that differ from it everywhere."""
    data = np.stack([SPEED, SPEED / 100 + 0.001, SPEED + 1000], axis=-1).astype(float)
    arrays = {"data": data} | changes
    np.savez(path, **{key: v for key, v in arrays.items() if key not in remove})
    return path


def write_roads(path, roads=ROADS):
    path.parent.mkdir(exist_ok=True)
    rows = [f"{sender},{receiver},{cost}\n" for sender, receiver, cost in roads]
    path.write_text("from,to,cost\n" + "".join(rows))
    return path


@pytest.fixture
def pems(cache, monkeypatch, tmp_path):
    """A data folder for a PEMSD4 of four sensors and a PEMSD8 of three."""
    for name, num_sensors in (("pems_d4", 4), ("pems_d8", 3)):
        small = traffic.PUBLISHED[name]._replace(
            num_sensors=num_sensors, num_steps=NUM_STEPS
        )
        monkeypatch.setitem(traffic.PUBLISHED, name, small)
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("readings", "roads"),
    [
        ("pems04.npz", "PEMS04.distance.csv"),
        ("PEMS04.npz", "PEMS04.csv"),
        ("pems04.npz", "distance.csv"),
        ("PEMS04/pems04.npz", "PEMS04/distance.csv"),
        ("PEMS04/PEMS04.npz", "pems_d4_d8/PEMS04.distance.csv"),
        ("pems_d4_d8/pems04.npz", "pems_d4_d8/PEMS04.csv"),
    ],
)
def test_flows_of_pemsd4_are_found_with_their_roads(pems, readings, roads):
    (pems / readings).parent.mkdir(exist_ok=True)
    write_pems(pems / readings)
    write_roads(pems / roads)
    dataset = traffic.load("pems_d4", pems)
    assert (dataset.name, dataset.unit) == ("pems_d4", "vehicles / 5 min")
    assert dataset.notes == ()
    np.testing.assert_array_equal(dataset.speed, SPEED)
    assert dataset.speed.dtype == np.float32
    np.testing.assert_array_equal(dataset.sensor_ids, range(4))
    assert dataset.timestamps[0] == np.datetime64("2018-01-01T00:00")
    np.testing.assert_array_equal(np.diff(dataset.timestamps), STEP)
    # Distances once each way: 100, 200 (the shorter) and 1000; their variance:
    variance = (100**2 + 200**2 + 1000**2) / 3 - (1300 / 3) ** 2
    near, far = np.exp(-(100**2) / variance), np.exp(-(200**2) / variance)
    expected = np.eye(4)
    expected[[0, 1], [1, 0]] = near
    expected[[1, 2], [2, 1]] = far
    np.testing.assert_allclose(dataset.adjacency, expected, rtol=1e-5)


def test_flows_of_pemsd8_begin_in_july(pems):
    data = np.tile(SPEED[:, :3, None], 3).astype(float)
    data[5, 1, 0] = np.nan
    write_pems(pems / "pems08.npz", data=data)
    write_pems(pems / "pems04.npz")
    write_roads(pems / "PEMS08.csv", ROADS[:2])
    write_roads(pems / "PEMS04.csv")
    dataset = traffic.load("pems_d8", pems)
    assert (dataset.speed.shape, dataset.unit) == ((NUM_STEPS, 3), "vehicles / 5 min")
    assert dataset.timestamps[0] == np.datetime64("2016-07-01T00:00")
    assert dataset.speed[5, 1] == 0
    assert dataset.adjacency.shape == (3, 3)
    assert traffic.load("pems_d4", pems).speed.shape == (NUM_STEPS, 4)


def test_a_repacked_pemsd4_counts_vehicles(pems):
    write_npz(pems / "pems_d4.npz")
    dataset = traffic.load("pems_d4", pems)
    assert_small(dataset)
    assert dataset.unit == "vehicles / 5 min"


FLOW = np.tile(SPEED[:, :, None], 3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"remove": ("data",), "flow": SPEED}, "no array 'data'; found flow"),
        ({"data": FLOW[:-1]}, r"\(39, 4, 3\), expected \(40, 4, 3\)"),
        ({"data": FLOW[:, 1:]}, r"\(40, 3, 3\), expected \(40, 4, 3\)"),
        ({"data": FLOW[:, :, :1]}, r"\(40, 4, 1\), expected \(40, 4, 3\)"),
        ({"data": SPEED}, "with 3 axes"),
        ({"data": FLOW.astype("U")}, "expected numbers"),
        ({"data": FLOW.astype(object)}, "Object arrays cannot be loaded"),
        ({"data": FLOW - 1}, "infinite or negative"),
        ({"data": np.where(FLOW == 0, np.inf, FLOW)}, "infinite or negative"),
    ],
)
def test_flows_that_are_not_as_published(pems, changes, match):
    path = write_pems(pems / "pems04.npz", **changes)
    write_roads(pems / "PEMS04.csv")
    fails(match, "pems_d4", pems, path)


@pytest.mark.parametrize(
    ("roads", "match"),
    [
        ((*ROADS, (3, 4, 50.0)), "names 4; expected roads of all sensors from 0 to 3"),
        ((*ROADS, (-1, 0, 50.0)), "names -1; expected"),
        ((*ROADS, (0.5, 0, 50.0)), "names 0.5; expected"),
        (ROADS[:3], "has no road of 3; expected roads of all sensors from 0 to 3"),
        ((*ROADS, (0, 3, -5.0)), "not negative"),
        ((*ROADS, (0, 3, np.nan)), "finite"),
        ((*ROADS, (0, 3, "far")), "not a readable"),
        (((0, 1, 7.0), (2, 3, 7.0)), "differ"),
        ((), "rows of three columns"),
    ],
)
def test_roads_that_are_not_those_of_the_sensors(pems, roads, match):
    write_pems(pems / "pems04.npz")
    path = write_roads(pems / "PEMS04.csv", roads)
    fails(match, "pems_d4", pems, path)


def test_a_list_without_a_number_is_not_taken_from_another_folder(pems):
    write_pems(pems / "pems04.npz")
    for folder in ("PEMS04", "PEMS08", "pems_d4_d8"):
        write_roads(pems / folder / "distance.csv")
    write_roads(pems / "PEMS08.csv")
    message = fails("no PEMS04.distance.csv or PEMS04.csv", "pems_d4", pems)
    assert "--dataset=pems_d4 --download" in message
    assert "put pems04.npz and PEMS04.distance.csv there" in message


def test_missing_flows_are_named_with_what_to_do(pems):
    message = fails("no pems_d8.npz or pems08.npz or PEMS08.npz", "pems_d8", pems)
    assert "--dataset=pems_d8 --download" in message and "--data_dir" in message


# --- bad input -----------------------------------------------------------------


def test_an_unknown_dataset(cache):
    assert "metr_la, pems_bay, pems_bay_subset" in fails("'metrla'", "metrla")


def test_missing_files_are_named_with_what_to_do(cache, tmp_path):
    message = fails("no pems_bay.npz or pems-bay.h5", "pems_bay", tmp_path)
    assert "experiments.datasets --dataset=pems_bay --download" in message
    assert "pems-bay.h5 and adj_mx_bay.pkl" in message and "--data_dir" in message
    assert str(tmp_path) in message
    assert "--download" not in fails("no pems_bay_subset.npz", "pems_bay_subset")
    fails("no such file", tmp_path / "mine.npz")
    fails("no such folder", "metr_la", tmp_path / "absent")


def test_a_missing_graph(small):
    write_h5(small / "metr-la.h5")
    fails("no adj_mx.pkl or distances_la_2012.csv", "metr_la", small)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
@pytest.mark.parametrize("write", [write_npz, write_h5, write_graph])
def test_a_truncated_file(small, write, share):
    paths = {
        write_npz: "metr_la.npz",
        write_h5: "metr-la.h5",
        write_graph: "adj_mx.pkl",
    }
    write_h5(small / "metr-la.h5")
    path = write(small / paths[write])
    content = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(content)
    fails("not a readable", "metr_la", small, path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"speed": SPEED[:, 0]}, "speed has shape"),
        ({"speed": SPEED.astype("U")}, "expected numbers"),
        ({"speed": SPEED[:-1]}, "timestamps has shape"),
        ({"speed": SPEED[:, :3]}, "sensor_ids has shape"),
        ({"adjacency": ADJACENCY[:3, :3]}, "adjacency has shape"),
        ({"latitude": LATITUDE[:3]}, "latitude has shape"),
        ({"longitude": LONGITUDE * np.nan}, "not finite"),
        ({"unit": ["mph"]}, "unit has shape"),
        ({"unit": 3}, "expected one text"),
        ({"unit": " "}, "expected one text"),
        ({"speed": np.where(SPEED == 0, np.inf, SPEED)}, "infinite or negative"),
        ({"speed": SPEED - 1}, "infinite or negative"),
        ({"adjacency": -ADJACENCY}, "negative weights"),
        ({"adjacency": ADJACENCY * np.nan}, "NaN"),
        ({"adjacency": ADJACENCY + np.inf}, "infinite"),
        ({"timestamps_ns": TIMESTAMPS[::-1].astype(int)}, "increase"),
        ({"timestamps_ns": np.full(NUM_STEPS, 7)}, "increase"),
        ({"sensor_ids": np.array([1, 2, 2, 3])}, "same id"),
        ({"sensor_ids": np.array([1.0, 2, 3, 4])}, "integers or text"),
        ({"remove": ("speed",)}, "no array 'speed'"),
        ({"remove": ("adjacency",)}, "no array 'adjacency'"),
        ({"remove": ("timestamps_ns",)}, "no array 'timestamps_ns'"),
        ({"speed": SPEED.astype(object)}, "Object arrays cannot be loaded"),
        (
            {"speed": SPEED[:25], "timestamps_ns": np.arange(25)},
            "25 time steps are too few",
        ),
    ],
)
def test_arrays_that_do_not_fit(cache, tmp_path, changes, match):
    path = write_npz(tmp_path / "mine.npz", **changes)
    fails(match, path, path=path)


@pytest.mark.parametrize("remove", [(), ("adjacency",)])
def test_an_edge_to_a_sensor_that_does_not_exist(cache, tmp_path, remove):
    ends = {"distance_from": np.array([IDS[0]]), "distance_to": np.array([999])}
    cost = np.array([1.0])
    path = write_npz(tmp_path / "mine.npz", remove, **ends, distance_cost=cost)
    fails("sensor 999, which is not among the 4", path, path=path)


def test_the_kernel_counts_self_distances_and_cuts_below_the_threshold():
    ends = [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 1, 2, 3, 0]
    cost = [0, 0, 0, 0, 1, 2.5, 3, 4]  # variance 2.30859375
    expected = np.eye(4)
    expected[0, 1] = 0.648454  # exp(-1 / 2.30859375)
    kernel = functools.partial(traffic.gaussian_kernel_adjacency, *ends, cost, range(4))
    np.testing.assert_allclose(kernel(), expected, rtol=1e-5)
    expected[1, 2] = 0.0667183  # exp(-6.25 / 2.30859375)
    np.testing.assert_allclose(kernel(threshold=0.05), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("cost", "match"),
    [([1.0, -1.0], "not negative"), ([1.0, np.nan], "finite"), ([2.0, 2.0], "differ")],
)
def test_distances_without_a_kernel(cost, match):
    with pytest.raises(InputError, match=match):
        traffic.gaussian_kernel_adjacency([0, 1], [1, 0], cost, [0, 1])


def test_a_single_array_is_not_a_dataset(cache, tmp_path):
    np.save(tmp_path / "one.npy", SPEED)
    path = tmp_path / "mine.npz"
    (tmp_path / "one.npy").rename(path)
    fails("a single array", path, path=path)


def test_a_graph_that_would_run_code(small):
    write_h5(small / "metr-la.h5")
    made = small / "made"
    path = small / "adj_mx.pkl"
    path.write_bytes(b"cos\nmkdir\n(V%s\ntR." % os.fsencode(made))
    fails("would run os.mkdir", "metr_la", small, path)
    assert not made.exists()


def test_graphs_that_do_not_fit(small):
    write_h5(small / "metr-la.h5")
    path = write_graph(small / "adj_mx.pkl", ids=(717447, 773869, 400001, 1))
    fails("sensor 767541 has readings but is not in the graph", data_dir=small)
    for content, match in [
        ({"ids": []}, "expected .sensor_ids"),
        ([["1"], {"1": 0}, ADJACENCY], "adjacency has shape"),
        ([["1", "2"], {"1": 1, "2": 0}, np.eye(2)], "do not agree"),
    ]:
        path.write_bytes(pickle.dumps(content))
        fails(match, data_dir=small, path=path)


def test_a_broken_distance_list(small):
    write_h5(small / "metr-la.h5")
    path = small / "distances_la_2012.csv"
    for content in ("1,2\n", "1,2,3\n1,2\n", "1,2,3\n1,2,far\n", ""):
        path.write_text(content)
        fails("three columns", data_dir=small, path=path)


def test_tables_that_are_not_pandas_fixed_format(small):
    path = small / "metr-la.h5"
    with h5py.File(path, "w") as file:
        file["df/table"] = SPEED
    fails(re.escape("found 0 under the keys ['df']"), data_dir=small, path=path)
    write_h5(path, speed=SPEED[1:])
    fails("block0_values has shape", data_dir=small, path=path)
    write_h5(path, blocks=((0, 1),))
    fails("no readings of sensor 400001", data_dir=small, path=path)
    write_h5(path, ids=(1.0, 2.0, 3.0, 4.0))
    fails("integers or text", data_dir=small, path=path)
    write_h5(path)
    with h5py.File(path, "a") as file:
        file["df/axis1"].attrs["kind"] = np.bytes_(b"integer")
    fails("expected time stamps", data_dir=small, path=path)


def test_tables_of_text_that_are_broken(small):
    path = write_csv(small / "metr-la.csv")
    whole = path.read_text()
    for content, match in [
        ("", "header"),
        (whole[:-20], "columns"),
        (whole.replace("2012-03-01 00:05", "first of March"), "not a readable"),
        (whole.replace(",8.75", ",fast"), "fast"),
        (whole.splitlines()[0] + "\n", "0 time steps are too few"),
    ]:
        path.write_text(content)
        write_graph(small / "adj_mx.pkl")
        fails(match, data_dir=small, path=path)


@pytest.mark.parametrize("name", ["pems_bay.npz", "pems-bay.h5"])
def test_pems_bay_is_never_a_part_of_it(cache, tmp_path, name):
    write = write_npz if name.endswith(".npz") else write_h5
    path = write(tmp_path / name)
    write_graph(tmp_path / "adj_mx_bay.pkl")
    message = fails("expected the 325 sensors", "pems_bay", tmp_path, path)
    assert "found 4" in message


# --- cutting and counting --------------------------------------------------------


def _line(num_days, step_minutes=60):
    steps = np.arange(num_days * 24 * 60 // step_minutes)
    return traffic.TrafficDataset(
        name="line",
        speed=np.tile(np.arange(5, dtype=np.float32), (len(steps), 1)),
        timestamps=START + steps * np.timedelta64(step_minutes, "m"),
        sensor_ids=np.arange(10, 15),
        adjacency=np.float32(
            [
                [1.0, 0.0, 0.3, 0.0, 0.0],
                [0.0, 1.0, 0.0, 0.1, 0.3],
                [0.0, 0.0, 1.0, 0.9, 0.0],
                [0.0, 0.0, 0.0, 1.0, 0.0],
                [0.4, 0.0, 0.0, 0.0, 1.0],
            ]
        ),
        longitude=np.arange(5.0),
        notes=("as published",),
    )


@pytest.mark.parametrize(
    ("num_sensors", "kept"),
    # From 0: 4 by 0.4; then 1 or 2, both 0.3: the lower; then 2, as 0.3 beats 1 -> 3.
    [(1, [0]), (2, [0, 4]), (3, [0, 1, 4]), (4, [0, 1, 2, 4]), (5, [0, 1, 2, 3, 4])],
)
def test_sensors_grow_along_the_largest_weights(num_sensors, kept):
    whole = _line(3)
    part = traffic.cut(whole, num_sensors=num_sensors)
    assert part.sensor_ids.tolist() == [10 + i for i in kept]
    np.testing.assert_array_equal(part.speed[0], kept)
    np.testing.assert_array_equal(part.longitude, kept)
    np.testing.assert_array_equal(part.adjacency, whole.adjacency[np.ix_(kept, kept)])
    assert part.latitude is None
    assert len(part.notes) == (1 if num_sensors == 5 else 2)


def test_sensors_are_taken_in_the_order_wanted():
    whole = _line(1, step_minutes=30)
    part = traffic.take_sensors(whole, np.array([3, 1]))
    assert part.sensor_ids.tolist() == [13, 11]
    np.testing.assert_array_equal(part.speed, whole.speed[:, [3, 1]])
    np.testing.assert_array_equal(part.adjacency, np.float32([[1, 0], [0.1, 1]]))
    assert part.longitude.tolist() == [3, 1] and part.latitude is None
    assert (part.name, part.notes) == (whole.name, whole.notes)


def test_days_are_counted_by_the_clock():
    whole = _line(4)
    gap = np.ones(len(whole.speed), bool)
    gap[26] = False  # 2 o'clock on the second day: daylight saving time begins
    from_noon = np.timedelta64(12, "h")
    dataset = traffic.TrafficDataset(
        "gap",
        whole.speed[gap],
        whole.timestamps[gap] + from_noon,
        whole.sensor_ids,
        whole.adjacency,
    )
    part = traffic.cut(dataset, num_days=2)
    assert len(part.speed) == 47
    assert part.timestamps[-1] == START + np.timedelta64(59, "h")
    assert part.notes == ("cut to the first 2 of 4 days (47 steps)",)
    assert traffic.cut(dataset, num_days=4) is dataset


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"num_sensors": 6}, "has 5 sensors"),
        ({"num_sensors": 0}, "has 5 sensors"),
        ({"num_days": 4}, "has 3 days"),
        ({"num_days": 0}, "has 3 days"),
        ({"num_days": 1}, "24 time steps are too few"),
    ],
)
def test_more_than_there_is_cannot_be_cut(what, match):
    with pytest.raises(InputError, match=match):
        traffic.cut(_line(3), **what)


def test_statistics_of_a_small_network():
    assert traffic.statistics(_line(3)) == {
        "name": "line",
        "num_nodes": 5,
        "num_edges": 10,
        "num_nonself_edges": 5,
        "num_steps": 72,
        "train_windows": 34,
        "validation_windows": 5,
        "test_windows": 10,
        "missing_fraction": 0.2,  # sensor 10 reads 0
        "notes": ["as published"],
    }


# --- real data -------------------------------------------------------------------


@pytest.fixture(scope="module")
def metr_la(data_dir):
    if not (data_dir / "metr_la.npz").is_file():
        pytest.skip("real data: no metr_la.npz")
    return traffic.load("metr_la", data_dir)


@pytest.fixture(scope="module")
def subset(data_dir):
    if not (data_dir / "pems_bay_subset.npz").is_file():
        pytest.skip("real data: no pems_bay_subset.npz")
    return traffic.load("pems_bay_subset", data_dir)


def test_metr_la_has_the_statistics_of_the_paper(metr_la):
    statistics = traffic.statistics(metr_la)
    assert statistics.pop("missing_fraction") == pytest.approx(0.0811, abs=5e-5)
    assert statistics == {
        "name": "metr_la",
        "num_nodes": 207,
        "num_edges": 1722,
        "num_nonself_edges": 1515,
        "num_steps": 34272,
        "train_windows": 23974,
        "validation_windows": 3425,
        "test_windows": 6850,
        "notes": [],
    }
    assert metr_la.timestamps[-1] == np.datetime64("2012-06-27T23:55")
    assert metr_la.speed[metr_la.speed > 0].mean(dtype=float) == pytest.approx(
        58.460, abs=5e-4
    )


def test_pems_bay_has_the_edges_and_windows_of_the_paper(original):
    path = original / "sensor_graph" / "adj_mx_bay.pkl"
    adjacency = traffic_formats.read_graph_pickle(path).adjacency
    assert adjacency.shape == (325, 325)
    assert (np.sum(adjacency != 0), np.trace(adjacency != 0)) == (2694, 325)
    assert windows.split_sizes(52116) == (36465, 5209, 10419)


def test_distances_reproduce_the_published_graph(original):
    folder = original / "sensor_graph"
    published = traffic_formats.read_graph_pickle(folder / "adj_mx_bay.pkl")
    distances = traffic_formats.read_triples(folder / "distances_bay_2017.csv")
    made = traffic_formats.graph_from_distances(distances, published.sensor_ids)
    np.testing.assert_allclose(made.adjacency, published.adjacency, rtol=0, atol=1.2e-7)
    np.testing.assert_array_equal(made.adjacency != 0, published.adjacency != 0)


@pytest.mark.parametrize(
    ("name", "roads", "num_rows", "num_pairs", "num_edges", "num_alone"),
    [
        ("pems_d4", "PEMS04.distance.csv", 340, 340, 418, 67),
        # 18 rows are there twice, and 3 roads are listed both ways.
        ("pems_d8", "PEMS08.distance.csv", 295, 274, 270, 48),
    ],
)
def test_the_published_roads_of_pems(
    original, cache, tmp_path, name, roads, num_rows, num_pairs, num_edges, num_alone
):
    published = traffic.PUBLISHED[name]
    path = original / "pems_d4_d8" / roads
    rows = np.loadtxt(path, delimiter=",", skiprows=1)
    lengths = {frozenset(row[:2].astype(int)): row[2] for row in rows}
    assert (len(rows), len(lengths)) == (num_rows, num_pairs)

    (tmp_path / roads).symlink_to(path)
    flow = np.ones((published.num_steps, published.num_sensors, 3), np.uint8)
    np.savez_compressed(tmp_path / published.readings[1], data=flow)
    dataset = traffic.load(name, tmp_path)
    assert dataset.speed.shape == flow.shape[:2]
    last = {"pems_d4": "2018-02-28T23:55", "pems_d8": "2016-08-31T23:55"}[name]
    assert dataset.timestamps[-1] == np.datetime64(last)

    sigma = np.std(list(lengths.values()))
    expected = np.eye(published.num_sensors)
    for pair, length in lengths.items():
        sender, receiver = pair
        weight = np.exp(-((length / sigma) ** 2))
        if weight >= 0.1:
            expected[sender, receiver] = expected[receiver, sender] = weight
    np.testing.assert_allclose(dataset.adjacency, expected, rtol=1e-5)
    assert traffic.statistics(dataset)["num_nonself_edges"] == num_edges
    assert np.sum(np.sum(dataset.adjacency != 0, axis=1) == 1) == num_alone


def test_the_roads_of_pemsd4_and_pemsd8_cannot_be_confused(original):
    for name, num_sensors, match in [
        ("PEMS04.distance.csv", 170, "names 170; expected"),
        ("PEMS08.distance.csv", 307, "no road of 170"),
    ]:
        roads = traffic_formats.read_triples(original / "pems_d4_d8" / name)
        with pytest.raises(InputError, match=match):
            traffic_formats.graph_from_roads(roads, num_sensors)


def test_the_first_week_of_metr_la_in_hdf5(original, metr_la, cache, tmp_path):
    names = ("adj_mx.pkl", "graph_sensor_locations.csv")
    for name in names:
        (tmp_path / name).symlink_to(original / "sensor_graph" / name)
    (tmp_path / "metr-la.h5").symlink_to(original / "metr-la.first_week.h5")
    week = traffic.load("metr_la", tmp_path)
    np.testing.assert_array_equal(week.speed, metr_la.speed[:2016])
    for field in ("sensor_ids", "adjacency", "latitude", "longitude"):
        np.testing.assert_array_equal(getattr(week, field), getattr(metr_la, field))
    np.testing.assert_array_equal(week.timestamps, metr_la.timestamps[:2016])
    assert week.notes == ("2016 steps, where 34272 were published",)


@pytest.mark.slow
def test_all_of_metr_la_in_its_public_csv(original, metr_la, cache, tmp_path):
    graph = "adj_mx.pkl"
    (tmp_path / graph).symlink_to(original / "sensor_graph" / graph)
    exact = np.round(metr_la.speed.astype(float) * 2520) / 2520
    path = write_csv(
        tmp_path / "metr-la.csv", exact, metr_la.sensor_ids, metr_la.timestamps
    )
    published = download.REGISTRY["metr_la"][0][1]
    assert download.git_blob_id(path) == published.git_blob
    dataset = traffic.load("metr_la", tmp_path)
    np.testing.assert_array_equal(dataset.speed, metr_la.speed)
    np.testing.assert_array_equal(dataset.timestamps, metr_la.timestamps)


def test_the_first_week_of_pems_bay_in_hdf5(original, subset):
    readings = traffic_formats.read_hdf(original / "pems-bay-67.first_week.h5")
    graph = traffic_formats.read_graph_pickle(
        original / "sensor_graph" / "adj_mx_bay.pkl"
    )
    readings, adjacency = traffic_formats.match(readings, graph)
    order = [list(map(str, subset.sensor_ids)).index(i) for i in readings.sensor_ids]
    assert sorted(order) == list(range(67))
    np.testing.assert_array_equal(readings.speed, subset.speed[:2016, order])
    np.testing.assert_array_equal(readings.timestamps, subset.timestamps[:2016])
    np.testing.assert_array_equal(adjacency, subset.adjacency[np.ix_(order, order)])


def test_pems_bay_of_full_width_is_read_from_canonical_files(original, cache, tmp_path):
    folder = original / "sensor_graph"
    for name in ("adj_mx_bay.pkl", "graph_sensor_locations_bay.csv"):
        (tmp_path / name).symlink_to(folder / name)
    ids = safe_pickle.load(folder / "adj_mx_bay.pkl")[0]
    speed = np.tile(np.float32([int(i) % 100 for i in ids]), (NUM_STEPS, 1))
    columns = tuple(range(325))
    shuffled = np.random.default_rng(1).permutation(325)
    write_h5(
        tmp_path / "pems-bay.h5",
        "speed",
        np.array(ids, int)[shuffled],
        (columns,),
        speed[:, shuffled],
    )
    dataset = traffic.load("pems_bay", tmp_path)
    assert dataset.sensor_ids.tolist() == [int(i) for i in ids]
    np.testing.assert_array_equal(dataset.speed, speed)
    statistics = traffic.statistics(dataset)
    assert (statistics["num_edges"], statistics["num_nonself_edges"]) == (2694, 2369)
    assert dataset.latitude[0] == 37.364085 and dataset.longitude[0] == -121.901149


def test_the_subset_says_that_it_is_one(subset):
    statistics = traffic.statistics(subset)
    assert (statistics["num_nodes"], statistics["num_nonself_edges"]) == (67, 129)
    assert statistics["missing_fraction"] == pytest.approx(119 / subset.speed.size)
    assert "67 of the 325 sensors" in subset.notes[0]
    march = traffic.cut(subset, num_days=90)
    assert len(march.speed) == 90 * 288 - 12  # an hour less: daylight saving time
    assert march.timestamps[-1] == np.datetime64("2017-03-31T23:55")


def test_a_cut_of_metr_la_has_the_known_persistence_error(metr_la):
    part = traffic.cut(metr_la, num_sensors=40, num_days=45)
    assert part.speed.shape == (45 * 288, 40)
    now = windows.split_starts(len(part.speed))["test"] + windows.INPUT_STEPS - 1
    ahead = now + 1 + np.arange(windows.TARGET_STEPS)[:, None]
    errors = part.speed[ahead].astype(float) - part.speed[now]
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(13.08, abs=5e-3)
