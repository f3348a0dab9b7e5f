"""The published traffic datasets, where they are at hand."""

import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import download, safe_pickle
from fedjax_graph.data.traffic import datasets as traffic
from fedjax_graph.data.traffic import formats as traffic_formats
from fedjax_graph.data.traffic import hdf, windows
from tests.data.traffic.traffic_files import NUM_STEPS, write_csv, write_h5


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
        "step_seconds": 300,
        "unit": "mph",
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
            traffic_formats.graph_from_roads(roads, tuple(map(str, range(num_sensors))))


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
    readings = hdf.read(original / "pems-bay-67.first_week.h5")
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
    assert (str(subset.step), subset.unit) == ("5 min", "mph")


def test_a_cut_of_metr_la_has_the_known_persistence_error(metr_la):
    part = traffic.cut(metr_la, num_sensors=40, num_days=45)
    assert part.speed.shape == (45 * 288, 40)
    now = windows.split_starts(len(part.speed))["test"] + windows.INPUT_STEPS - 1
    ahead = now + 1 + np.arange(windows.TARGET_STEPS)[:, None]
    errors = part.speed[ahead].astype(float) - part.speed[now]
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(13.08, abs=5e-3)
