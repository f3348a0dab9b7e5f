"""GraphFL against individual and federated learning of node labels."""

import dataclasses
import math
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments import report
from experiments.studies import (
    graphfl_methods,
    graphfl_sweeps,
    pictures,
    running,
    sweeps,
)
from experiments.studies.graphfl_settings import GraphFLSettings
from experiments.studies.node_problem import (
    Problem,
    fingerprint,
    load_dataset,
    make_problem,
)
from experiments.studies.recording import Record
from experiments.studies.running import Entry, Run
from experiments.studies.self_training import self_train, teach
from fedjax_graph.core import clients, processes
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import receptive_fields as nodes
from fedjax_graph.data.graphs.node_dataset import NodeDataset
from fedjax_graph.driver import plots, results
from fedjax_graph.tasks.nodes import TEST_METRICS


class Taught(NamedTuple):
    """Holds what `teach` returned, and where the teachers' run lies."""

    probabilities: np.ndarray
    workdir: pathlib.Path


Teachers = dict[GraphFLSettings, Taught]  # at most one


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphFLStudy(GraphFLSettings):
    """Methods on one graph that the clients share or hold in parts.

    A seed is a draw of labels. A sweep runs all methods over several values of one
    option, on one dataset, and draws the curves.
    """

    def chosen_methods(self) -> list[str]:
        """The methods to run; see `graphfl_methods.chosen_methods`."""
        return graphfl_methods.chosen_methods(self)

    def flagged_fields(self, registered: str) -> tuple[str, ...]:
        """See `MethodSettings.flagged_fields`."""
        of_graphfl = ("fine_tune",) if registered == "graphfl" else ()
        return ("first_order", *of_graphfl)

    def known_methods(self) -> dict[str, str]:
        """See `Options.known_methods`."""
        return graphfl_methods.titles()

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        return super().in_effect() | graphfl_methods.in_effect(self)

    def run_loaded(self) -> dict[str, Entry] | list[dict[str, Any]]:
        """Runs or scores all methods, and writes what came out.

        Returns:
          The entries of `results.json` of these methods, or of a sweep its rows.

        Raises:
          InputError: one line, where a setting or a file does not fit.
        """
        study = self.resolved()
        study.check()
        methods = study.chosen_methods()
        parts = graphfl_sweeps.parts(study, study.sweep) if study.sweep else {}
        dataset = load_dataset(study)
        features_bytes = 4 * math.prod(dataset.features.shape)
        study.set_up_jax(copied_bytes=2 * features_bytes)  # the host has them as well
        if study.sweep:
            return _sweep(study, study.sweep, parts, methods, dataset)
        problem = make_problem(study, dataset)
        workdir = study.make_workdir(dataset.name)
        return _run_problem(problem, methods, workdir, {}).entries


def _sweep(
    study: GraphFLSettings,
    field: str,
    parts: Mapping[str, GraphFLSettings],
    methods: list[str],
    dataset: NodeDataset,
) -> list[dict[str, Any]]:
    """Runs the parts of a sweep; `sweep.json`, `sweep.png` and a folder of each."""
    workdir = study.make_workdir(dataset.name)
    teachers: Teachers = {}

    def run_part(part: GraphFLSettings, folder: pathlib.Path) -> list[dict[str, Any]]:
        problem = make_problem(part, dataset)
        outcome = _run_problem(problem, methods, folder, teachers)
        return graphfl_sweeps.rows(field, part, outcome.entries, outcome.facts)

    rows = sweeps.run(parts, run_part, workdir)
    series = graphfl_sweeps.series(study, field, rows)
    titles = graphfl_sweeps.AXIS_TITLES[field], "test accuracy (%)"
    look = pictures.look(study, dataset.name, (), {})
    plots.curves(workdir / "sweep.png", series, *titles, look)
    report.write_sweep(workdir, study.system, dataset.name, study.command(), rows)
    sweeps.announce(workdir)
    return rows


# --- One study -----------------------------------------------------------------------


class Outcome(NamedTuple):
    """What came out of a study without a sweep."""

    entries: dict[str, Entry]  # of `results.json`, by method
    facts: dict[str, Any]  # what else is known


def _run_problem(
    problem: Problem, methods: list[str], workdir: pathlib.Path, teachers: Teachers
) -> Outcome:
    """Runs all methods on one problem and writes what came out.

    Args:
      problem: the graph and draws of labels.
      methods: names.
      workdir: receives the output.
      teachers: predictions of a study that may be another one but for its number of
        pseudo-labels; replaced where they are of none such.
    """
    study, dataset = problem.study, problem.dataset
    for method in methods:
        name = graphfl_methods.registered_name(method)
        running.build(name, _config_values(method, problem))
    notes, facts = dataset.notes, {}
    if problem.world.statistics:
        facts["subgraphs"] = problem.world.statistics
    if study.num_pseudo_labels:
        taught = _taught(problem, workdir / "teacher", teachers)
        pseudo = self_train(problem, taught, study.num_pseudo_labels)
        problem = problem._replace(draws=pseudo.draws)
        facts["self_training"] = pseudo.facts(study.num_pseudo_labels)
        notes += (pseudo.note(),)
    splits = problem.splits()
    _check_queries(problem, methods, splits["train"])
    checksum = fingerprint(splits)
    if study.is_code and not study.eval_only:
        splits["validation"] = splits["test"]
    size = f"{len(dataset.labels)} nodes, {len(dataset.edges)} edges"
    text = f"{dataset.name}: {size}, {study.num_clients} clients, {study.model_name}"
    settings = {
        "setting": study.described(),
        "notes": notes,
        "scored": "best round by the test part" if study.is_code else "last round",
        "num_nodes": len(dataset.labels),
        "num_edges": len(dataset.edges),
        **facts,
    }
    record = Record[Run](study, workdir, dataset.name, text, settings, checksum)
    titles = graphfl_methods.titles()

    def run_one(method: str) -> tuple[Run, Entry]:
        keep_last = not study.is_code
        run = _run_method(
            method, problem, splits, workdir, checksum, keep_last=keep_last
        )
        return run, results.method_entry(run.result, TEST_METRICS, run.config)

    def table(entries: dict[str, Entry]) -> results.Table:
        return running.table("method", COLUMNS, entries, titles)

    def draw(runs: dict[str, Run], on_record: dict[str, Entry]) -> None:
        data = f"{dataset.name}, {study.num_clients} clients, {study.model_name}"
        look = pictures.look(study, data, on_record, titles)
        records, monitors = running.records_of(workdir, titles), running.monitors(runs)
        path = workdir / "training_curves.png"
        plots.training_curves(path, records, monitors, look)

    return Outcome(record.run(methods, run_one, table, draw), facts)


COLUMNS = {
    "accuracy %": "accuracy",
    "round": running.best_round,
    "seconds": lambda entry: f"{entry['seconds']:.1f}",
}


def _taught(problem: Problem, workdir: pathlib.Path, teachers: Teachers) -> np.ndarray:
    """The teachers' predictions, of which those of the last study are kept.

    Who takes these over gets a copy of the teachers' folder, to be scored by itself.
    """
    key = dataclasses.replace(problem.study, pseudo_labels=None, workdir=None)
    if key not in teachers:

        def train(splits: dict[str, nodes.NodeData]) -> Run:
            checksum = fingerprint(splits)
            return _run_method("il", problem, splits, workdir, checksum, keep_last=True)

        teachers.clear()
        teachers[key] = Taught(teach(problem, train), workdir)
    elif processes.is_first() and not workdir.exists():
        temporary = workdir.with_name("teacher.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(teachers[key].workdir, temporary)
        temporary.rename(workdir)
    return teachers[key].probabilities


# --- One method ----------------------------------------------------------------------


def _check_queries(problem: Problem, methods: list[str], train: nodes.NodeData) -> None:
    """Checks that GraphFL's outer step has a gradient in each draw.

    Raises:
      InputError: if no client has a node to judge its local steps by.
    """
    is_judged = np.any(np.asarray(train.query.mask) > 0, axis=(-1, -2))
    if "graphfl" in methods and not np.all(is_judged):
        raise InputError(
            f"--num_clients={problem.study.num_clients} share so few labelled nodes "
            "that none has one left for graphfl's outer step; ask for fewer clients or "
            "more --labels_per_class"
        )


def _config_values(method: str, problem: Problem) -> dict[str, Any]:
    num_features = problem.dataset.features.shape[1]
    return graphfl_methods.config_values(
        problem.study, method, num_features, problem.num_classes
    )


def _run_method(
    method: str,
    problem: Problem,
    splits: dict[str, nodes.NodeData],
    workdir: pathlib.Path,
    checksum: int,
    *,
    keep_last: bool,
) -> Run:
    """Runs or scores one method over all draws.

    Raises:
      InputError: if its model has diverged.
    """
    study, figures = problem.study, problem.study.figures()
    values = _config_values(method, problem)
    values["clients_per_chunk"] = running.clients_per_chunk(study, workdir, method)
    cohort = clients.cohort_size(study.num_clients, values["participation"])
    run = running.run_method(
        study,
        method,
        values,
        splits,
        workdir,
        checksum=checksum,
        num_rounds=figures.num_rounds,
        examples_per_round=cohort * figures.inner_steps,
        rate_name="client_steps_per_s",
        registered_name=graphfl_methods.registered_name(method),
        is_drawn=nodes.is_drawn,
        keep_last=keep_last,
    )
    is_finite = np.all(np.isfinite(run.result.test["cross_entropy"]))
    if not is_finite and study.on_nan != "ignore":
        raise InputError(
            f"{method}: the model is not finite after {run.result.num_rounds} rounds; "
            "try smaller rates"
        )
    return run
