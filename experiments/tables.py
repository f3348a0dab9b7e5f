"""Puts the figures of finished runs beside those of a paper's tables.

python -m experiments.tables --paper=cnfgnn --runs=FOLDER --out=FOLDER
python -m experiments.tables --paper=sfl --table=2 --runs=runs --out=tables --allow_cut
python -m experiments.tables --paper=graphfl --commands
python -m experiments.tables --paper=fl_agcns --write_flagfiles=experiments/flagfiles

A run counts where its dataset is that of the paper in full. Of several runs that is the
one with the fewest flags that are not the row's, and of those the newest; what a run
did otherwise, and where it lies, stands below the table.
"""

import csv
import datetime
import importlib
import io
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import _flags
from experiments._table_runs import (
    Candidate,
    Run,
    default_flags,
    find,
    flag_text,
    read_runs,
)
from experiments.paper_tables import Paper, Row, Table, Value
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import plots, writers

PAPERS = ("cnfgnn", "sfl", "graphfl", "fl_agcns")

PAPER = flags.DEFINE_enum("paper", None, PAPERS, "Whose tables.")
TABLE = flags.DEFINE_integer("table", None, "Its number; by default all tables.")
RUNS = flags.DEFINE_string("runs", None, "Folder with runs, however deep.")
OUT = flags.DEFINE_string("out", None, "Folder for Markdown, CSV and PNG.")
ALLOW_CUT = flags.DEFINE_bool(
    "allow_cut",
    False,
    "Where no run has the dataset in full, take one of a part of it, and say so.",
)
COMMANDS = flags.DEFINE_bool(
    "commands", False, "Print the command of each row instead."
)
WRITE_FLAGFILES = flags.DEFINE_string(
    "write_flagfiles",
    None,
    "Write into a folder of the paper's name in this one the flagfiles that fill all "
    "tables instead: one for all rows that differ in the method alone.",
)

NOT_RUN, MISSING = "not run", "not in the run"
ROW_HEIGHT, CHARACTER_WIDTH = 0.24, 0.075  # of pictures, inches
TABLE_FONT = 8  # points


# --- Tables --------------------------------------------------------------------------


class Line(NamedTuple):
    """A row, and what fills it."""

    row: Row
    taken: Candidate | None
    mark: int | None  # of the run, below the table


class Filled(NamedTuple):
    """A table with the runs in it."""

    paper: Paper
    table: Table
    lines: tuple[Line, ...]
    marks: dict[str, int]  # what is said of the runs
    num_refused: int  # rows that only a cut dataset would fill

    @property
    def title(self) -> str:
        return f"{self.paper.title}, Table {self.table.number}: {self.table.title}"

    @property
    def notes(self) -> list[str]:
        """Lines below the table."""
        marked = [f"[{mark}] {text}" for text, mark in self.marks.items()]
        notes = ([self.table.note] if self.table.note else []) + marked
        if self.num_refused:
            notes.append(
                "Rows that have runs of a cut dataset only, which --allow_cut shows: "
                f"{self.num_refused}."
            )
        return notes


def fill(
    paper: Paper,
    table: Table,
    runs: Sequence[Run],
    defaults: Mapping[str, Any],
    allow_cut: bool,
) -> Filled:
    """A table with the runs that fill it."""
    lines, marks, num_refused = [], {}, 0
    for row in table.rows:
        taken, mark = find(row, table, paper, runs, defaults), None
        if taken and taken.cuts and not allow_cut:
            taken, num_refused = None, num_refused + 1
        if taken:
            mark = marks.setdefault(about(taken, row), len(marks) + 1)
        lines.append(Line(row, taken, mark))
    return Filled(paper, table, tuple(lines), marks, num_refused)


def num_seeds(taken: Candidate, row: Row) -> int:
    """Seeds, trainings or draws of labels that ours is the mean of."""
    return len(taken.run.methods[row.method].get("best_round_by_seed") or [0])


def about(taken: Candidate, row: Row) -> str:
    """Where a run lies and what must be known of it."""
    number = num_seeds(taken, row)
    day = datetime.date.fromtimestamp(taken.run.time)
    said = [f"{taken.run.folder}: {number} seed{'s' * (number > 1)}, of {day}"]
    if taken.cuts:
        said.append(f"CUT DATASET {taken.run.dataset}: {', '.join(taken.cuts)}")
    if taken.deviations:
        said.append(f"flags that are not the defaults: {', '.join(taken.deviations)}")
    return "; ".join(said)


def cells(filled: Filled) -> tuple[list[str], list[list[str]]]:
    """Header and rows, as text."""
    metrics = filled.table.metrics
    header = [*filled.table.columns, "dataset"]
    for metric in metrics:
        header += [f"{metric.title}: paper", "ours", "difference"]
    rows = []
    for row, taken, mark in filled.lines:
        texts = [*row.labels, filled.paper.datasets[row.dataset].title]
        ours = taken.ours if taken else [None] * len(metrics)
        for metric, theirs, own in zip(metrics, row.values, ours, strict=True):
            absent = "" if theirs is None else MISSING if taken else NOT_RUN
            gap = difference(theirs, own)
            texts += [
                number_text(theirs, metric.digits),
                absent if own is None else number_text(own, metric.digits),
                "" if gap is None else f"{gap:+.{metric.digits}f}",
            ]
        data = ("cut" if taken.cuts else "in full") if taken else ""
        rows.append([*texts, data, f"[{mark}]" if taken else ""])
    return [*header, "data", "run"], rows


def split_value(value: Value) -> tuple[float | None, float | None]:
    """Mean and deviation."""
    return value if isinstance(value, tuple) else (value, None)


def difference(theirs: Value, own: Value) -> float | None:
    """Ours less the paper's."""
    (paper, _), (ours, _) = split_value(theirs), split_value(own)
    return None if paper is None or ours is None else ours - paper


def number_text(value: Value, digits: int) -> str:
    """`11.49`, `11.49 ± 0.02`, or nothing."""
    known = [x for x in split_value(value) if x is not None]
    return " ± ".join(f"{x:.{digits}f}" for x in known)


def markdown(filled: Filled) -> str:
    header, rows = cells(filled)
    lines = [header, ["---"] * len(header), *rows]
    table = [f"| {' | '.join(line)} |" for line in lines]
    notes = [text for note in filled.notes for text in ("", note)]
    return "\n".join([f"## {filled.title}", "", *table, *notes]) + "\n"


def csv_text(filled: Filled) -> str:
    """A line for each figure, unrounded."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [*filled.table.columns, "dataset", "figure", "paper", "paper ±", "ours"]
        + ["ours ±", "difference", "seeds", "data", "run", "about"]
    )
    for row, taken, _ in filled.lines:
        ours = taken.ours if taken else [None] * len(row.values)
        known = [NOT_RUN, "", "", ""]
        if taken:
            data = "cut" if taken.cuts else "in full"
            number = num_seeds(taken, row)
            known = [number, data, taken.run.folder, about(taken, row)]
        for metric, theirs, own in zip(
            filled.table.metrics, row.values, ours, strict=True
        ):
            writer.writerow(
                [*row.labels, filled.paper.datasets[row.dataset].title, metric.title]
                + [*split_value(theirs), *split_value(own), difference(theirs, own)]
                + known
            )
    return text.getvalue()


def picture(filled: Filled) -> Figure:
    """The table as it stands in Markdown; rows without a run in grey."""
    header, rows = cells(filled)
    header = ["\n".join(textwrap.wrap(text, 18)) for text in header]
    widths = [
        1 + max(len(line) for text in column for line in text.split("\n"))
        for column in zip(header, *rows, strict=True)
    ]
    width = CHARACTER_WIDTH * sum(widths)
    notes = [
        line
        for note in filled.notes
        for line in textwrap.wrap(note, int(width / CHARACTER_WIDTH))
    ]
    num_lines = max(text.count("\n") for text in header) + 1
    heights = [0.7 * num_lines + 0.3, *[1.0] * len(rows)]
    height, below = ROW_HEIGHT * sum(heights), 0.7 * ROW_HEIGHT * (len(notes) + 1)
    total = height + below + ROW_HEIGHT
    figure = Figure(figsize=(width, total), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.01, below / total, 0.98, height / total))
    axes.set_axis_off()
    axes.set_title(filled.title, loc="left", fontsize=plots.FONT_SIZE)
    drawn = axes.table(
        rows,
        colLabels=header,
        colWidths=[w / sum(widths) for w in widths],
        bbox=(0, 0, 1, 1),
        edges="horizontal",
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(TABLE_FONT)
    num_labels = len(filled.table.columns) + 1
    for (i, j), cell in drawn.get_celld().items():
        cell.set_edgecolor("#DDDDDD")
        cell.set_height(heights[i])
        cell.get_text().set_horizontalalignment("left" if j < num_labels else "right")
        if i and filled.lines[i - 1].taken is None:
            cell.get_text().set_color("#888888")
    figure.text(
        0.01,
        0.5 * below / total,
        "\n".join(notes),
        fontsize=TABLE_FONT,
        verticalalignment="center",
        parse_math=False,
    )
    return figure


def write(filled: Filled, folder: pathlib.Path, name: str) -> None:
    """Writes `NAME_table_N` as Markdown, CSV and PNG."""
    path = folder / f"{name}_table_{filled.table.number}"
    writers.write_atomically(path.with_suffix(".md"), markdown(filled))
    writers.write_atomically(path.with_suffix(".csv"), csv_text(filled))
    plots.save(picture(filled), path.with_suffix(".png"))


# --- Commands and flagfiles ----------------------------------------------------------


def row_flags(row: Row) -> dict[str, Any]:
    """Flags of a row's run that are not the defaults."""
    given = {name: value for name, value in row.flags.items() if value is not None}
    return {"dataset": row.dataset} | given


def commands(name: str, paper: Paper, tables: Iterable[Table]) -> str:
    """A comment and a command for each row."""
    lines = []
    for table in tables:
        for row in table.rows:
            lines.append(f"# {row_title(paper, table, row)}")
            if row.method is None:
                lines.append("# quoted by the paper")
                continue
            given = row_flags(row) | paper.options | {"methods": row.method}
            texts = [f"--{flag_text(*item)}" for item in given.items()]
            lines.append(f"python -m experiments.{name} {' '.join(texts)}")
    return "\n".join(lines)


def row_title(paper: Paper, table: Table, row: Row) -> str:
    dataset = paper.datasets[row.dataset].title
    return f"Table {table.number}: {', '.join((*row.labels, dataset))}"


def flagfiles(name: str, paper: Paper) -> dict[str, str]:
    """Contents by file name; rows that differ in the method alone share a file.

    So do those that differ in the flag that their table sweeps.
    """
    methods, swept, numbers = {}, {}, {}
    for table in paper.tables:
        for row in table.rows:
            if row.method is None:
                continue
            given = row_flags(row)
            if table.sweep:
                value, given["sweep"] = given.pop(table.sweep), table.sweep
            key = tuple(given.items())
            methods.setdefault(key, {})[row.method] = None
            numbers.setdefault(key, {})[str(table.number)] = None
            if table.sweep:
                swept.setdefault(key, {})[value] = None
    files = {}
    for key, chosen in methods.items():
        given = dict(key) | paper.options | {"methods": list(chosen)}
        if key in swept:
            given["sweep_values"] = list(swept[key])
        (_, dataset), *others = key
        stem = "_".join([dataset, *(f"{flag}_{value}" for flag, value in others)])
        tables = f"Table{'s' * (len(numbers[key]) > 1)} {', '.join(numbers[key])}"
        flag = "--write_flagfiles=experiments/flagfiles"
        files[f"{stem}.flags"] = "\n".join(
            [
                f"# {paper.title}, {tables}. Written by",
                f"# `python -m experiments.tables --paper={name} {flag}`.",
                *(f"--{flag_text(*item)}" for item in given.items()),
                "",
            ]
        )
    return files


# --- The binary ----------------------------------------------------------------------


def load_paper(name: str) -> Paper:
    return importlib.import_module(f"experiments.paper_tables.{name}").PAPER


def chosen_tables(paper: Paper) -> tuple[Table, ...]:
    """The tables that the flags name.

    Raises:
      InputError: if there is no such table.
    """
    if TABLE.value is None:
        return paper.tables
    chosen = tuple(table for table in paper.tables if table.number == TABLE.value)
    if not chosen:
        known = ", ".join(str(table.number) for table in paper.tables)
        raise InputError(
            f"--table={TABLE.value}: {paper.title} has no such table of results; "
            f"known: {known}"
        )
    return chosen


def make_folder(flag: flags.FlagHolder, *parts: str) -> pathlib.Path:
    """The folder that a flag names.

    Raises:
      InputError: if it cannot be made.
    """
    folder = pathlib.Path(flag.value, *parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--{flag.name}={flag.value} cannot be made ({error.strerror}); name "
            "another folder"
        ) from error
    return folder


def main(argv: list[str]) -> None:
    del argv
    name = PAPER.value
    if name is None:
        raise InputError(f"--paper is needed; known: {', '.join(PAPERS)}")
    paper = load_paper(name)
    tables = chosen_tables(paper)
    if COMMANDS.value:
        print(commands(name, paper, tables))
        return
    if WRITE_FLAGFILES.value:
        folder = make_folder(WRITE_FLAGFILES, name)
        for file, text in flagfiles(name, paper).items():
            writers.write_atomically(folder / file, text)
        print(f"flagfiles are in {folder}")
        return
    if RUNS.value is None or OUT.value is None:
        raise InputError("--runs and --out are needed: folders of runs and for tables")
    runs = read_runs(pathlib.Path(RUNS.value))
    folder = make_folder(OUT)
    defaults = default_flags(name)
    for table in tables:
        filled = fill(paper, table, runs, defaults, ALLOW_CUT.value)
        write(filled, folder, name)
        print(markdown(filled))
    print(f"Markdown, CSV and PNG are in {folder}")


if __name__ == "__main__":
    _flags.run(main)
