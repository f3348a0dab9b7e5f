"""Lists the datasets, brings them here, and counts what is in them.

python -m experiments.datasets
python -m experiments.datasets --dataset=metr_la [--data_dir=FOLDER] [--json]
python -m experiments.datasets --dataset=metr_la --download
"""

import json
import os
import sys
from typing import Any

from absl import flags

from experiments import _flags
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import catalog, download

_DOWNLOAD = flags.DEFINE_bool(
    "download", False, "Fetch the dataset from its public index into the cache folder."
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")


def _listing(data_dir: str | None) -> list[dict]:
    rows = []
    for name, entry in catalog.DATASETS.items():
        path = entry.locate(name, data_dir) if entry.locate else "made on the spot"
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
    catalog.find(name)
    if _DOWNLOAD.value:
        for path in download.fetch(catalog.resolve(name)):
            print(f"{os.fspath(path)}: complete", file=sys.stderr)
    statistics = catalog.statistics(catalog.load(name, data_dir))
    if _JSON.value:
        print(json.dumps(statistics))
    else:
        _print_statistics(statistics)


if __name__ == "__main__":
    _flags.run(main)
