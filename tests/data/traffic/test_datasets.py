import functools
import os
import pickle
import re

import h5py
import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import datasets as traffic
from fedjax_graph.data.traffic import network
from tests.data.traffic.traffic_files import (
    ADJACENCY,
    IDS,
    LATITUDE,
    LONGITUDE,
    NUM_STEPS,
    SPEED,
    START,
    TIMESTAMPS,
    assert_small,
    fails,
    write_csv,
    write_graph,
    write_h5,
    write_npz,
)

STAMPS = TIMESTAMPS.astype(np.int64)
DAYS_30 = 30 * 86400 * 10**9


@pytest.fixture
def small(cache, monkeypatch, tmp_path):
    """A data folder for a METR-LA of the four sensors above."""
    published = traffic.PUBLISHED["metr_la"]
    small = published._replace(num_sensors=4, num_steps=NUM_STEPS)
    monkeypatch.setitem(traffic.PUBLISHED, "metr_la", small)
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


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


def test_rows_of_hdf5_with_a_time_zone_are_refused(small):
    path = write_h5(small / "metr-la.h5")
    with h5py.File(path, "a") as file:
        file["df"]["axis1"].attrs["tz"] = np.bytes_(b"America/Los_Angeles")
    write_graph(small / "adj_mx.pkl")
    with pytest.raises(InputError, match="time zone, expected wall-clock time without"):
        traffic.load("metr_la", small)


def test_a_header_may_have_spaces(cache, tmp_path):
    path = write_csv(tmp_path / "mine.csv")
    head, _, rows = path.read_text().partition("\n")
    path.write_text(head.replace(",", " , ") + "\n" + rows)
    ids = ", ".join(["id", *map(str, IDS)])
    rows = zip(IDS, ADJACENCY.tolist(), strict=True)
    weights = [", ".join(map(str, [i, *row])) for i, row in rows]
    (tmp_path / "mine_adjacency.csv").write_text("\n".join([ids, *weights]))
    dataset = traffic.load(str(path))
    assert tuple(dataset.sensor_ids) == IDS
    np.testing.assert_array_equal(dataset.adjacency, ADJACENCY)


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
    assert traffic.load(str(write_npz(path))).unit == "units of the data"
    dataset = traffic.load(str(write_npz(path, unit="km/h")))
    assert dataset.unit == "km/h"
    assert traffic.cut(dataset, num_sensors=2).unit == "km/h"


# --- bad input -----------------------------------------------------------------


def test_an_unknown_dataset(cache):
    assert "metr_la, pems_bay, pems_bay_subset" in fails("'metrla'", "metrla")


def test_missing_files_are_named_with_what_to_do(cache, tmp_path):
    message = fails("no pems_bay.npz or pems-bay.h5", "pems_bay", tmp_path)
    assert "experiments.datasets --dataset=pems_bay --download" in message
    assert "pems-bay.h5 and adj_mx_bay.pkl" in message and "data_dir" in message
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
        ({"latitude": LATITUDE + 1j}, "latitude has shape .* and type complex128"),
        ({"longitude": LONGITUDE.astype("U")}, "longitude has shape .*, expected num"),
        (
            {
                "speed": SPEED[:, :0],
                "sensor_ids": np.array(IDS)[:0],
                "adjacency": ADJACENCY[:0, :0],
                "remove": ("latitude", "longitude"),
            },
            r"speed has shape \(40, 0\), expected at least one step and one sensor",
        ),
        (
            {"timestamps_ns": STAMPS.astype(np.uint64) + np.uint64(2**63)},
            "timestamps_ns has 10553932036854775808, expected nanoseconds in years",
        ),
        ({"timestamps_ns": STAMPS * np.inf}, "timestamps_ns has inf, expected nanos"),
        ({"timestamps_ns": STAMPS * np.nan}, "timestamps_ns has nan, expected nanos"),
        (
            {"remove": ("timestamps_ns",), "start_ns": 0, "freq_ns": 2**60},
            "start_ns with freq_ns has 4.6.*, expected nanoseconds in years 1678",
        ),
        ({"unit": ["mph"]}, "unit has shape"),
        ({"unit": 3}, "expected one line of text"),
        ({"unit": " "}, "expected one line of text"),
        ({"unit": "m" * 41}, "expected one line of text, 1 to 40 characters"),
        ({"speed": SPEED * np.float64(1e39)}, "infinite or negative"),
        ({"unit": "mph\n"}, "expected one line of text"),
        ({"speed": np.where(SPEED == 0, np.inf, SPEED)}, "infinite or negative"),
        ({"speed": SPEED - 1}, "infinite or negative"),
        ({"adjacency": -ADJACENCY}, "weights that are negative"),
        ({"adjacency": ADJACENCY.astype(np.float64) * 1e300}, "infinite in float32"),
        ({"adjacency": ADJACENCY * np.nan}, "NaN"),
        ({"adjacency": ADJACENCY + np.inf}, "infinite"),
        ({"timestamps_ns": TIMESTAMPS[::-1].astype(int)}, "increase"),
        ({"timestamps_ns": np.full(NUM_STEPS, 7)}, "increase"),
        ({"timestamps_ns": np.arange(NUM_STEPS)}, "rows are 1 ns apart"),
        (
            {"timestamps_ns": STAMPS + DAYS_30 * (np.arange(NUM_STEPS) > 9)},
            r"row 10 \(2012-03-31T00:50\) follows 2012-03-01T00:45",
        ),
        ({"remove": ("timestamps_ns",), "start_ns": 0, "freq_ns": 0}, "increase"),
        (
            {
                "remove": ("timestamps_ns",),
                "start_ns": np.uint64(2**63),
                "freq_ns": 300 * 10**9,
            },
            "start_ns with freq_ns has 9.22.*, expected nanoseconds in years 1678",
        ),
        ({"sensor_ids": np.array([1, 2, 2, 3])}, "same id"),
        ({"sensor_ids": np.array([1.0, 2, 3, 4])}, "integers or text"),
        ({"remove": ("speed",)}, "no array 'speed'"),
        ({"remove": ("adjacency",)}, "no array 'adjacency'"),
        ({"remove": ("timestamps_ns",)}, "no array 'timestamps'"),
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
        (whole.replace("2012-03-01 00:05", "first of March"), "has 'first of March"),
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
    return network.TrafficDataset(
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
    part = network.take_sensors(whole, np.array([3, 1]))
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
    dataset = network.TrafficDataset(
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
        "step_seconds": 3600,
        "unit": "units of the data",
        "train_windows": 34,
        "validation_windows": 5,
        "test_windows": 10,
        "missing_fraction": 0.2,  # sensor 10 reads 0
        "notes": ["as published"],
    }
