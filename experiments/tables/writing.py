"""A paper's table with the runs that fill it, as Markdown, CSV and PNG."""

import csv
import datetime
import io
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.tables.papers import Paper, Row, Table, Value
from experiments.tables.runs import Candidate, Run, find
from fedjax_graph.driver import plots, writers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_RUN, MISSING = "not run", "not in the run"
ROW_HEIGHT, CHARACTER_WIDTH = 0.24, 0.075  # of pictures, inches
TABLE_FONT = 8  # points


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


def picture(filled: Filled) -> "Figure":
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
    figure = plots.new_figure((width, total))
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
