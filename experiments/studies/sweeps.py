"""Sweeps: studies run one after another, each in a folder of its own."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from experiments.studies.base import Study
from fedjax_graph.data import limits
from fedjax_graph.driver import lock, writers

StudyType = TypeVar("StudyType", bound=Study)


def run(
    folders: Mapping[str, StudyType],
    run_one: Callable[[StudyType, pathlib.Path], list[dict[str, Any]]],
    workdir: pathlib.Path,
) -> list[dict[str, Any]]:
    """Runs studies one after another, and writes `sweep.json` after each.

    Args:
      folders: name of a folder in `workdir` -> the study that is run there, whose
        command then names that folder.
      run_one: (study, its folder) -> rows for `sweep.json`.
      workdir: of the sweep.

    Returns:
      All rows.
    """
    rows = []
    keep = keeping(workdir / "sweep.json", len(folders))
    for number, (name, study) in enumerate(folders.items(), 1):
        folder = workdir / name
        folder.mkdir(exist_ok=True)
        own = dataclasses.replace(study, workdir=str(folder))
        with lock.locked(folder):  # or a part might be resumed beside the sweep
            rows += run_one(own, folder)
        keep(number, rows)
    return rows


def keeping(
    path: pathlib.Path, num_parts: int
) -> Callable[[int, list[dict[str, Any]]], None]:
    """Factory of what writes a sweep's rows after each part.

    A resumed sweep keeps the rows on record until it has as many, or has ended.

    Args:
      path: of the file in JSON.
      num_parts: of the sweep.

    Returns:
      (number of parts so far, their rows) -> None.
    """
    num_before = 0
    with contextlib.suppress(OSError, ValueError, TypeError):  # else none are kept
        num_before = len(limits.parse_json(path.read_text()))

    def keep(number: int, rows: list[dict[str, Any]]) -> None:
        if number == num_parts or len(rows) >= num_before:
            text = json.dumps(writers.to_jsonable(rows), indent=2)
            writers.write_atomically(path, text + "\n")

    return keep


def announce(workdir: pathlib.Path) -> None:
    """Prints what a sweep left, and where."""
    print(f"report.html, sweep.json and a folder of each run are in {workdir}")
