"""Curves of accuracy over the share of clients that misbehave, for several aggregators.

python -m experiments.robustness
python -m experiments.robustness --dataset=cora --attack=noise
python -m experiments.robustness --aggregators=weighted_mean,krum --fractions=0,0.4
python -m experiments.robustness --vary=straggler_rate --aggregators=weighted_mean

Each point is a run of FedAvg (`fl` of `experiments.graphfl`, whose flags these are) in
a folder of its own; `report.html`, `robustness.png`, `robustness.json` and a table sum
them up. A model that diverges is scored as it is.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

from experiments import cli, report
from experiments.studies import pictures, sweeps
from experiments.studies.graphfl import GraphFLStudy
from experiments.studies.graphfl_settings import GraphFLSettings
from experiments.studies.options import option, options_of
from experiments.studies.trust import NEEDS
from fedjax_graph.core.aggregators import AGGREGATORS, takes_tolerance
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.robust import TOLERANCE
from fedjax_graph.driver import plots, results

METHODS = ("fl",)
VARIED = {  # what of the clients misbehaves: what its share is called
    "byzantine_fraction": "share of the clients that attack",
    "dropout_rate": "share of a round's clients that send nothing",
    "straggler_rate": "share of a round's clients that are slow",
}
DECIDED = {  # options that `--help` shows with what they are here
    "methods": "FedAvg is what runs",
    "on_nan": "a model that diverges is scored as it is",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobustnessStudy(GraphFLSettings):
    """FedAvg on the nodes of a graph, aggregator by aggregator and share by share."""

    system: ClassVar[str] = "robustness"
    subject: ClassVar[str] = "Robustness"
    refused: ClassVar[Mapping[str, str]] = {
        "aggregator": "--aggregators names those to compare",
        "sweep": "--aggregators and --fractions are what is swept",
        "sweep_values": "--aggregators and --fractions are what is swept",
    }

    aggregators: tuple[str, ...] = option(tuple(AGGREGATORS), "Those to compare.")
    vary: str = option(
        "byzantine_fraction",
        "Of which flag --fractions has the values.",
        choices=list(VARIED),
    )
    fractions: tuple[str, ...] = option(
        ("0", "0.1", "0.2", "0.3", "0.4"), "Shares of the clients that misbehave."
    )

    @property
    def record_name(self) -> str:
        """See `FolderOptions.record_name`."""
        return "robustness.json"

    def run_loaded(self) -> list[dict[str, Any]]:
        """Runs all pairs, and writes a picture and a table; or only scores them.

        Returns:
          The rows of `robustness.json`.

        Raises:
          InputError: one line, where an option does not fit.
        """
        parts = self.parts()
        workdir = self.make_workdir(self.dataset or "synthetic")
        keep = sweeps.keeping(workdir / "robustness.json", len(parts))
        rows, conduct = [], {name: getattr(self, name) for name in self._dependent()}
        for (aggregator, fraction), study in parts.items():
            folder = workdir / f"{aggregator}-{fraction}"
            entry = dataclasses.replace(study, workdir=str(folder)).run_loaded()["fl"]
            rows.append(
                {
                    "aggregator": aggregator,
                    self.vary: float(fraction),
                    **conduct,
                    "accuracy": entry["test"]["accuracy"],
                    "std": (entry["test_std"] or {}).get("accuracy"),
                }
            )
            if not self.eval_only:
                keep(len(rows), rows)
        self.sum_up(workdir, rows)
        return rows

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`: those of a run of FedAvg, in a folder of its own."""
        one, workdir = next(iter(self.parts().values())), super().in_effect()["workdir"]
        return one.in_effect() | {"on_nan": one.on_nan, "workdir": workdir}

    def compiled_methods(self) -> tuple[str, ...]:
        """See `Study.compiled_methods`."""
        return METHODS

    def parts(self) -> dict[tuple[str, str], GraphFLStudy]:
        """The study of each pair of an aggregator and a fraction.

        Raises:
          InputError: if an option does not fit.
        """
        decided = self.refused | DECIDED | {self.vary: "--fractions has the shares"}
        for name, reason in decided.items():
            if self.is_given(name) and getattr(self, name) != METHODS:
                raise InputError(f"--{name}: {reason}")
        for aggregator in self.aggregators:
            if aggregator not in AGGREGATORS:
                known = ", ".join(AGGREGATORS)
                raise InputError(
                    f"--aggregators: unknown aggregator {aggregator!r}; known: {known}"
                )
        names = {field.name for field in dataclasses.fields(GraphFLStudy)}
        own = {name: getattr(self, name) for name in names}
        tolerant = list(filter(takes_tolerance, self.aggregators))
        if self.is_given("tolerance") and not tolerant:
            raise InputError("--tolerance: none of the --aggregators takes it")
        given = self.given & names - {*self._dependent(), "methods", "tolerance"}
        own |= {"given": given, "methods": METHODS, "on_nan": "ignore"}
        defaults = options_of(GraphFLStudy)
        honest = {name: defaults[name].default for name in self._dependent()}
        parts = {}
        for aggregator in self.aggregators:
            for text in self.fractions:
                pair = {"aggregator": aggregator, self.vary: _share(text)}
                conduct = {} if _share(text) else honest
                told = {} if aggregator in tolerant else {"tolerance": TOLERANCE}
                parts[aggregator, text] = GraphFLStudy(**own | pair | conduct | told)
        for study in parts.values():  # raises before a folder is made
            study.resolved().check()
            study.chosen_methods()
        return parts

    def _dependent(self) -> list[str]:
        """The options that change nothing where the share is 0."""
        return [name for name, needed in NEEDS.items() if needed == self.vary]

    def sum_up(self, workdir: pathlib.Path, rows: list[dict[str, Any]]) -> None:
        """Writes picture and report, unless runs are only scored; prints the table."""
        lines, table = {}, []
        for aggregator in self.aggregators:
            own = [row for row in rows if row["aggregator"] == aggregator]
            values = [row["accuracy"] for row in own]
            stds = [row["std"] or 0.0 for row in own]
            shares = [row[self.vary] for row in own]
            lines[aggregator] = plots.Line(shares, values, stds)
            table.append([aggregator, *(f"{value:.1f}" for value in values)])
        print(results.format_table(["accuracy %", *self.fractions], table))
        if self.eval_only:
            return
        titles = VARIED[self.vary], "test accuracy (%)"
        study, name = self.resolved(), self.dataset or "synthetic"
        attacks = self.vary == "byzantine_fraction" or self.byzantine_fraction
        said = self.attack if attacks else ""
        look = pictures.look(study, name, self.aggregators, {}, said)
        plots.curves(workdir / "robustness.png", lines, *titles, look)
        report.write_sweep(workdir, self.system, name, self.command(), rows)
        print(f"report.html, robustness.json and the runs are in {workdir}")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError as error:
        raise InputError(f"--fractions: {text!r} is no number") from error
    if not 0 <= share <= 1:
        raise InputError(f"--fractions: {text}: expected a number from 0 to 1")
    return share


def main() -> None:
    """Runs the study that the command line says."""
    cli.run_study(RobustnessStudy, __doc__)


if __name__ == "__main__":
    main()
