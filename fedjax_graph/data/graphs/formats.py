"""Readers of the file formats in which graphs of labelled nodes are published.

Each reader returns a `RawGraph` or raises `InputError`, one line that names the file.
"""

import itertools
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files, limits, safe_pickle, sparse

PLANETOID_PARTS = ("allx", "ally", "tx", "ty", "y", "graph", "test.index")
NUM_VALIDATION = 500  # of the split of Planetoid
PRODUCTS_MARK = "raw/edge.csv.gz"
_SPLIT_KEYS = {  # of nodes, or [N] bool
    "train": ("train_idx", "train_mask"),
    "validation": ("val_idx", "val_mask"),
    "test": ("test_idx", "test_mask"),
}
_BENCHMARK_MARK = "adj_indptr"
_EDGE_MARKS = {"edges", "edge_index"}
_LABELS, _FEATURES = ("labels", "y"), ("features", "x")  # ours and PyG's name
CSV_MARK = "edges.csv"


UNWEIGHTED = "weights of edges are not read: all edges count alike"


class RawGraph(NamedTuple):
    """Holds a graph as its file has it; that the arrays fit is left to check."""

    features: scipy.sparse.csr_array | np.ndarray  # [N, F]
    senders: np.ndarray  # [R]
    receivers: np.ndarray  # [R]
    labels: np.ndarray  # [N]; -1 where a node has none
    class_names: tuple[str, ...] | None = None
    splits: dict[str, np.ndarray] = {}
    notes: tuple[str, ...] = ()
    is_directed: bool = True  # False: an edge stands once, in either direction


def is_node_file(path: str | os.PathLike) -> bool:
    """Tells by its keys whether a .npz file holds a graph of labelled nodes.

    False if it cannot be read.
    """
    keys = files.npz_keys(path)
    has_edges = keys & {*_EDGE_MARKS, _BENCHMARK_MARK}
    return bool(has_edges and keys & set(_LABELS))


def read_npz(path: str | os.PathLike) -> RawGraph:
    """Reads a .npz file with the keys that `datasets.load` lists."""
    with files.reading(path, "graph dataset"), files.open_npz(path) as archive:
        arrays = _Arrays(archive)
        if _BENCHMARK_MARK in archive.files:
            return _benchmark_graph(arrays)
        return _compact_graph(arrays)


class _Arrays:
    """Reads arrays of a .npz file when asked for; object arrays are left unread."""

    def __init__(self, archive: np.lib.npyio.NpzFile) -> None:
        self._archive = archive

    def __contains__(self, key: str) -> bool:
        return key in self._archive.files

    def get(self, key: str, ndim: int, kinds: str = "fiub") -> np.ndarray:
        """Reads an array of that many axes, whose type is of the given kinds."""
        if key not in self:
            found = ", ".join(sorted(self._archive.files)) or "none"
            raise InputError(f"no array {key!r}; found {found}")
        array = self._archive[key]
        if array.ndim != ndim or array.dtype.kind not in kinds:
            kind = "numbers" if "f" in kinds else "integers"
            raise InputError(
                f"{key} has shape {array.shape} and type {array.dtype}, expected "
                f"{kind} with {ndim} {'axis' if ndim == 1 else 'axes'}"
            )
        return array

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of an array that is there."""
        return self._archive[key].shape

    def integers(self, key: str, ndim: int = 1) -> np.ndarray:
        """Reads an array of integers."""
        return self.get(key, ndim, "iu")

    def first(self, keys: Iterable[str]) -> str:
        """The one of several names that there is; the first where there is none."""
        keys = tuple(keys)
        return next((key for key in keys if key in self), keys[0])

    def nodes(self, key: str, num_nodes: int) -> np.ndarray:
        """Reads a set of nodes: their numbers, or whether each belongs to it."""
        array = self.get(key, 1, "iub")
        if array.dtype != bool:
            if key.endswith("_mask"):
                raise InputError(
                    f"{key} has type {array.dtype}, expected bool; for 0 and 1 save "
                    f"{key}.astype(bool), for numbers of nodes call it "
                    f"{key.replace('_mask', '_idx')}"
                )
            return array
        if len(array) != num_nodes:
            raise InputError(
                f"{key} is a mask of {len(array)} nodes, expected {num_nodes}"
            )
        return np.flatnonzero(array)

    def matrix(self, prefix: str) -> scipy.sparse.csr_array:
        """Reads the CSR matrix that is stored as four arrays."""
        shape = tuple(self.integers(f"{prefix}_shape").tolist())
        if len(shape) != 2:
            raise InputError(f"{prefix}_shape is {shape}, expected two sizes")
        data = self.get(f"{prefix}_data", 1)
        indices, indptr = (
            self.integers(f"{prefix}_{part}") for part in ("indices", "indptr")
        )
        return sparse.csr_array(data, indices, indptr, shape, f"{prefix}_*")

    def class_names(self) -> tuple[str, ...] | None:
        """Reads the names where they are plain text; pickled ones are not read."""
        if "class_names" not in self:
            return None
        try:
            names = self._archive["class_names"]
        except ValueError:
            return None
        if names.ndim != 1 or names.dtype.kind != "U":
            raise InputError(
                f"class_names has shape {names.shape} and type {names.dtype}, expected "
                "a list of text"
            )
        files.check_texts("class_names", names.tolist())
        return tuple(names.tolist())


def _compact_graph(arrays: _Arrays) -> RawGraph:
    """Reads edges [E, 2] or edge_index [2, E], labels, features and splits."""
    edges, is_directed = _edges(arrays)
    dense = arrays.first(_FEATURES)
    features = arrays.get(dense, 2) if dense in arrays else arrays.matrix("features")
    labels, notes = _labels(arrays), ()
    if "unlabeled" in arrays:
        unlabelled = arrays.nodes("unlabeled", len(labels))
        check_nodes(unlabelled, len(labels), "unlabeled")
        labels[unlabelled] = -1
        notes = (_absent_note(len(unlabelled)),) if len(unlabelled) else ()
    if any(key in arrays for key in ("edge_weight", "edge_attr")):
        notes = (*notes, UNWEIGHTED)
    splits = {split: arrays.first(keys) for split, keys in _SPLIT_KEYS.items()}
    return RawGraph(
        features,
        edges[:, 0],
        edges[:, 1],
        labels,
        arrays.class_names(),
        {
            split: arrays.nodes(key, len(labels))
            for split, key in splits.items()
            if key in arrays
        },
        notes,
        is_directed,
    )


def _edges(arrays: _Arrays) -> tuple[np.ndarray, bool]:
    """Edges [E, 2], and whether each direction is an entry of its own."""
    if "edges" not in arrays and "edge_index" in arrays:
        edges = arrays.integers("edge_index", 2)
        if len(edges) != 2:
            hint = "; [E, 2] is called edges" if edges.shape[1] == 2 else ""
            raise InputError(
                f"edge_index has shape {edges.shape}, expected [2, E]{hint}"
            )
        return edges.T, True
    edges = arrays.integers("edges", 2)
    if edges.shape[1] != 2:
        hint = "; [2, E] is called edge_index" if len(edges) == 2 else ""
        raise InputError(f"edges has shape {edges.shape}, expected [E, 2]{hint}")
    return edges, False


def _labels(arrays: _Arrays) -> np.ndarray:
    """Labels [N] int64."""
    key = arrays.first(_LABELS)
    if key in arrays and (shape := arrays.shape(key))[1:]:
        hint = f"; of one-hot rows save {key}.argmax(axis=1)" if shape[1] > 1 else ""
        raise InputError(f"{key} has shape {shape}, expected [N]{hint}")
    labels = arrays.integers(key)
    if len(labels) and labels.max() >= 2**63:  # would become negative: no label
        raise InputError(f"{key} has {labels.max()}, expected integers of 64 bits")
    return labels.astype(np.int64)


def _benchmark_graph(arrays: _Arrays) -> RawGraph:
    """Reads the layout of gnn-benchmark and graph2gauss: a directed adjacency."""
    adjacency = arrays.matrix("adj")
    if "attr_matrix" in arrays:
        features = arrays.get("attr_matrix", 2)
    else:
        features = arrays.matrix("attr")
    senders, receivers = adjacency.nonzero()
    weights = np.unique(adjacency.data[adjacency.data != 0])
    return RawGraph(
        features,
        senders,
        receivers,
        arrays.integers("labels"),
        arrays.class_names(),
        notes=(UNWEIGHTED,) if len(weights) > 1 else (),
    )


def _absent_note(number: int) -> str:
    return f"nodes absent from the source, without features or label: {number}"


def planetoid_names(folder: str | os.PathLike) -> list[str]:
    """Names the datasets of which a folder has Planetoid's file of edges."""
    paths = sorted(Path(folder).glob("ind.*.graph"))
    return [path.name.split(".", 1)[1].removesuffix(".graph") for path in paths]


def read_planetoid(folder: str | os.PathLike, name: str) -> RawGraph:
    """Reads the files `ind.<name>.*` of Planetoid.

    The nodes of `allx` come first, those of `tx` stand where `test.index` says; the
    first of `y` are for training, the `NUM_VALIDATION` nodes after them validate.
    `ind.<name>.x` repeats the first rows of `allx` and is not needed.
    """
    paths = {part: Path(folder) / f"ind.{name}.{part}" for part in PLANETOID_PARTS}
    with files.reading(paths["test.index"], "list of test nodes"):
        test = _read_csv(paths["test.index"], np.int64, 1).ravel()
    features = {part: _matrix(paths[part]) for part in ("allx", "tx")}
    labels = {part: _one_hot(paths[part]) for part in ("ally", "ty", "y")}
    _check_planetoid(paths, test, features, labels)
    num_known, num_train = len(labels["ally"]), len(labels["y"])
    num_validation = min(NUM_VALIDATION, num_known - num_train)
    num_nodes = max(num_known, int(test.max()) + 1)
    row = np.full(num_nodes, -1)  # of allx and tx together; the last one is empty
    row[:num_known] = np.arange(num_known)
    row[test] = num_known + np.arange(len(test))
    num_absent = int((row < 0).sum())
    empty = scipy.sparse.csr_array((1, features["tx"].shape[1]), dtype=np.float32)
    no_label = np.zeros((1, labels["ty"].shape[1]))
    stacked = scipy.sparse.vstack([features["allx"], features["tx"], empty], "csr")
    one_hot = np.concatenate([labels["ally"], labels["ty"], no_label])[row]
    return RawGraph(
        stacked[row],
        *_neighbour_lists(paths["graph"]),
        np.where(one_hot.any(axis=1), one_hot.argmax(axis=1), -1),
        tuple(map(str, range(one_hot.shape[1]))),
        {
            "train": np.arange(num_train),
            "validation": np.arange(num_train, num_train + num_validation),
            "test": test,
        },
        (_absent_note(num_absent),) if num_absent else (),
    )


def _check_planetoid(paths, test, features, labels) -> None:
    """Checks that test nodes, features and labels fit together.

    Raises:
      InputError: if they do not.
    """
    (num_known, num_features), num_tested = features["allx"].shape, len(labels["ty"])
    is_own = len(np.unique(test)) == len(test) and test.min() >= num_known
    if not is_own or not len(test) == num_tested == features["tx"].shape[0]:
        raise InputError(
            f"{paths['test.index']}: {len(test)} test nodes; expected a different one "
            f"for each of {features['tx'].shape[0]} rows of tx and {num_tested} of ty, "
            f"from {num_known} on, after the nodes of allx"
        )
    if test.max() >= 2 * (num_known + num_tested):
        raise InputError(
            f"{paths['test.index']}: test node {test.max()}; expected fewer, with "
            f"{num_known} rows of allx and {num_tested} of tx"
        )
    if features["tx"].shape[1] != num_features:
        raise InputError(
            f"{paths['tx']}: {features['tx'].shape[1]} features, expected the "
            f"{num_features} of allx"
        )
    is_short = num_known < len(labels["y"]) or len(labels["ally"]) != num_known
    if is_short or len({table.shape[1] for table in labels.values()}) > 1:
        raise InputError(
            f"{paths['ally']}: labels of shape {labels['ally'].shape}; expected a row "
            f"for each of {num_known} rows of allx, no fewer than the "
            f"{len(labels['y'])} of y, and columns as in ty and y"
        )


def _matrix(path: Path) -> scipy.sparse.csr_array:
    """A pickled matrix of numbers, float32: SciPy has no sparse ones of 16 bits."""
    content = safe_pickle.load(path)
    is_table = isinstance(content, np.ndarray) and content.ndim == 2
    if not is_table and not scipy.sparse.issparse(content):
        raise InputError(
            f"{path}: {type(content).__name__} found, expected a matrix of features"
        )
    if content.dtype.kind not in sparse.NUMBERS:
        raise InputError(
            f"{path}: features of type {content.dtype}, expected numbers; save "
            "features.astype(np.float32)"
        )
    with np.errstate(over="ignore"):  # beyond float32 is infinite, refused later
        return scipy.sparse.csr_array(content.astype(np.float32))


def _one_hot(path: Path) -> np.ndarray:
    content = safe_pickle.load(path)
    is_table = isinstance(content, np.ndarray) and content.ndim == 2
    if not is_table or content.dtype.kind not in "fiub" or not content.shape[1]:
        raise InputError(
            f"{path}: expected a table of labels [nodes, classes], found "
            f"{getattr(content, 'shape', type(content).__name__)}"
        )
    return content


def _neighbour_lists(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Flattens a pickled dict of lists into senders [R] and receivers [R]."""
    content = safe_pickle.load(path)
    with files.reading(path, "dict of lists of neighbours"):
        if not isinstance(content, dict):
            raise InputError(
                f"{type(content).__name__} found, expected a dict of lists of "
                "neighbours"
            )
        sizes = [len(neighbours) for neighbours in content.values()]
        senders = np.repeat(_node_array(content), sizes)
        return senders, _node_array(itertools.chain.from_iterable(content.values()))


def _node_array(nodes: Iterable) -> np.ndarray:
    array = np.array(list(nodes) or np.zeros(0, np.int64))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"nodes of type {array.dtype}, expected integers")
    return array


def is_csv_folder(path: str | os.PathLike) -> bool:
    """Tells whether a folder is one that `read_csv_folder` reads."""
    return (Path(path) / CSV_MARK).is_file()


def read_csv_folder(folder: str | os.PathLike) -> RawGraph:
    """Reads tables of a user's own, each with or without a header line.

    In `folder`: edges.csv [E, 2] and labels.csv [N, 1], integers, features.csv [N, F],
    and optionally train.csv, val.csv and test.csv, each a column of nodes.
    """
    folder = Path(folder)
    edges = _own_table(folder / CSV_MARK, np.int64, 2)
    features = _own_table(folder / "features.csv", np.float32)
    labels = _own_table(folder / "labels.csv", np.int64, 1).ravel()
    firsts, last = (edges[0], labels[:1], features[0]), len(labels) - 1
    are_places = all(np.array_equal(row, np.arange(len(row))) for row in firsts)
    is_short = edges[1:].max(initial=-1) < last  # as if one row were no node
    names = (CSV_MARK, "labels.csv", "features.csv")
    if are_places and is_short and not any(_has_header(folder / x) for x in names):
        raise InputError(
            f"{folder}: the first lines of edges.csv, labels.csv and features.csv are "
            "0, 1 and so on, as columns without names are numbered: save the tables "
            "without that line (header=False), or if it is none, with a line of names"
        )
    splits = {"train": "train", "validation": "val", "test": "test"}
    return RawGraph(
        features,
        edges[:, 0],
        edges[:, 1],
        labels,
        splits={
            name: _own_table(folder / f"{part}.csv", np.int64, 1).ravel()
            for name, part in splits.items()
            if (folder / f"{part}.csv").exists()
        },
        is_directed=False,
    )


def _own_table(path: Path, dtype, num_columns: int | None = None) -> np.ndarray:
    with files.reading(path, "csv file of numbers"):
        return _read_csv(path, dtype, num_columns, skipped=int(_has_header(path)))


def _has_header(path: Path) -> bool:
    with limits.open_text(path) as file:
        cells = [cell.strip(' "\r\n') for cell in file.readline().split(",")]
    is_header = not any(map(files.is_number, cells))
    if is_header and len(cells) > 1 and not cells[0]:
        raise InputError(
            "the first column has no name, as that of row numbers has none: save the "
            "table without it (index=False)"
        )
    return is_header


def read_products(folder: str | os.PathLike) -> RawGraph:
    """Reads the raw files of OGB's ogbn-products, which is Amazon2M.

    In `folder`: raw/{edge,node-feat,node-label,num-node-list}.csv.gz and
    split/sales_ranking/{train,valid,test}.csv.gz, tables without a header.
    """
    raw = Path(folder) / "raw"
    edges = _read_table(raw / "edge.csv.gz", np.int32, 2)
    features = _read_table(raw / "node-feat.csv.gz", np.float32)
    labels = _read_table(raw / "node-label.csv.gz", np.int32, 1).ravel()
    num_nodes = _read_table(raw / "num-node-list.csv.gz", np.int64, 1).ravel()
    if num_nodes.tolist() != [len(labels)]:
        raise InputError(
            f"{raw / 'node-label.csv.gz'}: labels of {len(labels)} nodes, expected "
            f"the {' + '.join(map(str, num_nodes))} of num-node-list.csv.gz"
        )
    split = Path(folder) / "split" / "sales_ranking"
    parts = {"train": "train", "validation": "valid", "test": "test"}
    return RawGraph(
        features,
        edges[:, 0],
        edges[:, 1],
        labels,
        splits={
            name: _read_table(split / f"{part}.csv.gz", np.int32, 1).ravel()
            for name, part in parts.items()
        },
        is_directed=False,
    )


def _read_table(path: Path, dtype, num_columns: int | None = None) -> np.ndarray:
    with files.reading(path, "compressed csv file"):
        return _read_csv(path, dtype, num_columns)


def _read_csv(
    path: Path, dtype, num_columns: int | None, skipped: int = 0
) -> np.ndarray:
    """Streams a csv file, as it is or as .gz, into an array [R, C].

    Args:
      path: the file.
      dtype: of the array.
      num_columns: C; None for any.
      skipped: lines of its header.
    """
    limits.check_table(path, np.dtype(dtype).itemsize, skipped)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "loadtxt: input contained no data")
        table = np.loadtxt(
            path, dtype, delimiter=",", ndmin=2, skiprows=skipped, encoding="utf-8-sig"
        )
    if not len(table) or num_columns not in (None, table.shape[1]):
        raise InputError(
            f"a table of shape {table.shape}, expected at least one row and "
            f"{'any' if num_columns is None else num_columns} columns"
        )
    return table


def check_nodes(nodes: np.ndarray, num_nodes: int, key: str) -> None:
    """Raises `InputError` if an entry is not a node, 0 to `num_nodes` - 1."""
    if len(nodes) and not 0 <= nodes.min() <= nodes.max() < num_nodes:
        wrong = nodes.max() if nodes.max() >= num_nodes else nodes.min()
        raise InputError(f"{key} has the node {wrong}, expected 0 to {num_nodes - 1}")
