"""Lists the datasets, brings them here, and counts what is in them.

python -m experiments.datasets
python -m experiments.datasets --dataset=metr_la [--data_dir=FOLDER] [--json]
python -m experiments.datasets --dataset=metr_la --download
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from experiments import _flags
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import download
from fedjax_graph.data.graphs import datasets as citation
from fedjax_graph.data.graphs import formats as citation_formats
from fedjax_graph.data.graphs import node_dataset as node_graphs
from fedjax_graph.data.graphs import synthetic as synthetic_graphs
from fedjax_graph.data.images import datasets as images
from fedjax_graph.data.images import synthetic as synthetic_images
from fedjax_graph.data.traffic import datasets as traffic
from fedjax_graph.data.traffic import synthetic

_DOWNLOAD = flags.DEFINE_bool(
    "download", False, "Fetch the dataset from its public index into the cache folder."
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")


class Entry(NamedTuple):
    """What this binary needs to know of a dataset."""

    description: str
    load: Callable[[str, str | None], Any]  # (name, data_dir) -> dataset
    statistics: Callable[[Any], dict]
    locate: Callable[[str, str | None], Path | None]  # (name, data_dir) -> its file


def _traffic(description: str) -> Entry:
    return Entry(description, traffic.load, traffic.statistics, traffic.locate)


def _images(description: str) -> Entry:
    return Entry(description, images.load, images.statistics, images.locate)


def _nodes(description: str) -> Entry:
    return Entry(description, citation.load, node_graphs.statistics, citation.locate)


def _made(description: str, make: Callable[[], Any], statistics: Callable) -> Entry:
    return Entry(
        description,
        lambda name, data_dir: make(),
        statistics,
        lambda name, data_dir: Path("made on the spot"),
    )


DATASETS = {
    name: _traffic(published.description)
    for name, published in traffic.PUBLISHED.items()
}
DATASETS["synthetic"] = _made(
    "cell transmission model on a random road network, 20 sensors, 14 days",
    synthetic.traffic_network,
    traffic.statistics,
)
DATASETS["synthetic_large"] = _made(
    "the same at Amazon2M's size, dense features; needs 6 GiB",
    synthetic_graphs.large_node_graph,
    node_graphs.statistics,
)
DATASETS[images.CIFAR10] = _images(
    "CIFAR-10: 60000 photographs of 32 x 32 pixels, 10 classes"
)
DATASETS["synthetic_images"] = _made(
    "textured shapes before clutter, 3200 images of 32 x 32 pixels, 10 classes",
    synthetic_images.images,
    images.statistics,
)
DATASETS |= {
    name: _nodes(published.description)
    for name, published in citation.PUBLISHED.items()
}
DATASETS["synthetic_graph"] = _made(
    "stochastic block model with hubs and bags of words, 3000 nodes, 6 classes",
    synthetic_graphs.node_graph,
    node_graphs.statistics,
)


def _entry(name: str) -> Entry:
    if name.endswith(".npz"):
        return _npz_kind(name)("a user's own file")
    if name in DATASETS:
        return DATASETS[name]
    if citation.is_planetoid_folder(name):
        return _nodes("a user's own folder")
    if Path(name).is_dir() or name.endswith(".tar.gz"):
        return _images("a user's own folder or archive")
    raise InputError(
        f"unknown dataset {name!r}; known: {', '.join(DATASETS)}, or the path of a "
        ".npz file, of a folder or archive with the batches of CIFAR-10, or of a "
        "folder with Planetoid's files ind.NAME.*"
    )


def _npz_kind(path: str) -> Callable[[str], Entry]:
    if images.is_image_file(path):
        return _images
    return _nodes if citation_formats.is_node_file(path) else _traffic


def _listing(data_dir: str | None) -> list[dict]:
    rows = []
    for name, entry in DATASETS.items():
        path = entry.locate(name, data_dir)
        found = None if path is None else str(path)
        rows.append({"name": name, "path": found, "description": entry.description})
    return rows


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_statistics(statistics: dict) -> None:
    notes = statistics.pop("notes", [])
    _print_table([(key, _text(value)) for key, value in statistics.items()])
    for note in notes:
        print(f"note: {note}")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def main(argv: list[str]) -> None:
    del argv
    name, data_dir = _flags.DATASET.value, _flags.DATA_DIR.value
    if name is None:
        if _DOWNLOAD.value:
            raise InputError("--download needs --dataset=NAME")
        rows = _listing(data_dir)
        if _JSON.value:
            print(json.dumps(rows))
        else:
            _print_table(
                [tuple(v or "not found" for v in row.values()) for row in rows]
            )
        return
    name = citation.ALIASES.get(name, name)
    entry = _entry(name)
    if _DOWNLOAD.value:
        for path in download.fetch(name):
            print(f"{os.fspath(path)}: complete", file=sys.stderr)
    statistics = entry.statistics(entry.load(name, data_dir))
    if _JSON.value:
        print(json.dumps(statistics))
    else:
        _print_statistics(statistics)


if __name__ == "__main__":
    _flags.run(main)
