"""FL-AGCNS: searches and fixed networks on a graph that is cut into clients' parts."""

import dataclasses
from typing import Any

from experiments.studies import fl_agcns_output, fl_agcns_runs
from experiments.studies.fl_agcns_methods import titles
from experiments.studies.fl_agcns_problem import (
    Problem,
    load_dataset,
    make_problem,
    num_clients_of,
)
from experiments.studies.fl_agcns_settings import (
    SHORT_RUN,
    SHORT_RUN_DATASET,
    FLAGCNSSettings,
)
from experiments.studies.recording import Record
from experiments.studies.running import Entry
from fedjax_graph.algorithms.fl_agcns.fl_agcns import WARM_UP
from fedjax_graph.data import catalog


@dataclasses.dataclass(frozen=True, kw_only=True)
class FLAGCNSStudy(FLAGCNSSettings):
    """Searches, and trainings of what they found and of fixed networks.

    A search ends with one architecture code. It, like each fixed network, is trained
    `num_retrain` times from other initial weights and tested at its best validation
    round.
    """

    def known_methods(self) -> dict[str, str]:
        """See `Options.known_methods`."""
        return titles()

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        self.check_given()
        study = self.resolved()
        methods = study.check_methods()
        dataset = study.dataset or SHORT_RUN_DATASET
        warm_up, usual = study.num_warm_up, WARM_UP[study.space]
        return super().in_effect() | {
            **{name: getattr(study, name) for name in SHORT_RUN},
            "dataset": dataset,
            "methods": methods,
            "num_clients": num_clients_of(study, catalog.resolve(dataset)),
            "num_generations": study.generations(),
            "num_warm_up": usual if warm_up is None else warm_up,
            "fusion": study.chosen_fusion(),
            "ops": study.chosen_ops(),
            "server_optimizer": study.adam(),
            "patience": None,
        }

    def run_loaded(self) -> dict[str, Entry]:
        """Runs or scores all methods, and writes what came out after each.

        Returns:
          The entries of `results.json` of these methods.

        Raises:
          InputError: one line, where a setting or a file does not fit.
        """
        self.check_given()
        study = self.resolved()
        methods = study.check_methods()
        study.set_up_jax()
        problem = make_problem(study, load_dataset(study))
        return _run_methods(study, methods, problem)


def _run_methods(
    study: FLAGCNSSettings, methods: list[str], problem: Problem
) -> dict[str, Entry]:
    dataset, facts = problem.dataset, problem.statistics
    if not study.eval_only:
        fl_agcns_runs.note_of_no_evolution(study, methods)
    workdir = study.make_workdir(dataset.name)
    num_nodes, num_edges = len(dataset.labels), len(dataset.edges)
    text = (
        f"{dataset.name}: {num_nodes} nodes, {num_edges} edges, of which "
        f"{facts['edges_cut_share']:.1%} lie between the {facts['num_clients']} "
        f"clients; padding is {facts['padded_nodes_share']:.1%} of nodes and "
        f"{facts['padded_edges_share']:.1%} of edges"
    )
    settings = {
        "notes": dataset.notes,
        "num_nodes": num_nodes,
        "num_edges": num_edges,
        "subgraphs": facts,
    }
    args = study, workdir, dataset.name, text, settings, problem.checksum
    record = Record[None](*args)

    def run_one(method: str) -> tuple[None, Entry]:
        outcome = fl_agcns_runs.run_method(study, method, problem, workdir)
        args = study, method, outcome, problem, workdir
        return None, fl_agcns_output.entry_of(*args)

    def draw(entries: dict[str, Entry]) -> None:
        fl_agcns_output.draw(study, entries, workdir, dataset.name)

    return record.run(methods, run_one, fl_agcns_output.table, draw_each=draw)
