"""Sweeps: studies run one after another, each in a folder of its own."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from experiments.studies.base import Study
from fedjax_graph.core.errors import InputError
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
    for name, study in folders.items():
        folder = workdir / name
        folder.mkdir(exist_ok=True)
        own = dataclasses.replace(study, workdir=str(folder))
        with lock.locked(folder):  # or a part might be resumed beside the sweep
            rows += run_one(own, folder)
        text = json.dumps(writers.to_jsonable(rows), indent=2)
        writers.write_atomically(workdir / "sweep.json", text + "\n")
    return rows


def check_kind(workdir: pathlib.Path, *, is_sweep: bool) -> None:
    """Checks that a folder does not hold the other kind of output.

    Raises:
      InputError: if a sweep is to go where a single run lies, or the other way round.
    """
    if is_sweep and (workdir / "results.json").exists():
        raise InputError(f"--workdir={workdir} holds a single run, not a sweep")
    if not is_sweep and (workdir / "sweep.json").exists():
        raise InputError(f"--workdir={workdir} holds a sweep; name one of its folders")


def announce(workdir: pathlib.Path) -> None:
    """Prints what a sweep left, and where."""
    print(f"report.html, sweep.json and a folder of each run are in {workdir}")
