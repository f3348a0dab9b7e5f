"""Puts the figures of finished runs beside those of a paper's tables.

python -m experiments.tables --paper=cnfgnn --runs=FOLDER --out=FOLDER
python -m experiments.tables --paper=sfl --table=2 --runs=runs --out=tables --allow_cut
python -m experiments.tables --paper=graphfl --commands
python -m experiments.tables --paper=fl_agcns --write_flagfiles=experiments/flagfiles

A run counts where its dataset is that of the paper in full. Of several runs that is the
one with the fewest flags that are not the row's, and of those the newest; what a run
did otherwise, and where it lies, stands below the table.
"""

import dataclasses
import pathlib

from experiments import cli
from experiments.studies.folders import make_folder
from experiments.studies.options import Options, option
from experiments.tables import commands, writing
from experiments.tables.papers import PAPERS, Paper, Table, load_paper
from experiments.tables.runs import default_flags, read_runs
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import writers


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesStudy(Options):
    """What is written: tables of finished runs, commands, or flagfiles."""

    paper: str | None = option(None, "Whose tables.", choices=PAPERS)
    table: int | None = option(None, "Its number; by default all tables.")
    runs: str | None = option(None, "Folder with runs, however deep.")
    out: str | None = option(None, "Folder for Markdown, CSV and PNG.")
    allow_cut: bool = option(
        False,
        "Where no run has the dataset in full, take one of a part of it, and say so.",
    )
    commands: bool = option(False, "Print the command of each row instead.")
    write_flagfiles: str | None = option(
        None,
        "Write into a folder of the paper's name in this one the flagfiles that fill "
        "all tables instead: one for all rows that differ in the method alone.",
    )

    def run(self) -> None:
        """Does all that the binary does.

        Raises:
          InputError: one line, where a setting or a file does not fit.
        """
        if self.paper is None:
            raise InputError(f"--paper is needed; known: {', '.join(PAPERS)}")
        paper = load_paper(self.paper)
        tables = self._chosen(paper)
        if self.write_flagfiles and (self.table is not None or self.commands):
            raise InputError(
                "--write_flagfiles is of all tables, without --table and --commands"
            )
        if self.commands:
            print(commands.commands(self.paper, paper, tables))
            return
        if self.write_flagfiles:
            folder = pathlib.Path(self.write_flagfiles, self.paper)
            make_folder("write_flagfiles", folder)
            for file, text in commands.flagfiles(self.paper, paper).items():
                writers.write_atomically(folder / file, text)
            print(f"flagfiles are in {folder}")
            return
        if self.runs is None or self.out is None:
            raise InputError(
                "--runs and --out are needed: folders of runs and for tables"
            )
        runs = read_runs(pathlib.Path(self.runs), self.paper)
        folder = pathlib.Path(self.out)
        make_folder("out", folder)
        defaults = default_flags(self.paper)
        for table in tables:
            filled = writing.fill(paper, table, runs, defaults, self.allow_cut)
            writing.write(filled, folder, self.paper)
            print(writing.markdown(filled))
        print(f"Markdown, CSV and PNG are in {folder}")

    def _chosen(self, paper: Paper) -> tuple[Table, ...]:
        if self.table is None:
            return paper.tables
        chosen = tuple(table for table in paper.tables if table.number == self.table)
        if not chosen:
            known = ", ".join(str(table.number) for table in paper.tables)
            raise InputError(
                f"--table={self.table}: {paper.title} has no such table of results; "
                f"known: {known}"
            )
        return chosen


def main() -> None:
    """Writes what the command line asks for."""
    cli.run_study(TablesStudy, __doc__)


if __name__ == "__main__":
    main()
