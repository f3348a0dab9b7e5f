"""A small valid file, or folder, of every form that a loader reads."""

import collections
import gzip
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from fedjax_graph import data
from fedjax_graph.data.graphs import formats as graph_formats
from fedjax_graph.data.traffic import formats as traffic_formats
from fedjax_graph.data.traffic import hdf, largest
from fedjax_graph.driver import pretrained, results, writers
from fedjax_graph.driver.network import Network
from tests.data.graphs.toy_graph import EDGES, FEATURES, LABELS
from tests.data.images import toy_images
from tests.data.traffic import traffic_files

NUM_STEPS, NUM_SENSORS = traffic_files.SPEED.shape
IDS = tuple(map(str, traffic_files.IDS))


class Case(NamedTuple):
    """A file to damage, and what reads it then."""

    path: Path
    load: Callable[[], Any]


def make(folder: Path) -> dict[str, Case]:
    """Writes the files; each case is read without an error as it is."""
    folder.mkdir(exist_ok=True)
    makers = (_traffic, _largest, _graphs, _planetoid, _products, _images, _models)
    makers += (_records,)
    return {name: case for make in makers for name, case in make(folder).items()}


def _reads(reader: Callable[..., Any], path: Path, *args: Any) -> Case:
    return Case(path, lambda: reader(path, *args))


def _loads(path: Path, kind: str) -> Case:
    return Case(path, lambda: data.load(path, kind=kind))


def _traffic(folder: Path) -> dict[str, Case]:
    roads = folder / "roads.csv"
    roads.write_text("from,to,cost\n717447,773869,1.5\n773869,400001,2\n")
    ids = folder / "ids.txt"
    ids.write_text("\n".join(IDS))
    pems = folder / "pems.npz"
    np.savez_compressed(pems, data=traffic_files.SPEED[..., None])
    shape = (NUM_STEPS, NUM_SENSORS, 1)
    distances = folder / "distances.npz"
    traffic_files.write_npz(
        distances,
        remove=("adjacency", "timestamps_ns"),
        distance_from=np.array(traffic_files.IDS[:3]),
        distance_to=np.array(traffic_files.IDS[1:]),
        distance_cost=np.array([1.0, 2, 3]),
        start_ns=0,
        freq_ns=300 * 10**9,
        unit="mph",
    )
    own = traffic_files.write_npz(folder / "own.npz")
    table = traffic_files.write_h5(folder / "table.h5")
    csv = traffic_files.write_csv(folder / "table.csv")
    beside = traffic_files.write_csv(folder / "beside.csv")
    weights = folder / "beside_adjacency.csv"
    rows = [",".join(map(str, row)) for row in traffic_files.ADJACENCY.tolist()]
    rows = [f"{i},{row}" for i, row in zip(IDS, rows, strict=True)]
    weights.write_text("\n".join([",".join(["", *IDS]), *rows]))
    stamps = traffic_files.write_npz(
        folder / "stamps.npz",
        remove=("timestamps_ns",),
        timestamps=traffic_files.TIMESTAMPS.astype("M8[s]"),
        mask=traffic_files.SPEED > 0,
    )
    graph = traffic_files.write_graph(folder / "graph.pkl")
    return {
        "traffic_npz": _loads(own, "traffic"),
        "distances_npz": _loads(distances, "traffic"),
        "stamps_npz": _loads(stamps, "traffic"),
        "own_csv": _loads(beside, "traffic"),
        "own_weights": Case(weights, _loads(beside, "traffic").load),
        "hdf": _reads(hdf.read, table),
        "csv": _reads(traffic_formats.read_csv, csv),
        "sensor_graph": _reads(traffic_formats.read_graph_pickle, graph),
        "roads": _reads(traffic_formats.read_triples, roads),
        "ids": _reads(traffic_formats.read_ids, ids, NUM_SENSORS),
        "pems": _reads(traffic_formats.read_pems, pems, "2018-01-01", shape),
    }


def _largest(folder: Path) -> dict[str, Case]:
    table = traffic_files.write_h5(folder / "flows.h5", key="t")
    sensors = folder / "meta.csv"
    rows = [f"{sensor},34.5,-118.5,11,{i}" for i, sensor in enumerate(IDS)]
    sensors.write_text("\n".join(["ID,Lat,Lng,District,ID2", *rows, ""]))
    matrix = folder / "adjacency.npy"
    np.save(matrix, traffic_files.ADJACENCY)
    return {
        "largest_flows": _reads(largest.read_flows, table, IDS, NUM_STEPS),
        "largest_sensors": _reads(largest.read_sensors, sensors, [11]),
        "largest_adjacency": _reads(largest.read_adjacency, matrix, None, NUM_SENSORS),
    }


def _graphs(folder: Path) -> dict[str, Case]:
    features = scipy.sparse.csr_array(FEATURES)
    compact, benchmark = folder / "compact.npz", folder / "benchmark.npz"
    np.savez_compressed(
        compact,
        edges=EDGES,
        labels=LABELS,
        features=FEATURES,
        class_names=["a", "b", "c"],
        train_idx=[0, 1],
        val_idx=[2],
        test_idx=[3, 4],
    )
    size = len(LABELS)
    adjacency = scipy.sparse.csr_array(
        (np.ones(len(EDGES)), np.array(EDGES).T), shape=(size, size)
    )
    parts = {
        f"{name}_{part}": getattr(matrix, part)
        for name, matrix in (("adj", adjacency), ("attr", features))
        for part in ("data", "indices", "indptr", "shape")
    }
    np.savez(benchmark, labels=LABELS, **parts)
    geometric = folder / "geometric.npz"
    masks = {
        f"{name}_mask": np.arange(size) == i for i, name in enumerate(("train", "val"))
    }
    np.savez(geometric, edge_index=np.transpose(EDGES), x=FEATURES, y=LABELS, **masks)
    tables = folder / "tables"
    tables.mkdir(exist_ok=True)
    for name, rows in (("edges", EDGES), ("labels", LABELS), ("features", FEATURES)):
        np.savetxt(tables / f"{name}.csv", rows, "%d", delimiter=",")
    return {
        "compact_graph": _loads(compact, "graphs"),
        "benchmark_graph": _loads(benchmark, "graphs"),
        "geometric_graph": _loads(geometric, "graphs"),
        "edges_csv": Case(tables / "edges.csv", _loads(tables, "graphs").load),
        "features_csv": Case(tables / "features.csv", _loads(tables, "graphs").load),
    }


def _planetoid(folder: Path) -> dict[str, Case]:
    planetoid = folder / "planetoid"
    one_hot = np.eye(3, dtype=np.int32)[LABELS]
    neighbours = collections.defaultdict(list)
    for one, other in EDGES:
        neighbours[one].append(other)
        neighbours[other].append(one)
    content = {
        "allx": scipy.sparse.csr_matrix(FEATURES[:5]),
        "ally": one_hot[:5],
        "tx": scipy.sparse.csr_matrix(FEATURES[5:]),
        "ty": one_hot[5:],
        "y": one_hot[:2],
        "graph": neighbours,
    }
    planetoid.mkdir(exist_ok=True)
    (planetoid / "ind.toy.test.index").write_text("6\n5\n")
    for part, value in content.items():
        (planetoid / f"ind.toy.{part}").write_bytes(pickle.dumps(value, 2))
    load = _loads(planetoid, "graphs").load
    cases = {
        f"planetoid_{part}": Case(planetoid / f"ind.toy.{part}", load)
        for part in ("allx", "ally", "graph", "test.index")
    }
    dense = Path(shutil.copytree(planetoid, folder / "dense", dirs_exist_ok=True))
    for part, rows in (("allx", FEATURES[:5]), ("tx", FEATURES[5:])):
        features = np.array(rows, np.float16)
        (dense / f"ind.toy.{part}").write_bytes(pickle.dumps(features, 4))
    cases["planetoid_dense"] = Case(dense / "ind.toy.tx", _loads(dense, "graphs").load)
    return cases


def _products(folder: Path) -> dict[str, Case]:
    products = folder / "products"
    tables = {
        "raw/edge": EDGES,
        "raw/node-feat": FEATURES,
        "raw/node-label": [[label] for label in LABELS],
        "raw/num-node-list": [[len(LABELS)]],
        "split/sales_ranking/train": [[0], [1]],
        "split/sales_ranking/valid": [[2]],
        "split/sales_ranking/test": [[3]],
    }
    for name, rows in tables.items():
        path = products / f"{name}.csv.gz"
        path.parent.mkdir(exist_ok=True, parents=True)
        text = "".join(",".join(map(str, row)) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    load = _reads(graph_formats.read_products, products).load
    return {
        f"products_{name}": Case(products / "raw" / f"{name}.csv.gz", load)
        for name in ("edge", "node-feat", "num-node-list")
    }


def _of_no_time(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """So that the same case is the same bytes again."""
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _images(folder: Path) -> dict[str, Case]:
    own = folder / "images.npz"
    np.savez_compressed(own, **toy_images.arrays(), class_names=["a", "b"])
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(exist_ok=True)
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    content = {
        **dict.fromkeys([f"data_batch_{i}" for i in range(1, 6)]),
        "test_batch": None,
        "batches.meta": {b"label_names": [b"a"] * 10},
    }
    for name, value in content.items():
        batch = value or {b"data": pixels, b"labels": [3, 7]}
        (batches / name).write_bytes(pickle.dumps(batch, 2))
    archive = folder / "cifar-10-python.tar.gz"
    with (
        gzip.GzipFile(archive, "wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as file,
    ):
        file.add(batches, batches.name, filter=_of_no_time)
    return {
        "images_npz": _loads(own, "images"),
        "cifar_batch": Case(batches / "data_batch_1", _loads(batches, "images").load),
        "cifar_meta": Case(batches / "batches.meta", _loads(batches, "images").load),
        "cifar_archive": _loads(archive, "images"),
    }


def _models(folder: Path) -> dict[str, Case]:
    """A pretrained model of the package, and the network of a run."""
    paths = [pretrained.FOLDER / f"{name}.npz" for name in pretrained.names()]
    smallest = min(paths, key=lambda path: path.stat().st_size)
    model = Path(shutil.copy(smallest, folder / "model.npz"))
    network = folder / "network.npz"
    with np.load(model) as kept:
        arrays = {
            key.removeprefix(pretrained.NETWORK): x
            for key, x in kept.items()
            if key.startswith(pretrained.NETWORK)
        }
    np.savez_compressed(network, **arrays)
    return {
        "pretrained": Case(model, lambda: pretrained.read(str(model))),
        "network": _reads(Network.read, network),
    }


def _records(folder: Path) -> dict[str, Case]:
    """What a run writes and reads again when it goes on."""
    written, lines = folder / "results.json", folder / "metrics.jsonl"
    entry = {"test": {"rmse": 1.5}, "test_std": None, "best_round": 2}
    settings = {"command": "python -m experiments.sfl --seed=1", "data": 5}
    content = {"dataset": "toy", "settings": settings, "methods": {"sfl": entry}}
    written.write_text(json.dumps(content, indent=2))
    records = [{"method": "sfl", "round": i, "train_loss": 0.5} for i in range(5)]
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "results": Case(written, lambda: results.read_methods(folder, "sfl", 5)),
        "metrics": Case(lines, lambda: writers.read_records(lines)),
    }
