"""A user's own network in the forms that users have it."""

import re

import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph import data
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import datasets as traffic
from tests.data.traffic.traffic_files import (
    ADJACENCY,
    IDS,
    LATITUDE,
    LONGITUDE,
    SPEED,
    STEP,
    TIMESTAMPS,
    write_csv,
    write_npz,
)

STAMPS = ("timestamps_ns",)


def load(path, **options):
    return traffic.load(str(path), **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"timestamps": TIMESTAMPS},
        {"timestamps": TIMESTAMPS.astype("M8[s]")},
        {"timestamps": TIMESTAMPS.astype("M8[m]").astype(str)},
        {"timestamps": np.char.replace(TIMESTAMPS.astype("M8[s]").astype(str), *"T ")},
        {"timestamps_ns": TIMESTAMPS},
        {"start_ns": TIMESTAMPS[0].astype(np.int64), "freq_ns": 300 * 10**9},
    ],
    ids=["ns", "s", "text", "text with a space", "under the old name", "start"],
)
def test_time_stamps_of_any_form(tmp_path, changes):
    remove = [key for key in STAMPS if key not in changes]
    dataset = load(write_npz(tmp_path / "mine.npz", remove=remove, **changes))
    npt.assert_array_equal(dataset.timestamps, TIMESTAMPS)
    assert dataset.timestamps.dtype == "M8[ns]"


def test_a_mask_says_which_readings_are_there(tmp_path):
    mask = np.ones(SPEED.shape, bool)
    mask[3, 1] = False
    dataset = load(write_npz(tmp_path / "mine.npz", mask=mask))
    npt.assert_array_equal(dataset.speed, np.where(mask, SPEED, 0))


def test_a_matrix_of_edges_or_none_has_weights_of_1(tmp_path):
    dataset = load(write_npz(tmp_path / "mine.npz", adjacency=ADJACENCY > 0))
    npt.assert_array_equal(dataset.adjacency, (ADJACENCY > 0).astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "remove", "hint"),
    [
        ({"data": SPEED}, ("speed",), "if 'data' is meant, save it as 'speed'"),
        ({"adj_mx": ADJACENCY}, ("adjacency",), "save it as 'adjacency'"),
        ({"time": TIMESTAMPS}, STAMPS, "if 'time' is meant, save it as 'timestamps'"),
        ({"speed": SPEED[..., None]}, (), "such as speed[:, :, 0]"),
        ({"speed": SPEED.T}, (), "save speed.T"),
        ({"timestamps": np.arange(40)}, STAMPS, "as 'timestamps_ns'"),
        (
            {"timestamps": [f"{t}Z" for t in TIMESTAMPS.astype("M8[s]")]},
            STAMPS,
            "wall-clock time without a zone",
        ),
        ({"timestamps": ["noon"] * 40}, STAMPS, "text such as 2012-03-01T00:05"),
        (
            {"timestamps": ["1330560000"] * 40},
            STAMPS,
            "has '1330560000', expected text",
        ),
        (
            {"timestamps": np.array(["9999-01-01"] * 40, "M8[D]")},
            STAMPS,
            "expected years 1678 to 2261",
        ),
        ({"timestamps": TIMESTAMPS[None]}, STAMPS, "expected [T] of datetime64"),
        ({"mask": np.ones(SPEED.shape, int)}, (), "save mask.astype(bool)"),
        ({"mask": np.ones(len(SPEED), bool)}, (), f"expected {SPEED.shape} and bool"),
    ],
)
def test_what_is_not_read_has_a_hint(tmp_path, changes, remove, hint):
    path = write_npz(tmp_path / "mine.npz", remove=remove, **changes)
    with pytest.raises(InputError, match=re.escape(hint)) as refusal:
        load(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


# --- Tables --------------------------------------------------------------------------

DISTANCES = "from,to,cost\n717447,773869,1.5\n773869,400001,2\n"


def write_matrix(path, ids=None, matrix=ADJACENCY):
    rows = [",".join(map(str, row)) for row in matrix.tolist()]
    if ids is not None:
        rows = [f"{i},{row}" for i, row in zip(ids, rows, strict=True)]
        rows = [",".join(["", *map(str, ids)]), *rows]
    path.write_text("\n".join([*rows, ""]))


@pytest.mark.parametrize("ids", [None, IDS], ids=["plain", "with ids"])
def test_tables_of_readings_and_weights(tmp_path, ids):
    path = write_csv(tmp_path / "mine.csv")
    write_matrix(tmp_path / "mine_adjacency.csv", ids)
    dataset = data.load(str(path))
    assert dataset.name == "mine"
    npt.assert_array_equal(dataset.sensor_ids, IDS)
    npt.assert_array_equal(dataset.adjacency, ADJACENCY)
    npt.assert_allclose(dataset.speed, SPEED)
    npt.assert_array_equal(dataset.timestamps, TIMESTAMPS)
    assert dataset.step.delta == STEP


@pytest.mark.parametrize("zone", ["Z", "-08:00", "+0100", "+01"])
def test_time_stamps_of_a_table_have_no_zone(tmp_path, zone):
    stamps = [f"{time}{zone}" for time in TIMESTAMPS.astype("M8[s]").astype(str)]
    path = tmp_path / "mine.csv"
    path.write_text(",a\n" + "".join(f"{stamp},1\n" for stamp in stamps))
    with pytest.raises(InputError, match="expected wall-clock time without a zone"):
        load(path, needs_graph=False)


@pytest.mark.parametrize("stamp", ["1330560000", "20120301", "noon", "now", ""])
def test_the_first_column_of_a_table_has_dates(tmp_path, stamp):
    path = tmp_path / "mine.csv"
    path.write_text(f',a\n"{stamp}",1\n')
    words = f"the first column has {stamp!r}, expected text such as 2012-03-01T00:05"
    with pytest.raises(InputError, match=words):
        load(path, needs_graph=False)


def test_a_sensor_has_one_column(tmp_path):
    path = write_csv(tmp_path / "mine.csv", ids=(5, 6, 7, 6))
    write_matrix(tmp_path / "mine_adjacency.csv", (5, 6, 7), ADJACENCY[:3, :3])
    with pytest.raises(InputError, match="sensor 6 has several columns, expected one"):
        load(path)


def test_every_column_and_row_of_a_table_is_named(tmp_path):
    path = write_csv(tmp_path / "mine.csv")
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line},\n" for line in lines))
    with pytest.raises(InputError, match="a column without a sensor id in the header"):
        load(path, needs_graph=False)
    path.write_text("\n".join([*lines, "", ",1,2,3,4"]))
    with pytest.raises(InputError, match="the first column has '', expected text"):
        load(path, needs_graph=False)
    path.write_text("\n".join([*lines, "2012-03-01 03:20:00,1,2,3,4 # one"]))
    with pytest.raises(InputError, match="could not convert string '4 # one'"):
        load(path, needs_graph=False)


@pytest.mark.parametrize("ids", [None, IDS], ids=["plain", "with ids"])
def test_a_mark_of_byte_order_is_no_part_of_a_table(tmp_path, ids):
    path, weights = write_csv(tmp_path / "mine.csv"), tmp_path / "mine_adjacency.csv"
    write_matrix(weights, ids)
    for table in (path, weights):
        table.write_bytes("\ufeff".encode() + table.read_bytes())
    npt.assert_array_equal(load(path).adjacency, ADJACENCY)


def test_a_matrix_with_ids_gives_the_order(tmp_path):
    path = write_csv(tmp_path / "mine.csv")
    order = [2, 0, 3, 1]
    matrix = ADJACENCY[np.ix_(order, order)]
    write_matrix(tmp_path / "mine_adjacency.csv", [IDS[i] for i in order], matrix)
    dataset = load(path)
    npt.assert_array_equal(dataset.sensor_ids, [IDS[i] for i in order])
    npt.assert_array_equal(dataset.adjacency, matrix)
    npt.assert_allclose(dataset.speed, SPEED[:, order])


def test_tables_of_distances_and_places(tmp_path):
    path = write_csv(tmp_path / "mine.csv")
    (tmp_path / "mine_distances.csv").write_text(DISTANCES)
    rows = [f"{i},{x},{y}" for i, x, y in zip(IDS, LATITUDE, LONGITUDE, strict=True)]
    (tmp_path / "mine_locations.csv").write_text("\n".join(rows))
    dataset = load(path)
    npt.assert_allclose(dataset.latitude, LATITUDE)
    npt.assert_allclose(dataset.longitude, LONGITUDE)
    sigma = np.std([1.5, 2])
    weight = np.exp(-((1.5 / sigma) ** 2))
    assert dataset.adjacency[0, 1] == pytest.approx(weight if weight > 0.1 else 0)


def test_a_table_without_a_graph(tmp_path):
    path = write_csv(tmp_path / "mine.csv")
    with pytest.raises(InputError, match=r"put mine_adjacency\.csv beside it, .*or"):
        load(path)
    dataset = load(path, needs_graph=False)
    npt.assert_array_equal(dataset.adjacency, np.eye(4))
    assert dataset.notes == ("no graph is given",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rows"),
        (
            "1,2\n3,4\n",
            "2 rows of 2 weights, expected a row and a column for each of 4",
        ),
        ("1,2,3,4\n1,2,3\n", "3 weights in row 2, expected a row and a column"),
        ("1,2,3,4\n" * 3, "3 rows of 4 weights, expected a row and a column"),
        ("1,2,3,4\n" * 5, "4 weights in row 5, expected a row and a column"),
        (",1,2\n1,0,1\n3,1,0\n", "ids of its rows are not those of its columns"),
        (",1,2\n1,0,1\n2,1,0\n", "has readings but is not in the graph"),
        ("1,2,3,x\n" * 4, "not a readable table of weights"),
    ],
)
def test_broken_matrices(tmp_path, text, words):
    path = write_csv(tmp_path / "mine.csv")
    (tmp_path / "mine_adjacency.csv").write_text(text)
    with pytest.raises(InputError, match=re.escape(words)) as refusal:
        load(path)
    assert "mine_adjacency.csv: " in str(refusal.value)
