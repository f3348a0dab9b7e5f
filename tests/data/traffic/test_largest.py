"""LargeST: the publisher's files, whole California's and those of a part."""

import csv

import h5py
import numpy as np
import pytest

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import datasets as traffic
from fedjax_graph.data.traffic import largest, windows
from tests.data.traffic.traffic_files import fails

# Rows of ca_meta.csv. Of the part SD (district 11) are the sensors 1 and 3.
IDS = ("1100313", "317802", "1100338", "759247")
DISTRICTS = (11, 3, 11, 7)
SD = (0, 2)
NUM_STEPS = 30
START = np.datetime64("2019-01-01T00:00", "ns")
TIMES = START + np.timedelta64(5, "m") * np.arange(3 * NUM_STEPS)
STEPS = START + np.timedelta64(15, "m") * np.arange(NUM_STEPS)
RNG = np.random.default_rng(0)
RAW = RNG.integers(0, 300, (3 * NUM_STEPS, 4)).astype(float)
RAW[RNG.random(RAW.shape) < 0.3] = np.nan
RAW[6:9, 0] = np.nan  # a step without a reading
RAW[9:12, 0] = (1, 2, np.nan)  # the mean 1.5 rounds to even: 2
MATRIX = np.array([[1, 0.5, 0.25, 0], [0, 1, 0, 0], [0, 0.01, 1, 0], [0.75, 0, 0, 1]])


def means(raw):
    """The publisher's steps as a loop."""
    result = np.zeros((len(raw) // 3, raw.shape[1]))
    for step, sensor in np.ndindex(*result.shape):
        three = raw[3 * step : 3 * step + 3, sensor]
        there = [x for x in three if not np.isnan(x)]
        if there:
            result[step, sensor] = round(sum(there) / len(there))
    return result


FLOWS = means(RAW)


def write_h5(path, values=RAW, times=TIMES, ids=IDS, kind=b"datetime64"):
    """What `DataFrame.to_hdf(path, key="t", mode="w")` writes."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with h5py.File(path, "w") as file:
        table = file.create_group("t")
        table["axis0"] = table["block0_items"] = np.array(ids).astype("S9")
        table["axis1"] = times.astype(np.int64)
        table["axis1"].attrs["kind"] = np.bytes_(kind)
        table["block0_values"] = values
    return path


def write_meta(path, rows=range(4), remove=()):
    columns = ("ID", "Lat", "Lng", "District", "County", "Fwy")
    columns += ("Lanes", "Type", "Direction", "ID2")
    kept = [column for column in columns if column not in remove]
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, kept, extrasaction="ignore")
        table.writeheader()
        for i in rows:
            place = (33 + i, -117 - i, DISTRICTS[i], "San Diego", "I5-N")
            row = (IDS[i], *place, 4, "Mainline", "N", i)
            table.writerow(dict(zip(columns, row, strict=True)))
    return path


def write_matrix(path, matrix=MATRIX):
    np.save(path, matrix)
    return path


@pytest.fixture
def folder(cache, monkeypatch, tmp_path):
    """A data folder for a California of four sensors, two of them San Diego's."""
    for name, num_sensors in (("largest_ca", 4), ("largest_sd", 2)):
        small = traffic.PUBLISHED[name]._replace(
            num_sensors=num_sensors, num_steps=NUM_STEPS
        )
        monkeypatch.setitem(traffic.PUBLISHED, name, small)
    folder = tmp_path / "data"
    (folder / "ca").mkdir(parents=True)
    return folder


@pytest.fixture
def california(folder):
    write_h5(folder / "ca/ca_his_raw_2019.h5")
    write_meta(folder / "ca/ca_meta.csv")
    write_matrix(folder / "ca/ca_rn_adj.npy")
    return folder


def assert_is(dataset, kept):
    kept = list(kept)
    np.testing.assert_array_equal(dataset.speed, FLOWS[:, kept])
    assert (dataset.speed.dtype, dataset.unit) == (np.float32, "vehicles / 5 min")
    np.testing.assert_array_equal(dataset.timestamps, STEPS)
    assert dataset.sensor_ids.tolist() == [int(IDS[i]) for i in kept]
    expected = MATRIX[np.ix_(kept, kept)].astype(np.float32)
    np.testing.assert_array_equal(dataset.adjacency, expected)
    assert dataset.adjacency.dtype == np.float32
    np.testing.assert_array_equal(dataset.latitude, [33 + i for i in kept])
    np.testing.assert_array_equal(dataset.longitude, [-117 - i for i in kept])
    assert (dataset.notes, dataset.fractions) == ((), (0.6, 0.2, 0.2))


@pytest.mark.parametrize("block_bytes", [1, 200, 1 << 26])
def test_raw_readings_of_california_become_means(california, monkeypatch, block_bytes):
    monkeypatch.setattr(largest, "_BLOCK_BYTES", block_bytes)
    assert_is(traffic.load("largest_ca", california), range(4))
    assert FLOWS[2, 0] == 0 and FLOWS[3, 0] == 2


def test_a_part_is_cut_out_of_california(california):
    assert_is(traffic.load("largest_sd", california), SD)


def test_a_part_in_files_of_its_own_comes_first(california):
    sd = california / "sd"
    write_h5(sd / "sd_his_2019.h5", FLOWS[:, SD], STEPS, [IDS[i] for i in SD])
    assert_is(traffic.load("largest_sd", california), SD)
    write_meta(sd / "sd_meta.csv", SD)
    assert_is(traffic.load("largest_sd", california), SD)
    write_matrix(sd / "sd_rn_adj.npy", MATRIX[np.ix_(SD, SD)])
    for path in (california / "ca").iterdir():
        path.unlink()
    assert_is(traffic.load("largest_sd", california), SD)


def test_processed_readings_in_another_order_of_columns(california):
    (california / "ca/ca_his_raw_2019.h5").unlink()
    order = [2, 0, 3, 1]
    ids = [IDS[i] for i in order]
    path = california / "LargeST/ca_his_2019.h5"
    write_h5(path, FLOWS[:, order].astype(np.float32), STEPS, ids, b"datetime64[ns]")
    assert_is(traffic.load("largest_ca", california), range(4))


def test_steps_without_a_row_are_missing(california):
    kept = np.ones(len(TIMES), bool)
    kept[[0, 1, 12, 13, 14]] = False  # of step 0 its last row, of step 4 none
    path = california / "ca/ca_his_raw_2019.h5"
    write_h5(path, RAW[kept], TIMES[kept])
    expected = FLOWS.copy()
    expected[0] = np.nan_to_num(RAW[2])
    expected[4] = 0
    dataset = traffic.load("largest_ca", california)
    np.testing.assert_array_equal(dataset.speed, expected)
    np.testing.assert_array_equal(dataset.timestamps, STEPS)
    write_h5(path, RAW[:87], TIMES[:87])
    notes = traffic.load("largest_ca", california).notes
    assert notes == ("29 steps, where 30 were published",)


def test_the_split_and_the_clock_are_the_datasets(california):
    dataset = traffic.load("largest_ca", california)
    counts = traffic.statistics(dataset)
    parts = [counts[f"{part}_windows"] for part in ("train", "validation", "test")]
    assert parts == [4, 2, 1]  # of 7 windows; 60/20/20 rounded
    splits = windows.make_splits(dataset)
    assert [len(data.starts) for data in splits.values()] == parts
    np.testing.assert_allclose(splits["train"].clock[:3], [0, 1 / 96, 2 / 96])
    # Tuesday, in slots of five minutes
    np.testing.assert_array_equal(splits["train"].week_slot[:3], [288, 291, 294])
    part = windows.make_splits(traffic.cut(dataset, num_sensors=2), (0.5, 0.3, 0.2))
    assert [len(data.starts) for data in part.values()] == [4, 2, 1]


def test_without_a_graph_where_none_is_needed(california):
    (california / "ca/ca_rn_adj.npy").unlink()
    dataset = traffic.load("largest_sd", california, needs_graph=False)
    np.testing.assert_array_equal(dataset.adjacency, np.eye(2))
    assert dataset.notes == ("no graph is given",)
    fails("no sd_rn_adj.npy or ca_rn_adj.npy", "largest_sd", california)


def test_the_published_sizes():
    sizes = {
        name: (published.num_sensors, published.num_steps, published.districts)
        for name, published in traffic.PUBLISHED.items()
        if published.districts
    }
    assert sizes == {
        "largest_sd": (716, 35040, (11,)),
        "largest_gba": (2352, 35040, (4,)),
        "largest_gla": (3834, 35040, (7, 8, 12)),
        "largest_ca": (8600, 35040, (3, 4, 5, 6, 7, 8, 10, 11, 12)),
    }


# --- bad input -----------------------------------------------------------------


def test_missing_files_are_named_with_what_to_do(folder):
    message = fails("no largest_sd.npz or sd_his_2019.h5", "largest_sd", folder)
    wanted = "put ca_his_raw_2019.h5 and ca_rn_adj.npy and ca_meta.csv there"
    assert wanted in message and "--download" not in message
    write_h5(folder / "ca/ca_his_raw_2019.h5")
    assert wanted in fails("no sd_meta.csv or ca_meta.csv", "largest_sd", folder)


def test_districts_of_another_size(california, monkeypatch):
    monkeypatch.undo()
    fails("expected the 716 sensors of largest_sd, found 2", "largest_sd", california)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
@pytest.mark.parametrize("name", ["ca_his_raw_2019.h5", "ca_rn_adj.npy"])
def test_a_truncated_file(california, name, share):
    path = california / "ca" / name
    content = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(content)
    fails("not a readable", "largest_ca", california, path)
    assert path.read_bytes() == content


def late(steps):
    return np.append(TIMES[:-1], START + steps * np.timedelta64(15, "m"))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"values": RAW[:-1]}, r"shape \(89, 4\) and type float64, expected floats"),
        ({"values": RAW[:, :3]}, r"shape \(90, 3\)"),
        ({"values": RAW[:, 0]}, r"shape \(90,\)"),
        ({"values": np.ones(RAW.shape, "S3")}, "type .S3, expected floats"),
        ({"values": np.where(RAW > 250, np.inf, RAW)}, "infinite or negative"),
        ({"values": np.where(RAW > 250, -np.inf, RAW)}, "infinite or negative"),
        ({"values": -RAW}, "infinite or negative"),
        ({"times": TIMES[::-1]}, "increase"),
        ({"times": np.repeat(TIMES[:1], len(TIMES))}, "increase"),
        ({"times": late(30)}, "span 31 steps of 15 minutes, expected at most 30"),
        ({"times": late(10**6)}, "expected at most 30"),
        ({"kind": b"integer"}, "expected time stamps"),
        ({"ids": (*IDS[:3], "1")}, "no readings of sensor 759247"),
        ({"ids": (*IDS[:3], IDS[0])}, "no readings of sensor 759247"),
        (
            {"values": np.tile(RAW, (2, 1)), "times": np.tile(TIMES, 2)},
            "180 rows, expected at most 90",
        ),
    ],
)
def test_readings_that_are_not_as_published(california, changes, match):
    path = write_h5(california / "ca/ca_his_raw_2019.h5", **changes)
    fails(match, "largest_ca", california, path)


def test_readings_that_lie_elsewhere_are_not_followed(california, tmp_path):
    path = california / "ca/ca_his_raw_2019.h5"
    other = write_h5(tmp_path / "other.h5")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(RAW.nbytes))

    def replace(make):
        write_h5(path)
        with h5py.File(path, "a") as file:
            del file["t/block0_values"]
            make(file["t"])
        fails("block0_values is not an array that lies", "largest_ca", california, path)

    def virtual(table):
        layout = h5py.VirtualLayout(RAW.shape, RAW.dtype)
        layout[:] = h5py.VirtualSource(other, "t/block0_values", RAW.shape)
        table.create_virtual_dataset("block0_values", layout)

    def external(table):
        table.create_dataset(
            "block0_values", RAW.shape, RAW.dtype, external=[(secret, 0, RAW.nbytes)]
        )

    def link(table):
        table["block0_values"] = h5py.ExternalLink(other, "t/block0_values")

    for make in (virtual, external, link, lambda table: None):
        replace(make)


def test_tables_of_sensors_that_are_broken(california):
    path = california / "ca/ca_meta.csv"
    for column in ("ID", "Lat", "Lng", "District", "ID2"):
        write_meta(path, remove=(column,))
        fails(f"no column '{column}'; found", "largest_ca", california, path)
    whole = write_meta(path).read_text()
    for content, match in [
        ("", "no column 'ID'"),
        (whole.replace(",11,", ",eleven,"), "not a readable table of sensors"),
        (whole.replace(",33,", ",north,"), "not a readable table of sensors"),
        (whole.replace(",11,", ",13,"), "no sensor of district 11"),
    ]:
        path.write_text(content)
        fails(match, "largest_sd", california, path)


@pytest.mark.parametrize(
    ("matrix", "match"),
    [
        (MATRIX[:3, :3], r"shape \(3, 3\) and type float64, expected numbers, 4 by 4"),
        (MATRIX[:, :3], r"shape \(4, 3\)"),
        (MATRIX[0], r"shape \(4,\)"),
        (MATRIX.astype("U"), "type <U32, expected numbers"),
        (MATRIX.astype(object), "not a readable"),
        (-MATRIX, "weights that are negative"),
        (MATRIX * np.nan, "NaN"),
        (MATRIX * 1e300, "infinite in float32"),
    ],
)
def test_matrices_that_are_not_as_published(california, matrix, match):
    path = write_matrix(california / "ca/ca_rn_adj.npy", matrix)
    is_about_values = matrix.dtype == float and matrix.shape == (4, 4)
    fails(match, "largest_ca", california, None if is_about_values else path)


def test_an_archive_is_not_a_matrix(california):
    path = california / "ca/ca_rn_adj.npy"
    with open(path, "wb") as file:
        np.savez(file, MATRIX)
    fails("not a readable NumPy .npy file", "largest_ca", california, path)


@pytest.mark.parametrize("rows", [[0, 0], [-1, 0]])
def test_sensors_without_a_row_of_their_own(california, rows):
    with pytest.raises(InputError, match="share a row"):
        largest.read_adjacency(california / "ca/ca_rn_adj.npy", np.array(rows), 2)
