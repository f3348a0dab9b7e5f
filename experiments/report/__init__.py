"""`report.html` of a run: one file that needs no network.

Settings, command and commit, the scores, the paper's tables with this run in them, the
pictures with captions, and what the keys of `results.json` mean.
"""

import base64
import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from experiments.report import captions, keys
from experiments.tables import runs, writing
from experiments.tables.papers import PAPERS, load_paper
from fedjax_graph.core.processes import by_first
from fedjax_graph.driver import writers
from fedjax_graph.driver.results import Table

NAME = "report.html"
OF_HARDWARE = ("device", "backend", "num_devices", "precision", "machine", "num_cpus")


class PaperTable(NamedTuple):
    """A table of the paper, its rows that this run has measured, and notes."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]


class Picture(NamedTuple):
    """A picture in the page."""

    name: str
    data: str  # base64
    caption: captions.Caption


@by_first
def write(workdir: pathlib.Path, system: str, table: Table) -> None:
    """Writes the report of a run that is done.

    Args:
      workdir: of the run, with `results.json` and the pictures.
      system: name of the binary, and of the paper.
      table: of the scores, as on the terminal.
    """
    found = json.loads((workdir / "results.json").read_text())
    settings = found["settings"]
    _render(
        workdir,
        title=f"{system}: {found['dataset']}",
        scored=settings.get("scored", "best round by the validation part"),
        system=system,
        dataset=found["dataset"],
        settings=settings,
        machine={key: settings["hardware"][key] for key in OF_HARDWARE},
        flags=_flags(system, settings["flags"]),
        scores=[table],
        papers=_paper_tables(workdir, system),
        methods=found["methods"],
        legend=keys.legend(found["methods"]),
    )


@by_first
def write_sweep(
    workdir: pathlib.Path,
    system: str,
    dataset: str,
    command: str,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Writes the report of a sweep; each of its runs has one of its own.

    Args:
      workdir: of the sweep.
      system: name of the binary.
      dataset: its name.
      command: that makes the sweep.
      rows: of `sweep.json`.
    """
    names = [key for key, x in rows[0].items() if not isinstance(x, dict | list)]
    cells = [[_text(row.get(name)) for name in names] for row in rows]
    _render(
        workdir,
        title=f"{system}: a sweep on {dataset}",
        system=system,
        dataset=dataset,
        settings={"command": command},
        scores=[Table(names, cells)],
        folders=sorted(path.parent.name for path in workdir.glob("*/results.json")),
    )


def _render(workdir: pathlib.Path, **values: Any) -> None:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("experiments.report"),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["text"] = _text
    page = environment.get_template("report.html").render(
        when=datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
        pictures=_pictures(workdir),
        **values,
    )
    writers.write_atomically(workdir / NAME, page)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return json.dumps(value, indent=2)
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


def _flags(system: str, flags: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Name and value of each flag, and whether it is not the default; those first."""
    defaults = runs.default_flags(system)
    found = [(name, x, x != defaults.get(name)) for name, x in flags.items()]
    return sorted(found, key=lambda flag: not flag[2])


def _paper_tables(workdir: pathlib.Path, system: str) -> list[PaperTable]:
    """The paper's tables that have a row which this run measured; none without one."""
    if system not in PAPERS:
        return []
    paper, run = load_paper(system), runs.read_run(workdir / "results.json", workdir)
    defaults, found = runs.default_flags(system), []
    for table in paper.tables:
        filled = writing.fill(paper, table, [run], defaults, allow_cut=True)
        lines = tuple(line for line in filled.lines if line.taken)
        if not lines:
            continue
        header, rows = writing.cells(filled._replace(lines=lines))
        notes = [table.note] if table.note else []
        notes += dict.fromkeys(_differences(line) for line in lines)
        found.append(
            PaperTable(
                filled.title,
                header[:-1],  # all rows are of this run
                [row[:-1] for row in rows],
                [note for note in notes if note],
            )
        )
    return found


def _differences(line: writing.Line) -> str:
    """What this run did otherwise than the paper's row."""
    cuts, flags = (
        ", ".join(texts) for texts in (line.taken.cuts, line.taken.deviations)
    )
    said = [
        f"The dataset is not the paper's in full: {cuts}." if cuts else "",
        f"Flags that are not the paper's: {flags}." if flags else "",
    ]
    return " ".join(filter(None, said))


def _pictures(workdir: pathlib.Path) -> list[Picture]:
    found = []
    for path in workdir.glob("*.png"):
        place, caption = captions.find(path.name)
        data = base64.b64encode(path.read_bytes()).decode()
        found.append((place, Picture(path.name, data, caption)))
    return [picture for _, picture in sorted(found, key=lambda x: (x[0], x[1].name))]
