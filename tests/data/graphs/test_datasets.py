import gzip
import pickle

import numpy as np
import pytest
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import datasets as citation
from fedjax_graph.data.graphs import formats as citation_formats
from fedjax_graph.data.graphs import node_dataset as node_graphs
from tests.data.graphs.toy_graph import EDGES, FEATURES, LABELS, dense

# Nodes, edges, features and classes as published: Yang et al. (2016) for the first
# two, Shchur et al. (2018) for the others, there without self edges.
SIZES = {
    "cora": (2708, 5278, 1433, 7),
    "citeseer": (3327, 4552, 3703, 6),
    "coauthor_cs": (18333, 81894, 6805, 15),
    "coauthor_physics": (34493, 247962, 8415, 5),
    "amazon_photo": (7650, 119081, 745, 8),
    "amazon_computers": (13752, 245861, 767, 10),
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_published_counts(data_dir, name):
    statistics = node_graphs.statistics(citation.load(name, data_dir))
    keys = ("num_nodes", "num_edges", "num_features", "num_classes")
    assert tuple(statistics[key] for key in keys) == SIZES[name]
    assert sum(statistics["class_sizes"]) == SIZES[name][0] - (
        15 if name == "citeseer" else 0
    )


def test_the_missing_nodes_of_citeseer_are_empty_and_noted(data_dir):
    dataset = citation.load("citeseer", data_dir)
    absent = np.flatnonzero(dataset.labels < 0)
    assert len(absent) == 15
    assert dataset.features[absent].nnz == 0
    assert not any(np.isin(absent, split).any() for split in dataset.splits.values())
    assert dataset.notes == (
        "nodes absent from the source, without features or label: 15",
    )
    assert node_graphs.statistics(dataset)["isolated_nodes"] == 48


@pytest.mark.parametrize("name", ["cora", "citeseer"])
def test_planetoid_and_npz_hold_the_same_graph(data_dir, original, name):
    ours = citation.load(name, data_dir)
    theirs = citation.load(name, original / "planetoid")
    assert citation.locate(name, original / "planetoid") == original / "planetoid"
    assert citation.locate(name, original.parent) == data_dir / f"{name}.npz"
    assert_same(ours, theirs)
    sizes = {split: len(nodes) for split, nodes in theirs.splits.items()}
    train = 20 * len(theirs.class_names)
    assert sizes == {"train": train, "validation": 500, "test": 1000}


def assert_same(first, second):
    np.testing.assert_array_equal(first.edges, second.edges)
    np.testing.assert_array_equal(first.labels, second.labels)
    np.testing.assert_array_equal(dense(first), dense(second))
    assert first.class_names == second.class_names
    assert first.splits.keys() == second.splits.keys()
    for split, nodes in first.splits.items():
        np.testing.assert_array_equal(nodes, second.splits[split])


def csr_parts(prefix, matrix):
    matrix = scipy.sparse.csr_array(matrix)
    parts = {key: getattr(matrix, key) for key in ("data", "indices", "indptr")}
    parts["shape"] = np.array(matrix.shape)
    return {f"{prefix}_{key}": value for key, value in parts.items()}


def compact(**changes):
    arrays = {
        **csr_parts("features", FEATURES),
        "edges": np.array(EDGES, np.int32),
        "labels": np.array(LABELS, np.int32),
        "class_names": np.array(["art", "law", "war"]),
        "train_idx": np.array([0, 2]),
        "val_idx": np.array([3]),
        "test_idx": np.array([6, 4]),
    }
    arrays |= changes
    return {key: value for key, value in arrays.items() if value is not None}


@pytest.fixture
def save(tmp_path):
    def write(arrays):
        path = tmp_path / "toy.npz"
        np.savez(path, **arrays)
        return str(path)

    return write


@pytest.fixture
def toy(save):
    return citation.load(save(compact()))


def test_a_compact_file(toy):
    assert toy.name == "toy"
    assert toy.features.dtype == np.float32 and toy.edges.dtype == np.int32
    np.testing.assert_array_equal(dense(toy), FEATURES)
    assert toy.edges.tolist() == list(map(list, EDGES))
    assert toy.labels.tolist() == LABELS
    assert toy.class_names == ("art", "law", "war")
    assert {name: nodes.tolist() for name, nodes in toy.splits.items()} == {
        "train": [0, 2],
        "validation": [3],
        "test": [4, 6],
    }
    assert toy.notes == ()


def test_dense_features_and_no_names(save):
    arrays = {key: value for key, value in compact().items() if "_" not in key}
    dataset = citation.load(save(arrays | {"features": FEATURES}))
    assert isinstance(dataset.features, np.ndarray)
    np.testing.assert_array_equal(dataset.features, FEATURES)
    assert dataset.class_names == ("0", "1", "2")
    assert dataset.splits == {}


def test_unlabelled_nodes(save):
    path = save(compact(unlabeled=np.array([5])))
    dataset = citation.load(path)
    assert dataset.labels.tolist() == [*LABELS[:5], -1, 0]
    assert dataset.notes == (
        "nodes absent from the source, without features or label: 1",
    )


def test_edges_are_made_undirected(save):
    given_edges = [*EDGES[::-1], (1, 0), (3, 3), (1, 2)]
    dataset = citation.load(save(compact(edges=np.array(given_edges))))
    assert dataset.edges.tolist() == list(map(list, EDGES))
    assert dataset.notes == (
        "entries of self edges removed: 1",
        "repeated entries of edges removed: 2",
    )


def benchmark(**changes):
    """As gnn-benchmark writes it: 0-1 and 2-1 in one direction, a self edge on 4."""
    adjacency = np.zeros((7, 7))
    for first, second in [(0, 1), (2, 1), (0, 3), (3, 0), (3, 2), (2, 3), (4, 4)]:
        adjacency[first, second] = 1
    adjacency[5, 6] = adjacency[6, 5] = 2.5
    arrays = {
        **csr_parts("adj", adjacency),
        **csr_parts("attr", FEATURES),
        "labels": np.array(LABELS),
        "class_names": np.array(["art", "law", "war"]),
    }
    return arrays | changes


@pytest.mark.parametrize("pickled", [False, True])
def test_a_file_of_gnn_benchmark(save, toy, pickled):
    names = {"class_names": np.array(["art", "law", "war"], object)} if pickled else {}
    arrays = benchmark(node_names=np.array([f"n{i}" for i in range(7)], object))
    dataset = citation.load(save(arrays | names))
    if pickled:
        assert dataset.class_names == ("0", "1", "2")
        dataset = dataset._replace(class_names=toy.class_names)
    assert_same(dataset, toy._replace(splits={}))
    assert dataset.notes == (
        "weights of edges are not read: all edges count alike",
        "entries of self edges removed: 1",
        "edges given in one direction, and used in both: 2 of 5",
    )
    arrays["adj_data"] = np.ones_like(arrays["adj_data"])
    assert citation.load(save(arrays)).notes == dataset.notes[1:]


def test_an_entry_of_zero_is_no_edge(save):
    arrays = benchmark()
    arrays["adj_data"] = np.zeros_like(arrays["adj_data"])
    assert len(citation.load(save(arrays)).edges) == 0


def write_planetoid(folder, name="toy", **changes):
    """Eight nodes: five in allx, of which two train; 7 and 5 tested, 6 is absent."""
    features = scipy.sparse.csr_matrix(np.eye(8, 4, dtype=np.float32) + 1)
    one_hot = np.eye(3, dtype=np.int32)
    neighbours = {0: [1, 1], 1: [0], 2: [5], 5: [2], 6: [], 7: [0, 7]}
    parts = {
        "x": features[:2],
        "y": one_hot[[0, 1]],
        "allx": features[:5],
        "ally": one_hot[[0, 1, 2, 2, 0]],
        "tx": features[[7, 5]],
        "ty": one_hot[[1, 2]],
        "graph": neighbours,
    }
    for part, content in (parts | changes).items():
        path = folder / f"ind.{name}.{part}"
        if part == "test.index":
            continue
        path.write_bytes(pickle.dumps(content, protocol=2))
    lines = changes.get("test.index", "7\n5\n")
    (folder / f"ind.{name}.test.index").write_text(lines)
    return str(folder)


def test_a_folder_of_planetoid(tmp_path):
    dataset = citation.load(write_planetoid(tmp_path))
    assert dataset.name == "toy"
    expected = np.eye(8, 4) + 1
    expected[6] = 0
    np.testing.assert_array_equal(dense(dataset), expected)
    assert dataset.labels.tolist() == [0, 1, 2, 2, 0, 2, -1, 1]
    assert dataset.edges.tolist() == [[0, 1], [0, 7], [2, 5]]
    assert {name: nodes.tolist() for name, nodes in dataset.splits.items()} == {
        "train": [0, 1],
        "validation": [2, 3, 4],
        "test": [5, 7],
    }
    assert dataset.class_names == ("0", "1", "2")
    assert dataset.notes == (
        "nodes absent from the source, without features or label: 1",
        "entries of self edges removed: 1",
        "repeated entries of edges removed: 1",
        "edges given in one direction, and used in both: 1 of 3",
    )


@pytest.mark.parametrize("dtype", ["f2", "f8", "g", "i8", "u1", "?"])
@pytest.mark.parametrize("is_dense", [True, False])
def test_features_of_planetoid_in_any_numbers(tmp_path, dtype, is_dense):
    expected = np.eye(8, 4)
    expected[6] = 0  # which is absent
    if is_dense:
        parts = {"allx": np.eye(5, 4, dtype=dtype), "tx": np.zeros((2, 4), dtype)}
    else:
        eye = scipy.sparse.csr_matrix(np.eye(5, 4))
        eye.data = eye.data.astype(dtype)  # SciPy itself makes none of 16 bits
        parts = {"allx": eye, "tx": scipy.sparse.csr_matrix((2, 4))}
    dataset = citation.load(write_planetoid(tmp_path, **parts))
    np.testing.assert_array_equal(dense(dataset), expected)
    assert dataset.features.dtype == np.float32


@pytest.mark.parametrize("subfolder", [".", "planetoid", "original/planetoid"])
def test_planetoid_files_are_found_by_name(cache, tmp_path, monkeypatch, subfolder):
    folder = tmp_path / "data" / subfolder
    folder.mkdir(parents=True)
    write_planetoid(folder, "pubmed")
    published = citation.PUBLISHED["pubmed"]._replace(
        num_nodes=8, num_edges=3, num_features=4
    )
    monkeypatch.setitem(citation.PUBLISHED, "pubmed", published)
    assert citation.load("pubmed", tmp_path / "data").name == "pubmed"
    assert citation.locate("pubmed", tmp_path / "data") == folder
    assert citation.locate("cora", tmp_path / "data") is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test.index": "7\n2\n"}, ["test.index", "2 test nodes", "from 5 on"]),
        ({"test.index": "7\n7\n"}, ["test.index", "different one"]),
        ({"test.index": "seven\n"}, ["test.index", "not a readable"]),
        ({"graph": [[1], [0]]}, ["toy.graph", "dict of lists"]),
        ({"graph": {0: [8]}}, ["node 8", "0 to 7"]),
        ({"graph": {0: ["one"]}}, ["toy.graph", "expected integers"]),
        ({"ally": np.eye(3)}, ["toy.ally", "(3, 3)", "5 rows of allx"]),
        ({"ty": np.eye(2)}, ["toy.ally", "as in ty"]),
        ({"y": [0, 1]}, ["toy.y", "table of labels"]),
        ({"allx": {"a": 1}}, ["toy.allx", "matrix of features"]),
        ({"allx": np.eye(5, 4, dtype=complex)}, ["toy.allx", "type complex128"]),
        ({"allx": np.full((5, 4), "a")}, ["toy.allx", "type <U1, expected numbers"]),
        ({"allx": np.full((5, 4), None)}, ["toy.allx", "data type"]),
        ({"allx": np.eye(5, 4) * 1e300}, ["not finite in 32 bits"]),
        ({"allx": np.zeros((5, 0)), "tx": np.zeros((2, 0))}, ["no columns"]),
        (
            {"tx": scipy.sparse.csr_matrix(np.eye(2, 9))},
            ["toy.tx", "9 features", "the 4"],
        ),
    ],
)
def test_broken_planetoid_files(tmp_path, changes, words):
    assert_fails(words, write_planetoid(tmp_path, **changes))


def test_a_folder_of_no_or_of_two_datasets(tmp_path):
    assert not citation.reads(str(tmp_path))
    assert_fails(["no ind.*.graph"], str(tmp_path))
    write_planetoid(tmp_path, "a.b")
    assert citation.reads(str(tmp_path))
    assert citation.load(str(tmp_path)).name == "a.b"
    write_planetoid(tmp_path, "other")
    assert_fails(["a.b, other", "data_dir"], str(tmp_path))


def assert_fails(words, name, data_dir=None):
    with pytest.raises(InputError) as raised:
        citation.load(name, data_dir)
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    return message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edges": None}, ["no array 'edges'", "found class_names"]),
        ({"edges": np.zeros((3, 3), int)}, ["(3, 3)", "[E, 2]"]),
        ({"edges": np.zeros((3, 2))}, ["edges", "float64", "integers with 2 axes"]),
        ({"edges": np.array([[0, 7]])}, ["edges has the node 7", "0 to 6"]),
        ({"edges": np.array([[-1, 0]])}, ["edges has the node -1", "0 to 6"]),
        ({"labels": np.array([0, 1])}, ["features of 7 nodes", "expected 2"]),
        ({"labels": np.array([*LABELS[:6], 3])}, ["has 3", "0 to 2 for 3 classes"]),
        ({"labels": np.array([*LABELS[:6], -2])}, ["has -2", "-1 for no label"]),
        ({"labels": np.full(7, -1)}, ["no labelled node"]),
        ({"labels": np.array([*LABELS[:6], 2**64 - 1], np.uint64)}, ["of 64 bits"]),
        (
            {"labels": np.array([*LABELS[:6], 10**9]), "class_names": None},
            ["1000000000", "fewer classes than the 7 nodes"],
        ),
        ({"labels": np.array(["a"] * 7)}, ["labels", "integers with 1 axis"]),
        ({"class_names": np.zeros(3)}, ["class_names", "list of text"]),
        ({"features_data": None}, ["no array 'features_data'"]),
        ({"features_shape": np.array([7])}, ["features_shape", "two sizes"]),
        ({"features_shape": np.array([7, 2])}, ["features_*", "expected 0 to 1"]),
        (
            {"features_indptr": np.zeros(8, np.int64)},
            ["features_*", "indptr runs from 0 to 0"],
        ),
        (
            {"features_indices": np.array([10**6] * 8)},
            ["features_*", "the indices hold 1000000"],
        ),
        ({"features_data": np.full(8, np.nan)}, ["features", "not finite"]),
        ({"features": np.full((7, 2), 1e300)}, ["features", "not finite"]),
        ({"train_idx": np.array([0, 7])}, ["train split has the node 7"]),
        ({"test_idx": np.array([1, 1])}, ["test split has a node twice"]),
        ({"val_idx": np.array([3, 2])}, ["train and validation share 1 nodes", "2"]),
        ({"test_idx": np.array([6, 3])}, ["validation and test share", "the first 3"]),
        ({"unlabeled": np.array([0])}, ["train split", "without a label"]),
        ({"unlabeled": np.array([9])}, ["unlabeled has the node 9"]),
    ],
)
def test_broken_npz_files(save, changes, words):
    path = save(compact(**changes))
    assert assert_fails(words, path).startswith(f"{path}: ")


def test_other_files(tmp_path, save):
    assert_fails(["no such file"], str(tmp_path / "absent.npz"))
    (tmp_path / "text.npz").write_text("hello")
    assert_fails(["not a readable"], str(tmp_path / "text.npz"))
    np.save(tmp_path / "single.npy", FEATURES)
    single = (tmp_path / "single.npy").rename(tmp_path / "single.npz")
    assert_fails(["a single array"], str(single))
    assert_fails(["no array 'edges'", "found speed"], save({"speed": FEATURES}))
    assert_fails(["unknown graph dataset 'coral'", "cora, citeseer"], "coral")
    with pytest.raises(InputError, match="unknown graph dataset 'coral'"):
        citation.locate("coral")


def test_kinds_of_npz_files_are_told_apart(tmp_path, save):
    assert citation_formats.is_node_file(save(compact()))
    assert citation_formats.is_node_file(save(benchmark()))
    assert not citation_formats.is_node_file(
        save({"speed": FEATURES, "adjacency": FEATURES})
    )
    assert not citation_formats.is_node_file(save({"train_images": FEATURES}))
    assert not citation_formats.is_node_file(tmp_path / "absent.npz")
    assert not citation_formats.is_node_file(tmp_path)


def test_a_published_name_with_another_size(tmp_path, cache):
    np.savez(tmp_path / "cora.npz", **compact())
    assert_fails(["7 nodes, 3 features", "2708 nodes"], "cora", tmp_path)


@pytest.mark.parametrize("name", sorted(citation.PUBLISHED))
def test_a_missing_dataset_is_one_line_that_tells_what_to_do(tmp_path, cache, name):
    words = [name, str(tmp_path), str(cache), "data_dir"]
    words.append("ogbn-products" if name == "amazon2m" else "--download")
    assert_fails(words, name, tmp_path)


def test_an_alias(tmp_path, monkeypatch):
    path = tmp_path / "ms_academic_phy.npz"
    np.savez(path, **benchmark())
    published = citation.PUBLISHED["coauthor_physics"]._replace(
        num_nodes=7, num_edges=6, num_features=3, num_classes=3
    )
    monkeypatch.setitem(citation.PUBLISHED, "coauthor_physics", published)
    assert citation.locate("physics", tmp_path) == path
    dataset = citation.load("physics", tmp_path)
    assert dataset.name == "coauthor_physics"
    assert dataset.notes[-1] == "5 edges, where 6 are expected"


def write_products(folder, **changes):
    tables = {
        "raw/edge": EDGES,
        "raw/node-feat": FEATURES.tolist(),
        "raw/node-label": [[label] for label in LABELS],
        "raw/num-node-list": [[7]],
        "split/sales_ranking/train": [[0], [1]],
        "split/sales_ranking/valid": [[2]],
        "split/sales_ranking/test": [[6], [5]],
    }
    for name, rows in (tables | changes).items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            file.writelines(",".join(map(str, row)) + "\n" for row in rows)


@pytest.fixture
def small_products(monkeypatch, cache):
    published = citation.PUBLISHED["amazon2m"]._replace(
        num_nodes=7, num_edges=5, num_features=3, num_classes=3
    )
    monkeypatch.setitem(citation.PUBLISHED, "amazon2m", published)


@pytest.mark.parametrize("subfolder", ["products", "ogbn_products"])
def test_the_raw_files_of_ogb(tmp_path, small_products, toy, subfolder):
    write_products(tmp_path / subfolder)
    assert citation.locate("amazon2m", tmp_path) == tmp_path / subfolder
    dataset = citation.load("amazon2m", tmp_path)
    assert isinstance(dataset.features, np.ndarray)
    assert dataset.features.dtype == np.float32
    splits = {"train": [0, 1], "validation": [2], "test": [5, 6]}
    assert_same(dataset, toy._replace(splits=splits, class_names=("0", "1", "2")))
    assert dataset.notes == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"raw/edge": [(0, 1, 2)]}, ["edge.csv.gz", "(1, 3)", "2 columns"]),
        ({"raw/edge": [(0, 1), (2,)]}, ["edge.csv.gz", "not a readable"]),
        ({"raw/edge": []}, ["edge.csv.gz", "at least one row"]),
        ({"raw/node-feat": [("a",)]}, ["node-feat.csv.gz", "not a readable"]),
        ({"raw/node-feat": [(0,)]}, ["features of 1 nodes", "expected 7"]),
        ({"raw/num-node-list": [[8]]}, ["node-label.csv.gz", "7 nodes", "the 8"]),
    ],
)
def test_broken_raw_files(tmp_path, small_products, changes, words):
    write_products(tmp_path / "products", **changes)
    assert_fails(words, "amazon2m", tmp_path)


def test_a_raw_file_is_missing_or_cut_off(tmp_path, small_products):
    write_products(tmp_path / "products")
    path = tmp_path / "products/raw/node-feat.csv.gz"
    path.write_bytes(path.read_bytes()[:-9])
    assert_fails([str(path), "not a readable"], "amazon2m", tmp_path)
    path.unlink()
    assert_fails([str(path), "no such file"], "amazon2m", tmp_path)


@pytest.mark.parametrize("first", [",1", '"0"', "0,x"])
def test_a_first_row_with_a_number_is_no_header(tmp_path, first):
    tables = {
        "edges.csv": "0,1",
        "features.csv": f"{first}\n1,2\n3,4",
        "labels.csv": "0",
    }
    for name, content in tables.items():
        (tmp_path / name).write_text(content + "\n")
    with pytest.raises(InputError, match="features.csv"):
        citation.load(str(tmp_path))
