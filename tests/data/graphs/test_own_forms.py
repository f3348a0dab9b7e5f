"""A user's own graph in the forms that users have it."""

import re

import numpy as np
import numpy.testing as npt
import pytest

from fedjax_graph import data
from fedjax_graph.core.errors import InputError
from tests.data.graphs.toy_graph import EDGES, FEATURES, LABELS, dense

SPLITS = {"train": [0, 2], "val": [3], "test": [4, 6]}
BOTH_WAYS = np.array([*EDGES, *((j, i) for i, j in EDGES)]).T
MASKS = {
    f"{name}_mask": np.isin(np.arange(len(LABELS)), nodes)
    for name, nodes in SPLITS.items()
}


def load(folder, **arrays):
    path = folder / "toy.npz"
    np.savez(path, **arrays)
    return data.load(str(path))


def check(dataset):
    assert type(dataset).__name__ == "NodeDataset"
    npt.assert_array_equal(dataset.edges, EDGES)
    npt.assert_array_equal(dataset.labels, LABELS)
    npt.assert_array_equal(dense(dataset), FEATURES)
    found = {name[:5]: nodes.tolist() for name, nodes in dataset.splits.items()}
    assert found == {"train": [0, 2], "valid": [3], "test": [4, 6]}
    assert dataset.notes == ()


def test_a_graph_of_pytorch_geometric(tmp_path):
    check(load(tmp_path, edge_index=BOTH_WAYS, x=FEATURES, y=LABELS, **MASKS))


def test_masks_stand_for_nodes(tmp_path):
    masks = {key.replace("_mask", "_idx"): mask for key, mask in MASKS.items()}
    check(load(tmp_path, edges=EDGES, features=FEATURES, labels=LABELS, **masks))
    unlabeled = np.array(LABELS) == 2
    dataset = load(
        tmp_path, edges=EDGES, features=FEATURES, labels=LABELS, unlabeled=unlabeled
    )
    npt.assert_array_equal(dataset.labels < 0, unlabeled)


def test_edges_of_one_direction_are_noted(tmp_path):
    edge_index = np.array(EDGES).T
    dataset = load(tmp_path, edge_index=edge_index, x=FEATURES, y=LABELS)
    assert dataset.notes == ("edges given in one direction, and used in both: 5 of 5",)


@pytest.mark.parametrize(
    ("arrays", "hint"),
    [
        ({"edges": np.array(EDGES).T}, "[2, E] is called edge_index"),
        ({"edge_index": EDGES}, "expected [2, E]; [E, 2] is called edges"),
        ({"y": np.eye(7, 3)}, "of one-hot rows save y.argmax(axis=1)"),
        ({"train_mask": [1, 0] * 3 + [0]}, "for 0 and 1 save train_mask.astype(bool)"),
        ({"train_mask": [True]}, "train_mask is a mask of 1 nodes, expected 7"),
        ({"x": FEATURES[:3]}, "features of 3 nodes, expected 7"),
    ],
)
def test_what_is_not_read_has_a_hint(tmp_path, arrays, hint):
    own = {"x": FEATURES, "y": LABELS}
    if not {"edges", "edge_index"} & arrays.keys():
        own["edge_index"] = BOTH_WAYS
    with pytest.raises(InputError, match=re.escape(hint)) as refusal:
        load(tmp_path, **own | arrays)
    assert str(refusal.value).startswith(f"{tmp_path / 'toy.npz'}: ")


# --- Tables --------------------------------------------------------------------------


def write_tables(folder, has_headers):
    folder.mkdir()
    tables = {"edges": EDGES, "labels": LABELS, "features": FEATURES.tolist(), **SPLITS}
    for name, rows in tables.items():
        rows = np.atleast_2d(np.array(rows, dtype=object))
        rows = rows.T if name in ("labels", *SPLITS) else rows
        header = ",".join(f"{name}{i}" for i in range(rows.shape[1]))
        lines = [",".join(map(str, row)) for row in rows]
        text = "\n".join([*([header] if has_headers else []), *lines, ""])
        (folder / f"{name}.csv").write_text(text)
    return folder


@pytest.mark.parametrize("has_headers", [False, True])
def test_a_folder_of_tables(tmp_path, has_headers):
    folder = write_tables(tmp_path / "mine", has_headers)
    dataset = data.load(str(folder))
    check(dataset)
    assert dataset.name == "mine"
    assert data.kind_of(str(folder)) == "graphs"
    for name in SPLITS:
        (folder / f"{name}.csv").unlink()
    assert data.load(str(folder)).splits == {}


def test_headers_that_are_numbers_are_no_data(tmp_path):
    """As pandas writes for an array."""
    folder = write_tables(tmp_path / "mine", False)
    for name in SPLITS:
        (folder / f"{name}.csv").unlink()
    for path in folder.iterdir():
        rows = path.read_text()
        numbers = ",".join(map(str, range(rows.split("\n")[0].count(",") + 1)))
        path.write_text(f"{numbers}\n{rows}")
    with pytest.raises(InputError, match="as columns without names.*header=False"):
        data.load(str(folder))
    path = folder / "labels.csv"
    path.write_text(f"label\n{path.read_text()}")  # so the first row is data
    assert len(data.load(str(folder)).labels) == len(LABELS) + 1


def test_first_rows_may_look_like_numbers_of_columns(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in (
        ("edges", "0,1\n2,3\n"),
        ("labels", "0\n1\n0\n1\n"),
        ("features", "0,1\n1,0\n0,1\n1,0\n"),
    ):
        (folder / f"{name}.csv").write_text(text)
    assert data.load(str(folder)).edges.tolist() == [[0, 1], [2, 3]]


def test_a_column_of_row_numbers_is_no_feature(tmp_path):
    folder = write_tables(tmp_path / "mine", True)
    rows = (folder / "features.csv").read_text().splitlines()
    numbered = [f"{number},{row}" for number, row in enumerate(rows[1:])]
    (folder / "features.csv").write_text("\n".join([f",{rows[0]}", *numbered, ""]))
    with pytest.raises(InputError, match=r"first column has no name.*index=False"):
        data.load(str(folder))


@pytest.mark.parametrize("has_headers", [False, True])
def test_a_mark_of_byte_order_is_no_part_of_a_table(tmp_path, has_headers):
    folder = write_tables(tmp_path / "mine", has_headers)
    for path in folder.iterdir():
        path.write_bytes("\ufeff".encode() + path.read_bytes())
    check(data.load(str(folder)))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("features", None, "features.csv: no such file"),
        ("labels", "label\n0\nx\n", "labels.csv: not a readable csv file of numbers"),
        ("labels", "label\n", "a table of shape (0, 1), expected at least one row"),
        ("edges", "0,1,2\n", "expected at least one row and 2 columns"),
        ("edges", "0,99\n", "edges has the node 99, expected 0 to 6"),
    ],
)
def test_broken_tables(tmp_path, name, text, words):
    folder = write_tables(tmp_path / "mine", False)
    path = folder / f"{name}.csv"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=re.escape(words)):
        data.load(str(folder))
