"""Lists the datasets, brings them here, and counts what is in them.

python -m experiments.datasets
python -m experiments.datasets --dataset=metr_la [--data_dir=FOLDER] [--json]
python -m experiments.datasets --dataset=metr_la --download
"""

import dataclasses
import json
import os
import sys
from typing import Any

from experiments import cli
from experiments.studies.options import option
from experiments.studies.surroundings import DataOptions
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import catalog, download


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetsStudy(DataOptions):
    """What is listed, fetched or counted."""

    download: bool = option(
        False, "Fetch the dataset from its public addresses into the cache folder."
    )
    json: bool = option(False, "Print one JSON object instead of a table.")

    def run_loaded(self) -> None:
        """Lists all datasets, or fetches and counts one.

        Raises:
          InputError: one line, where there is no such dataset or a file is broken.
        """
        if self.dataset is None:
            self._list()
            return
        catalog.find(self.dataset)
        if self.download:
            for path in download.fetch(catalog.resolve(self.dataset)):
                print(f"{os.fspath(path)}: complete", file=sys.stderr)
        statistics = catalog.statistics(catalog.load(self.dataset, self.data_dir))
        if self.json:
            print(json.dumps(statistics))
        else:
            _print_statistics(statistics)

    def _list(self) -> None:
        if self.download:
            raise InputError("--download needs --dataset=NAME")
        rows = _listing(self.data_dir)
        if self.json:
            print(json.dumps(rows))
            return
        _print_table([tuple(v or "not found" for v in row.values()) for row in rows])


def main() -> None:
    """Does what the command line asks for."""
    cli.run_study(DatasetsStudy, __doc__)


if __name__ == "__main__":
    main()
