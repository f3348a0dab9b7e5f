"""Citation, co-author and co-purchase graphs, in the forms that users have them.

`load` reads a published graph or a user's own file; see `node_dataset` for what it is.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse

from fedjax_graph.core.errors import InputError
from fedjax_graph.data import files
from fedjax_graph.data.graphs import formats as citation_formats
from fedjax_graph.data.graphs.formats import check_nodes
from fedjax_graph.data.graphs.node_dataset import NodeDataset, distinct, noted


class Published(NamedTuple):
    """Describes a published dataset: its size, and the names of its files."""

    description: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    archives: tuple[str, ...] = ()  # .npz files; the first to be found is read
    planetoid: str = ""  # as in ind.NAME.graph
    products: tuple[str, ...] = ()  # folders with OGB's raw files


PUBLISHED = {
    "cora": Published(
        "Cora: 2708 machine learning papers and their citations",
        num_nodes=2708,
        num_edges=5278,
        num_features=1433,
        num_classes=7,
        archives=("cora.npz",),
        planetoid="cora",
    ),
    "citeseer": Published(
        "CiteSeer: 3327 computer science papers and their citations",
        num_nodes=3327,
        num_edges=4552,
        num_features=3703,
        num_classes=6,
        archives=("citeseer.npz",),
        planetoid="citeseer",
    ),
    "pubmed": Published(
        "PubMed: 19717 papers on diabetes and their citations",
        num_nodes=19717,
        num_edges=44324,
        num_features=500,
        num_classes=3,
        archives=("pubmed.npz",),
        planetoid="pubmed",
    ),
    "cora_full": Published(
        "Cora in full: 19793 papers of 70 fields and their citations",
        num_nodes=19793,
        num_edges=63421,
        num_features=8710,
        num_classes=70,
        archives=("cora_full.npz",),
    ),
    "coauthor_cs": Published(
        "Coauthor CS: 18333 computer scientists, linked by joint papers",
        num_nodes=18333,
        num_edges=81894,
        num_features=6805,
        num_classes=15,
        archives=("coauthor_cs.npz", "ms_academic_cs.npz"),
    ),
    "coauthor_physics": Published(
        "Coauthor Physics: 34493 physicists, linked by joint papers",
        num_nodes=34493,
        num_edges=247962,
        num_features=8415,
        num_classes=5,
        archives=("coauthor_physics.npz", "ms_academic_phy.npz"),
    ),
    "amazon_photo": Published(
        "Amazon Photo: 7650 products, linked where bought together",
        num_nodes=7650,
        num_edges=119081,
        num_features=745,
        num_classes=8,
        archives=("amazon_photo.npz", "amazon_electronics_photo.npz"),
    ),
    "amazon_computers": Published(
        "Amazon Computers: 13752 products, linked where bought together",
        num_nodes=13752,
        num_edges=245861,
        num_features=767,
        num_classes=10,
        archives=("amazon_computers.npz", "amazon_electronics_computers.npz"),
    ),
    "amazon2m": Published(
        "Amazon2M (ogbn-products): 2449029 products, linked where bought together",
        num_nodes=2449029,
        num_edges=61859140,
        num_features=100,
        num_classes=47,
        products=("products", "ogbn_products"),
    ),
}
ALIASES = {"physics": "coauthor_physics"}
PATHS = (  # of a user's own dataset
    "of a .npz file",
    "of a folder with Planetoid's files ind.NAME.* or with edges.csv",
)


def load(name: str, data_dir: files.Folder = None) -> NodeDataset:
    """Loads a dataset by name, or a user's own file or folder.

    A published dataset is looked for in `data_dir`, else in $FEDJAX_GRAPH_DATA, and
    then in the download cache: as a .npz file under its name or that which
    gnn-benchmark gave it; Cora, CiteSeer and PubMed then as Planetoid's files
    `ind.cora.*`, also in the subfolders `planetoid`, `original/planetoid` and
    `cora/raw`. Amazon2M is read from OGB's raw files in a folder `products` or
    `ogbn_products`: `raw/edge.csv.gz` and those beside it, and `split/sales_ranking`.

    A .npz file has either the keys of gnn-benchmark (adj_*, attr_* and labels), of
    which pickled names are not read, or

        edges [E, 2]            integers, each undirected edge once;
        edge_index [2, E]       or as PyTorch Geometric has it, both directions listed
        labels [N]              integers from 0 on; -1 where a node has none (or `y`)
        features [N, F], or     numbers (or `x`)
        features_data, features_indices, features_indptr, features_shape
                                or the parts of a sparse matrix in CSR format
        class_names [C]         optional: text; the numbers of the classes if absent
        train_idx, val_idx, test_idx
                                optional: nodes of each split;
        train_mask, val_mask, test_mask [N]
                                or bool, whether a node belongs to it
        unlabeled               optional: nodes whose label does not count, or bool [N]

    A folder of csv tables has edges.csv, labels.csv, features.csv and optionally
    train.csv, val.csv and test.csv: see `formats.read_csv_folder`.

    Args:
      name: a name of `PUBLISHED` or `ALIASES`, or a path: of a .npz file, or of a
        folder with csv tables or the files of one dataset of Planetoid.
      data_dir: folder with the files.

    Raises:
      InputError: one line; a file is missing, broken or not what it should be.
    """
    name = ALIASES.get(name, name)
    if name in PUBLISHED:
        return _load_published(name, data_dir)
    path = Path(name)
    if path.suffix == ".npz":
        return _dataset(path.stem, path, citation_formats.read_npz(path))
    if citation_formats.is_csv_folder(path):
        return _dataset(path.name, path, citation_formats.read_csv_folder(path))
    if path.is_dir():
        own = _only_name(path)
        return _dataset(own, path, citation_formats.read_planetoid(path, own))
    raise files.unknown("graph", name, PUBLISHED, PATHS)


def locate(name: str, data_dir: files.Folder = None) -> Path | None:
    """Finds the file or folder with a published dataset; None if there is none.

    Raises:
      InputError: if the dataset is not known or the folder does not exist.
    """
    name = ALIASES.get(name, name)
    if name not in PUBLISHED:
        raise files.unknown("graph", name, PUBLISHED, PATHS)
    published, folders = PUBLISHED[name], files.folders(data_dir)
    found = files.find(published.archives, folders)
    if found is None and published.planetoid:
        short = published.planetoid
        subfolders = ("planetoid", "original/planetoid", f"{short}/raw")
        found = files.find([f"ind.{short}.graph"], folders, subfolders)
        found = found and found.parent
    if found is None and published.products:
        found = files.find(_product_marks(published), folders)
        found = found and found.parents[1]
    return found


def _product_marks(published: Published) -> list[str]:
    return [f"{sub}/{citation_formats.PRODUCTS_MARK}" for sub in published.products]


def reads(path: str) -> bool:
    """Whether a path is that of a user's own graph, by what is in it."""
    if path.endswith(".npz"):
        return citation_formats.is_node_file(path)
    is_tables = citation_formats.is_csv_folder(path)
    return is_tables or bool(citation_formats.planetoid_names(path))


def _load_published(name: str, data_dir: files.Folder) -> NodeDataset:
    path, published = locate(name, data_dir), PUBLISHED[name]
    if path is None:
        raise _not_found(name, data_dir)
    if path.suffix == ".npz":
        raw = citation_formats.read_npz(path)
    elif published.planetoid:
        raw = citation_formats.read_planetoid(path, published.planetoid)
    else:
        raw = citation_formats.read_products(path)
    dataset = _dataset(name, path, raw)
    num_features, num_classes = dataset.features.shape[1], len(dataset.class_names)
    sizes = (len(dataset.labels), num_features, num_classes)
    expected = (published.num_nodes, published.num_features, published.num_classes)
    if sizes != expected:
        words = "{} nodes, {} features and {} classes".format
        raise InputError(
            f"{path}: {words(*sizes)}, expected the {words(*expected)} of {name}; name "
            "the dataset that it is, or pass the path of a .npz"
        )
    if len(dataset.edges) == published.num_edges:
        return dataset
    return noted(
        dataset, f"{len(dataset.edges)} edges, where {published.num_edges} are expected"
    )


def _only_name(folder: Path) -> str:
    names = citation_formats.planetoid_names(folder)
    if len(names) != 1:
        raise InputError(
            f"{folder}: expected Planetoid's files ind.NAME.* of one dataset, found "
            f"{', '.join(names) or 'no ind.*.graph'}; pass the name of a known one "
            "with data_dir=FOLDER, or move it into a folder of its own"
        )
    return names[0]


def _not_found(name: str, data_dir: files.Folder) -> InputError:
    """The error where a dataset is in no form that can be read."""
    published = PUBLISHED[name]
    wanted = list(published.archives)
    if published.planetoid:
        wanted.append(f"ind.{published.planetoid}.graph")
    if not published.products:
        return files.not_found(name, wanted, data_dir)
    by_hand = (
        "unpack OGB's ogbn-products there, or name the folder that has its folder "
        f"{published.products[0]} with data_dir"
    )
    wanted += _product_marks(published)
    return files.not_found(name, wanted, data_dir, by_hand=by_hand)


def _dataset(name: str, path: Path, raw: citation_formats.RawGraph) -> NodeDataset:
    """Checks that the parts of a graph fit together, and makes its edges undirected."""
    with files.reading(path, "graph dataset"):
        labels, num_nodes = raw.labels, len(raw.labels)
        if not num_nodes or labels.max() < 0:
            raise InputError("no labelled node; expected labels from 0 on")
        class_names = raw.class_names or tuple(map(str, range(_one_more(labels))))
        wrong = labels[(labels < -1) | (labels >= len(class_names))]
        if len(wrong):
            raise InputError(
                f"labels has {wrong[0]}, expected 0 to {len(class_names) - 1} for "
                f"{len(class_names)} classes, or -1 for no label"
            )
        if raw.features.shape[0] != num_nodes:
            raise InputError(
                f"features of {raw.features.shape[0]} nodes, expected {num_nodes}, one "
                "row for each label"
            )
        edges, notes = _undirected(
            raw.senders, raw.receivers, num_nodes, raw.is_directed
        )
        return NodeDataset(
            name,
            _checked_features(raw.features),
            edges,
            labels.astype(np.int32),
            class_names,
            _disjoint(
                {key: _split(key, nodes, labels) for key, nodes in raw.splits.items()}
            ),
            raw.notes + notes,
        )


def _disjoint(splits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The splits, of which no two share a node."""
    for one, other in itertools.combinations(splits, 2):
        shared = np.intersect1d(splits[one], splits[other])
        if len(shared):
            raise InputError(
                f"{one} and {other} share {len(shared)} nodes, the first {shared[0]}; "
                "a node belongs to one of them"
            )
    return splits


def _one_more(labels: np.ndarray) -> int:
    """Counts the classes where no names tell."""
    most = int(labels.max())
    if most >= len(labels):
        raise InputError(
            f"labels has {most}, expected fewer classes than the {len(labels)} nodes"
        )
    return most + 1


def _checked_features(features):
    """Returns finite float32 features; sparse ones in canonical form without zeros."""
    if features.shape[1] < 1:
        raise InputError("features has no columns; expected at least one feature")
    with np.errstate(over="ignore"):
        features = features.astype(np.float32, copy=False)
    is_sparse = scipy.sparse.issparse(features)
    if not np.isfinite(features.data if is_sparse else features).all():
        raise InputError("features has entries that are not finite in 32 bits")
    if is_sparse:
        features.sum_duplicates()
        features.eliminate_zeros()
    return features


def _split(key: str, nodes: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Sorts the nodes of a split, int32; each has a label and stands once."""
    check_nodes(nodes, len(labels), f"the {key} split")
    if len(np.unique(nodes)) != len(nodes) or (labels[nodes] < 0).any():
        raise InputError(f"the {key} split has a node twice, or one without a label")
    return np.sort(nodes).astype(np.int32)


def _undirected(
    senders: np.ndarray, receivers: np.ndarray, num_nodes: int, is_directed: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Lists each undirected edge once, without self edges, with notes on what changed.

    Args:
      senders: [R].
      receivers: [R].
      num_nodes: N.
      is_directed: whether it is worth a note that an edge has one direction only.
    """
    for ends in (senders, receivers):
        check_nodes(ends, num_nodes, "edges")
    senders, receivers = senders.astype(np.int64), receivers.astype(np.int64)
    keys = np.minimum(senders, receivers) * num_nodes + np.maximum(senders, receivers)
    keys = 2 * keys + (senders > receivers)  # the last bit is the direction
    keys = keys[senders != receivers]
    directed = distinct(keys)
    num_self, num_repeated = len(senders) - len(keys), len(keys) - len(directed)
    keys = distinct(directed >> 1)
    num_both = len(directed) - len(keys)
    if not is_directed:
        num_repeated += num_both
    edges = np.stack(np.divmod(keys, num_nodes), axis=1).astype(np.int32)
    notes = []
    if num_self:
        notes.append(f"entries of self edges removed: {num_self}")
    if num_repeated:
        notes.append(f"repeated entries of edges removed: {num_repeated}")
    if is_directed and len(keys) > num_both:
        notes.append(
            "edges given in one direction, and used in both: "
            f"{len(keys) - num_both} of {len(keys)}"
        )
    return edges, tuple(notes)
