"""Finished runs, and which of them measured what a row of a paper's table is of."""

import importlib
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.studies import options
from experiments.studies.earlier import NOT_COMPARED
from experiments.tables.papers import Metric, Paper, Row, Table, Value
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import limits
from fedjax_graph.driver.results import settings_of, system_of

STUDIES = {
    "cnfgnn": "experiments.studies.cnfgnn:CNFGNNStudy",
    "sfl": "experiments.studies.sfl:SFLStudy",
    "graphfl": "experiments.studies.graphfl:GraphFLStudy",
    "fl_agcns": "experiments.studies.fl_agcns:FLAGCNSStudy",
    "subgraphs": "experiments.studies.subgraphs:SubgraphStudy",
}


# --- Runs ----------------------------------------------------------------------------


class Run(NamedTuple):
    """A `results.json`."""

    folder: str
    time: float  # of the file, seconds
    dataset: str
    settings: dict[str, Any]
    methods: dict[str, dict[str, Any]]

    def of(self, method: str) -> "Run":
        """The run with the settings of the command that put a method on record."""
        own = settings_of(self.settings, self.methods[method])
        return self if own == self.settings else self._replace(settings=own)

    @property
    def setting(self) -> dict[str, Any]:
        """What the run made of its flags, or its sweep, where it says so."""
        return self.settings.get("setting", {})


def read_runs(folder: pathlib.Path, system: str) -> list[Run]:
    """All runs in a folder that a binary made, or that do not say which one did.

    Raises:
      InputError: if there is no such folder, or a file in it is not of a run.
    """
    if not folder.is_dir():
        raise InputError(f"--runs={folder} is not a folder; name one that holds runs")
    found = [read_run(path, folder) for path in sorted(folder.rglob("results.json"))]
    return [run for run in found if system_of(run.settings) in (None, system)]


def read_run(path: pathlib.Path, folder: pathlib.Path) -> Run:
    """One run, named by its index in `folder`."""
    try:
        found = limits.parse_json(path.read_text())
        run = Run(
            str(path.parent.relative_to(folder)),
            path.stat().st_mtime,
            found["dataset"],
            found["settings"],
            found["methods"],
        )
        is_run = (
            isinstance(run.settings["flags"], dict)
            and isinstance(run.setting, dict)
            and all(isinstance(entry["test"], dict) for entry in run.methods.values())
            and all(
                isinstance(entry.get("flags", {}), dict)
                for entry in run.methods.values()
            )
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_run = False
    if not is_run:
        raise InputError(
            f"{path}: expected the results of a run, cannot read them; repair it, or "
            "move it out of --runs"
        )
    return run


def default_flags(system: str) -> dict[str, Any]:
    """Values of the flags of a binary where none is given."""
    module, name = STUDIES[system].split(":")
    return options.defaults_of(getattr(importlib.import_module(module), name))


# --- What fills a row ----------------------------------------------------------------


class Candidate(NamedTuple):
    """A run that measured what a row is of."""

    run: Run
    cuts: tuple[str, ...]  # where its dataset is not the paper's
    deviations: tuple[str, ...]  # its flags that are not the row's
    ours: tuple[Value, ...]  # one for each metric

    def rank(self, row: Row):
        """Returns the sort key by which the best run for a row is chosen.

        Full data first, then complete, closest to its command, newest.
        """
        known = [
            ours is not None
            for ours, paper in zip(self.ours, row.values, strict=True)
            if paper is not None
        ]
        in_full, as_asked = not self.cuts, -len(self.deviations)
        return in_full, all(known), as_asked, self.run.time, self.run.folder


def find(
    row: Row,
    table: Table,
    paper: Paper,
    runs: Iterable[Run],
    defaults: Mapping[str, Any],
) -> Candidate | None:
    """The run that fills a row, be it of a cut dataset, or None."""
    candidates = [
        candidate
        for run in runs
        if (candidate := match(row, table, paper, run, defaults)) is not None
    ]
    return max(candidates, key=lambda c: c.rank(row), default=None)


def match(
    row: Row, table: Table, paper: Paper, run: Run, defaults: Mapping[str, Any]
) -> Candidate | None:
    """A run as one that fills a row; None where it is of something else."""
    entry = run.methods.get(row.method)
    if entry is None or run.dataset not in (
        row.dataset,
        *paper.datasets[row.dataset].parts,
    ):
        return None
    run = run.of(row.method)
    expected = expected_flags(row, defaults)
    chosen = defaults | run.settings["flags"] | run.setting
    config = entry.get("config", {})
    config = config | config.get("task", {})
    if any(chosen.get(name) != value for name, value in expected.items()) or any(
        config_field(config, name) != value for name, value in row.config.items()
    ):
        return None
    view = entry | {"settings": run.settings}
    ours = tuple(measured(metric, view) for metric in table.metrics)
    if all(value is None for value in ours):
        return None
    return Candidate(
        run, cuts(row, paper, run), deviations(row, paper, run, defaults), ours
    )


def config_field(config: Mapping[str, Any], name: str) -> Any:
    """A field of a method's config or else of its task's; None if neither has it."""
    task = config.get("task") or {}
    return config[name] if name in config else task.get(name)


def expected_flags(row: Row, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Flags that a row's run must have."""
    return {
        name: defaults.get(name) if value is None else value
        for name, value in row.flags.items()
    }


def cuts(row: Row, paper: Paper, run: Run) -> tuple[str, ...]:
    """Where a run's dataset is not the paper's in full."""
    return tuple(
        f"{name} is {run.settings.get(name, 'unknown')}, not {size}"
        for name, size in paper.datasets[row.dataset].sizes.items()
        if run.settings.get(name) != size
    )


def deviations(
    row: Row, paper: Paper, run: Run, defaults: Mapping[str, Any]
) -> tuple[str, ...]:
    """Flags of a run that are neither the defaults nor of the row's command."""
    given = defaults | run.settings["flags"]
    if swept := given.get("sweep"):
        given[swept] = run.setting.get(swept)
    passed_over = (*NOT_COMPARED, *row.flags)
    own = paper.options | {"dataset": row.dataset}
    told = tuple(
        flag_text(name, value)
        for name, value in given.items()
        if name not in passed_over and value not in (defaults.get(name), own.get(name))
    )
    dataset = str(given.get("dataset"))
    is_file = pathlib.Path(dataset).suffix or pathlib.Path(dataset).name != dataset
    if is_file and dataset != row.flags.get("dataset"):  # whose defaults are not those
        told += (flag_text("dataset", dataset),)
    return told


def measured(metric: Metric, view: Mapping[str, Any]) -> Value:
    """A figure of a run; with ± where the run has one."""
    parts = [leaf(view, path) for path in metric.paths]
    if not all(isinstance(part, int | float) for part in parts):
        return None
    mean = metric.scale * sum(parts)
    spread = None if metric.spread is None else leaf(view, metric.spread)
    if isinstance(spread, list):
        spread = np.std(spread, ddof=1) if len(spread) > 1 else None
    return mean if spread is None else (mean, metric.scale * float(spread))


def leaf(tree: Any, path: str) -> Any:
    """What stands at a path of keys joined by dots; None if nothing does."""
    for key in path.split("."):
        if not isinstance(tree, dict):
            return None
        tree = tree.get(key)
    return tree


def flag_text(name: str, value: Any) -> str:
    """As on a command line, without the dashes."""
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return f"{name}={value}"
