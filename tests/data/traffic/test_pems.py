"""PEMSD3, PEMSD4, PEMSD7 and PEMSD8: flows and their roads, as published."""

import numpy as np
import pytest

from fedjax_graph.data.traffic import datasets as traffic
from tests.data.traffic.traffic_files import (
    NUM_STEPS,
    SPEED,
    STEP,
    assert_small,
    fails,
    write_npz,
)

# Sensor 3 is reached from 2 alone, by the longest road: below the threshold.
ROADS = ((0, 1, 100.0), (1, 2, 200.0), (1, 2, 200.0), (2, 3, 1000.0), (2, 1, 250.0))
SIZES = {"pems_d3": 4, "pems_d4": 4, "pems_d7": 4, "pems_d8": 3}
IDS = ("317842", "318711", "315955", "312346")  # the order of PEMS03.txt


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
    """A data folder for a PEMSD8 of three sensors and others of four."""
    for name, num_sensors in SIZES.items():
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
    assert dataset.step.seconds == 300
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


@pytest.fixture
def pems03(pems):
    """STSGCN's files of PEMSD3: the flow alone, and roads between ids."""
    write_pems(pems / "PEMS03.npz", data=SPEED[:, :, None].astype(float))
    write_roads(pems / "PEMS03.csv", [(IDS[a], IDS[b], cost) for a, b, cost in ROADS])
    (pems / "PEMS03.txt").write_text("\n".join(IDS))
    return pems


def test_pemsd3_is_named_by_its_list_of_ids(pems03):
    dataset = traffic.load("pems_d3", pems03)
    np.testing.assert_array_equal(dataset.speed, SPEED)
    assert dataset.sensor_ids.tolist() == [int(sensor) for sensor in IDS]
    assert dataset.timestamps[0] == np.datetime64("2018-09-01T00:00")
    assert dataset.unit == "vehicles / 5 min"
    write_pems(pems03 / "PEMS04.npz")
    write_roads(pems03 / "PEMS04.csv")
    same = traffic.load("pems_d4", pems03)
    np.testing.assert_array_equal(dataset.adjacency, same.adjacency)


def test_pemsd7_has_the_flow_alone(pems):
    write_pems(pems / "PEMS07.npz", data=SPEED[:, :, None].astype(float))
    write_roads(pems / "PEMS07.csv")
    dataset = traffic.load("pems_d7", pems)
    np.testing.assert_array_equal(dataset.speed, SPEED)
    assert dataset.sensor_ids.tolist() == [0, 1, 2, 3]
    assert dataset.timestamps[0] == np.datetime64("2017-05-01T00:00")
    path = write_pems(pems / "PEMS07.npz")
    fails(r"\(40, 4, 3\), expected \(40, 4, 1\): .*, with flow;", "pems_d7", pems, path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("\n".join(IDS[:3]), "3 different ids in 3, expected those of 4 sensors"),
        ("\n".join((*IDS[:3], IDS[0])), "3 different ids in 4"),
        ("", "0 different ids in 0"),
        (b"\xff\xfe", "not a readable list of sensor ids"),
    ],
)
def test_ids_that_are_not_those_of_the_sensors(pems03, content, match):
    path = pems03 / "PEMS03.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    fails(match, "pems_d3", pems03, path)


def test_roads_and_ids_of_pemsd3_belong_together(pems03):
    path = pems03 / "PEMS03.txt"
    path.write_text("\n".join((*IDS[:3], "1")))
    roads = pems03 / "PEMS03.csv"
    fails("names 312346; expected roads of all sensors", "pems_d3", pems03, roads)
    path.unlink()
    message = fails("no PEMS03.txt", "pems_d3", pems03)
    assert "--dataset=pems_d3 --download" in message


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
    assert "--dataset=pems_d8 --download" in message and "data_dir" in message
