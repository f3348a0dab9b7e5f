"""A study's way from methods that run to what lies in its folder."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from experiments import report
from experiments.studies import earlier, running
from experiments.studies.base import Study
from experiments.studies.running import Entry
from fedjax_graph.driver import results

Outcome = TypeVar("Outcome")


class Record(Generic[Outcome]):
    """What is on record in a study's folder, and what is put on record now."""

    def __init__(
        self,
        study: Study,
        workdir: pathlib.Path,
        dataset: str,
        text: str,
        settings: Mapping[str, Any],
        checksum: int | None = None,
        also: Mapping[str, int] | None = None,
    ):
        """Prints what runs on what, and reads what is on record.

        Args:
          study: that runs.
          workdir: of the run.
          dataset: its name.
          text: says what runs on what.
          settings: of `results.json`, `notes` among them, but for command and flags.
          checksum: of the data; None where that is checked elsewhere.
          also: see `results.read_methods`.

        Raises:
          InputError: if what is on record cannot be read, or is of something else.
        """
        running.announce(study, text, settings["notes"], workdir)
        self._study, self._workdir, self._dataset = study, workdir, dataset
        self._before = results.read_methods(workdir, study.system, checksum, also)
        own = {"command": study.command(), "flags": study.record()}
        data = {} if checksum is None else {"data": checksum}
        self._settings = own | data | dict(also or {}) | dict(settings)

    def run(
        self,
        methods: Sequence[str],
        run_one: Callable[[str], tuple[Outcome, Entry]],
        table: Callable[[dict[str, Entry]], results.Table],
        draw: Callable[[dict[str, Outcome], dict[str, Entry]], None] | None = None,
        draw_each: Callable[[dict[str, Entry]], None] | None = None,
    ) -> dict[str, Entry]:
        """Runs or scores methods, and writes what came out, unless they are scored.

        Args:
          methods: names.
          run_one: see `running.run_all`.
          table: entries -> the table of the study.
          draw: what came out, and all entries on record -> pictures.
          draw_each: all entries on record -> pictures; after each method.

        Returns:
          The entries of `results.json` of these methods.

        Raises:
          compile_for.Compiled: with what was compiled instead, if the study says so.
        """
        if self._study.compile_for is not None:
            running.compile_all(methods, run_one)

        def write(entries: dict[str, Entry]) -> None:
            args = self._workdir, self._dataset, self._settings, entries
            results.write_results(*args)
            if draw_each:
                draw_each(entries)

        if not self._study.eval_only:
            earlier.note(self._study, self._before, methods)
        args = self._study, methods, run_one, self._before, write
        outcomes, entries = running.run_all(*args)
        print(table(entries))
        if self._study.eval_only:
            return entries
        on_record = self._before | entries
        if draw:
            draw(outcomes, on_record)
        report.write(self._workdir, self._study.system, table(on_record))
        print(f"report.html, results.json and pictures are in {self._workdir}")
        return entries
