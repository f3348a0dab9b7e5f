"""The papers' tables: their figures, and how runs that measured the same are known."""

import importlib
from typing import Any, NamedTuple

PAPERS = ("cnfgnn", "sfl", "graphfl", "fl_agcns")

Value = float | tuple[float, float] | None  # mean, or mean and deviation; None: none


class Metric(NamedTuple):
    """A figure of a run, and where its entry in `results.json` has it.

    A path is of keys, joined by dots, in the method's entry, or from `settings.` on in
    the run's settings.
    """

    title: str  # with the unit
    paths: tuple[str, ...]  # several are added
    digits: int  # after the point
    scale: float = 1.0  # from the unit of the entry to that of the paper
    spread: str | None = None  # path of ±, or of the values of all seeds


class Row(NamedTuple):
    """A line of a table."""

    labels: tuple[str, ...]  # one for each of `Table.columns`
    dataset: str  # a name of `Paper.datasets`
    method: str | None  # its name in `results.json`; None: the paper only quotes it
    values: tuple[Value, ...]  # of the paper, one for each of `Table.metrics`
    flags: dict[str, Any] = {}  # of the run, as on its command line; None: the default
    config: dict[str, Any] = {}  # fields that the method's config must have


class Table(NamedTuple):
    number: int
    title: str
    columns: tuple[str, ...]  # titles of the labels; the dataset comes after them
    metrics: tuple[Metric, ...]
    rows: tuple[Row, ...]
    note: str = ""
    sweep: str | None = None  # a flag of the rows that the binary sweeps in one command


class Dataset(NamedTuple):
    """A dataset as a paper has it."""

    title: str
    sizes: dict[str, int]  # settings of a run that has it in full
    parts: tuple[str, ...] = ()  # names of datasets that are cuts of it


class Paper(NamedTuple):
    title: str
    datasets: dict[str, Dataset]
    tables: tuple[Table, ...]
    options: dict[str, Any] = {}  # flags of all command lines; runs may have others


def of_test(title: str, key: str, digits: int, spread: str | None = None) -> Metric:
    """A figure of the entry's `test`; ± is over seeds, or what `spread` has."""
    return Metric(title, (f"test.{key}",), digits, spread=spread or f"test_std.{key}")


def load_paper(name: str) -> Paper:
    """Loads the tables of one of `PAPERS`."""
    return importlib.import_module(f"{__name__}.{name}").PAPER
