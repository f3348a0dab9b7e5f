"""SFL and the personalised federated methods beside it, on traffic or on images."""

import dataclasses
import pathlib
from typing import Any

from experiments.studies import pictures, running, sfl_output, sfl_problem
from experiments.studies.base import titles_of
from experiments.studies.methods import check_concerns, having, server_optimizer_of
from experiments.studies.recording import Record
from experiments.studies.running import Entry, Run
from experiments.studies.sfl_problem import Problem
from experiments.studies.sfl_settings import SFLSettings
from experiments.studies.traffic import measures
from fedjax_graph.algorithms import get_method
from fedjax_graph.algorithms.fed_avg import FedAvgConfig
from fedjax_graph.algorithms.sfl.structure_learning import StructureConfig
from fedjax_graph.core import clients
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.traffic import windows
from fedjax_graph.driver import results
from fedjax_graph.driver.network import save_network

METHODS = (
    *("fed_avg", "fed_avg_m", "fed_adam", "fed_yogi", "fed_att", "fed_prox"),
    *("scaffold", "fed_per", "lg_fed_avg", "ditto", "graph_fed_avg", "mp_fed_avg"),
    *("sfl", "sfl_star", "sfl_per", "sfl_lg", "local"),
)
GRAPH_METHODS = ("graph_fed_avg", "mp_fed_avg", "sfl", "sfl_per", "sfl_lg")
NUM_ROUNDS = 20
CONFIG_OPTIONS = {  # option: field of the configs of methods, with the same default
    "propagation_steps": "propagation_steps",
    "alpha": "alpha",
    "pull_weight": "pull_weight",
    "pull_distance": "pull_distance",
    "client_start": "start",
    "score": "score",
    "client_graph": "client_graph",
}
METHOD_OPTIONS = CONFIG_OPTIONS | {  # that concern methods whose configs have the field
    "structure_target": "structure",
    "server_optimizer": "server_optimizer",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFLStudy(SFLSettings):
    """A comparison of methods whose clients are sensors, or share images by labels."""

    def flagged_fields(self, registered: str) -> tuple[str, ...]:
        """See `MethodSettings.flagged_fields`."""
        options = [x for x in CONFIG_OPTIONS if _is_for(x, registered)]
        return (*(CONFIG_OPTIONS[x] for x in options), "structure.target")

    def known_methods(self) -> dict[str, str]:
        """See `Options.known_methods`."""
        return titles_of(METHODS)

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        return super().in_effect() | {
            **sfl_problem.in_effect(self),
            "methods": self.chosen_methods(),
            "num_rounds": self.setting("num_rounds", NUM_ROUNDS),
            "pull_weight": self.method_values("sfl").get("pull_weight", 0.0),
        }

    def run_loaded(self) -> dict[str, Entry]:
        """Runs or scores the methods; writes tables, figures and pictures.

        Returns:
          The entries of `results.json` of these methods.

        Raises:
          InputError: one line, where an option or a file does not fit.
        """
        self.set_up_jax(copied_bytes=sfl_problem.model_bytes(self))
        methods = self.chosen_methods()
        problem = sfl_problem.make(self)
        dataset = problem.dataset
        for method in methods:
            running.build(method, self.method_values(method) | {"task": problem.task})
        workdir = self.make_workdir(dataset.name)
        size = ", ".join(f"{key[4:]} {n}" for key, n in problem.size.items())
        notes = dataset.notes
        if self.client_graph == "given":
            notes += sfl_problem.note_on_graph(problem)
        is_traffic = self.kind == "traffic"
        if is_traffic:
            notes += windows.notes_on(dataset, problem.splits)
        settings = {"notes": notes, **problem.size}
        settings |= measures(dataset) if is_traffic else {}
        text = f"{dataset.name}: {size}"
        args = self, workdir, dataset.name, text, settings
        record = Record[Run](*args, problem.checksum, problem.also)
        if is_traffic:
            save_network(
                workdir / "network.npz",
                dataset,
                problem.splits["train"],
                is_read_only=self.eval_only,
            )
        titles = titles_of(METHODS)

        def run_one(method: str) -> tuple[Run, Entry]:
            run = self._run_method(method, problem, workdir)
            keys = problem.test_keys, run.config, problem.entry_keys
            return run, results.method_entry(run.result, *keys)

        def table(entries: dict[str, Entry]) -> results.Table:
            return sfl_output.table(problem, entries, titles)

        def draw(runs: dict[str, Run], on_record: dict[str, Entry]) -> None:
            data = f"{dataset.name}, {len(problem.splits['train'].client_ids)} clients"
            readings = pictures.masked(True, "errors") if is_traffic else ""
            look = pictures.look(self, data, on_record, titles, readings)
            sfl_output.draw(workdir, problem, runs, titles, look)

        return record.run(methods, run_one, table, draw)

    # --- Methods ----------------------------------------------------------------------

    def chosen_methods(self) -> list[str]:
        """The methods to run; without a graph, those that need none.

        Raises:
          InputError: if one is not known here or needs the graph that is not given, or
            if an option concerns none of them.
        """
        methods = self.choose_methods(METHODS, self.setting("methods"))
        if self.client_graph == "none" and self.methods in (None, ("all",)):
            methods = [m for m in methods if m not in (*GRAPH_METHODS, "sfl_star")]
            methods += ["sfl_star"]
        for method in methods:
            if self.client_graph == "none" and method in GRAPH_METHODS:
                raise InputError(
                    f"{method} needs the graph of the data; with --client_graph=none "
                    "run sfl_star, which learns it"
                )
        concerning = dict(METHOD_OPTIONS)
        if self.kind == "traffic":  # whose network may lack the graph
            del concerning["client_graph"]
        for name, field in concerning.items():
            concerned = [m for m in having(field, methods) if _is_for(name, m)]
            check_concerns(self, (name,), methods, concerned)
        has_graph = self.client_graph != "none"
        reading = [
            m for m in methods if has_graph and m in (*GRAPH_METHODS, "sfl_star")
        ]
        check_concerns(self, ("relation_weights",), methods, reading)
        self.check_trust(methods)
        self.check_settings(methods)
        for option in ("--client_start=own", "--protocol=code"):
            name, _, value = option.removeprefix("--").partition("=")
            if self.dp_noise_multiplier and getattr(self, name) == value:
                raise InputError(f"--dp_noise_multiplier is not for {option}")
        for method in methods:
            self.method_values(method)  # raises before a folder is made
        return methods

    def method_values(self, method: str) -> dict[str, Any]:
        """The options under the names of the methods' config fields.

        Raises:
          InputError: if the server's optimizer cannot be read.
        """
        values: dict[str, Any] = self.trust_values()
        values["participation"] = self.participation
        structure = StructureConfig(target=self.structure_target)
        if self.protocol == "code":
            values |= {"pull_weight": 0.0, "proximal_weight": 0.0}
            values |= {"aggregation_noise": 1e-3}
            structure = dataclasses.replace(structure, compares="state")
        if structure != StructureConfig():
            values["structure"] = structure
        # What is not given is a config's own; a plugin's may have other defaults.
        values |= {
            field: getattr(self, option)
            for option, field in CONFIG_OPTIONS.items()
            if self.is_given(option) and _is_for(option, method)
        }
        if steps := server_optimizer_of(self, method):
            values["server_optimizer"] = steps
        return values | self.settings_of(method, method, values)

    def _run_method(self, method: str, problem: Problem, workdir: pathlib.Path) -> Run:
        """Runs or scores one method."""
        num_clients = len(problem.splits["train"].client_ids)
        cohort = clients.cohort_size(num_clients, self.participation)
        examples = problem.num_examples * cohort // num_clients
        chunk = running.clients_per_chunk(self, workdir, method)
        own = {"task": problem.task, "clients_per_chunk": chunk}
        run = running.run_method(
            self,
            method,
            self.method_values(method) | own,
            problem.splits,
            workdir,
            checksum=problem.checksum,
            also=problem.also,
            num_rounds=self.setting("num_rounds", NUM_ROUNDS),
            examples_per_round=examples * problem.task.local_epochs,
            rate_name=problem.rate_name,
        )
        if method == "sfl_star":  # whose graph is drawn
            return run
        # The models of all methods would fill the memory.
        return run._replace(result=run.result._replace(best_state=None))


def _is_for(option: str, method: str) -> bool:
    """Whether an option is for a method that has its field.

    `--score` is of SFL's kin: FedAvg's is a setting of a single method.
    """
    config_type = get_method(method).config_type
    return option != "score" or not issubclass(config_type, FedAvgConfig)
