"""Federated methods side by side on the subgraphs of one graph."""

import contextlib
import dataclasses
import pathlib
from typing import Any

from experiments.studies import pictures, running, subgraphs_output
from experiments.studies.base import titles_of
from experiments.studies.fl_agcns_methods import FIXED as NETWORKS
from experiments.studies.methods import check_concerns, having, server_optimizer_of
from experiments.studies.recording import Record
from experiments.studies.running import Entry, Run
from experiments.studies.subgraphs_problem import Problem, make_problem
from experiments.studies.subgraphs_settings import (
    NUM_CLIENTS,
    SHORT_RUN_DATASET,
    SubgraphSettings,
)
from fedjax_graph.core import clients
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import client_subgraphs, structure
from fedjax_graph.driver import results, rounds
from fedjax_graph.models.fixed_gnns import FIXED_GNNS
from fedjax_graph.models.neighbour_generator import GeneratorConfig
from fedjax_graph.tasks.subgraphs import MODELS, SubgraphTask

METHODS = (
    *("local", "fed_avg", "fed_avg_m", "fed_adam", "fed_yogi", "fed_prox"),
    *("moon", "fed_dc", "fed_proto", "fgssl", "fed_star"),
    "fed_sage_plus",
    *("scaffold", "fed_per", "lg_fed_avg", "ditto", "fed_att"),
    *("graph_fed_avg", "mp_fed_avg", "sfl", "sfl_star", "sfl_per", "sfl_lg"),
    *("graphfl", "fed_gcn", "fed_gta", "fed_pub", "gcfl_plus", "ada_fgl"),
    *NETWORKS,
)
DEFAULT = ("local", "fed_avg", "fed_gta")
OWN_MODELS = {
    "fed_gcn": "gcn",
    "fed_star": "decoupled_gin",
    "fed_sage_plus": "sage_relu",
}
ENCODES_STRUCTURE = ("fed_star",)  # methods whose model reads it
FORGETS = ("fed_avg_m", "fed_dc")
"""Methods whose clients' Adam goes on without its first moment: that would carry the
direction of a round, or its correction, into the next."""
PLAIN_STEPS = ("graphfl",)  # methods whose clients step without Adam, as their paper's
SEES_OUTSIDE = ("fed_gcn",)  # methods whose clients know of neighbours outside
READS_FEATURES = (*ENCODES_STRUCTURE, *SEES_OUTSIDE, "fed_sage_plus")
"""Methods that do more with features than multiply them by a first kernel."""
OTHER_GRAPHS = ("fgssl", "ada_fgl")  # methods that change edges, or learn others
OWN_NETWORKS = ("ada_fgl",)  # methods whose clients train some beside the model
EMBEDS = ("moon", "fed_proto", "fgssl")
"""Methods that read what a last layer reads: of a network of that alone, features."""
KEYS = ("accuracy", "cross_entropy")
NUM_ROUNDS = 100
GENERATOR_ROUNDS = 10  # of FedSage+, where they are less than half of all
OF_PHASES = ("federated_rounds", "generator_rounds")  # a prolonged run keeps its own
OF_LOCAL_STEPS = ("local_epochs", "client_optimizer")  # not where the server steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubgraphStudy(SubgraphSettings):
    """A comparison of methods whose clients hold parts of one graph.

    The names of FL-AGCNS's fixed networks are methods too: that network, trained by one
    gradient of each client a round, as in FL-AGCNS.
    """

    def known_methods(self) -> dict[str, str]:
        """See `Options.known_methods`."""
        return titles_of(METHODS, NETWORKS)

    def in_effect(self) -> dict[str, Any]:
        """See `Options.in_effect`."""
        rate = self.client_optimizer_config(is_plain=True).learning_rate
        steps = f"adam, going on where a method can keep it; graphfl: sgd at {rate}"
        return super().in_effect() | {
            "dataset": self.dataset or SHORT_RUN_DATASET,
            "methods": self.chosen_methods(),
            "num_clients": self.setting("num_clients", NUM_CLIENTS),
            "num_rounds": self.setting("num_rounds", NUM_ROUNDS),
            "patience": self.patience,
            "learning_rate": self.adam().learning_rate,
            "client_optimizer": self.client_optimizer or steps,
        }

    def run_loaded(self) -> dict[str, Entry]:
        """Runs or scores the methods; writes tables, figures and pictures.

        Returns:
          The entries of `results.json` of these methods.

        Raises:
          InputError: one line, where an option or a file does not fit.
        """
        self.check()
        methods = self.chosen_methods()
        self.set_up_jax()
        problem = make_problem(self)
        dataset, facts = problem.dataset, problem.statistics
        num_rounds = self.setting("num_rounds", NUM_ROUNDS)
        folder = self.named_folder(dataset.name)
        for method in methods:
            values = self._values(method, problem, folder)
            _, algorithm = running.build(registered_name(method), values)
            if not self.eval_only:
                rounds.check_num_rounds(method, algorithm, num_rounds)
        workdir = self.make_workdir(dataset.name)
        num_nodes, num_edges = len(dataset.labels), len(dataset.edges)
        text = (
            f"{dataset.name}: {num_nodes} nodes, {num_edges} edges, "
            f"of which {facts['edges_cut_share']:.1%} lie between the "
            f"{facts['num_clients']} clients ({self.partition}) of "
            f"{facts['smallest_part']} to {facts['largest_part']} nodes"
        )
        settings = {
            "notes": dataset.notes + problem.notes(),
            "num_nodes": num_nodes,
            "num_edges": num_edges,
            "subgraphs": facts,
        }
        args = self, workdir, dataset.name, text, settings, problem.checksum
        record, titles = Record[Run](*args), titles_of(METHODS, NETWORKS)

        def run_one(method: str) -> tuple[Run, Entry]:
            run = self._run_method(method, problem, workdir)
            return run, results.method_entry(run.result, KEYS, run.config)

        def table(entries: dict[str, Entry]) -> results.Table:
            return running.table("method", subgraphs_output.COLUMNS, entries, titles)

        def draw(runs: dict[str, Run], on_record: dict[str, Entry]) -> None:
            data = f"{dataset.name}, {facts['num_clients']} clients by {self.partition}"
            look = pictures.look(self, data, on_record, titles)
            subgraphs_output.draw(workdir, runs, titles, look)

        return record.run(methods, run_one, table, draw)

    # --- Methods ----------------------------------------------------------------------

    def compiled_methods(self) -> tuple[str, ...]:
        """See `Study.compiled_methods`; no method has the name of the binary."""
        return self.methods or (self.chosen_methods()[0],)

    def chosen_methods(self) -> list[str]:
        """The methods to run.

        Raises:
          InputError: if one is not known, an option concerns none of them, the
            server's optimizer cannot be read, or see `check_trust`, `check_settings`.
        """
        methods = self.choose_methods(METHODS, DEFAULT)
        own = [method for method in methods if method not in NETWORKS]
        check_concerns(self, OF_LOCAL_STEPS, methods, own)
        hidden = [method for method in methods if _has_hidden(self._model(method))]
        check_concerns(self, ("dropout",), methods, hidden)
        layered = set(own) & {*hidden, *OWN_NETWORKS}
        check_concerns(self, ("hidden_size",), methods, layered)
        choosing = [method for method in own if method not in OWN_MODELS]
        check_concerns(self, ("model",), methods, choosing)
        stepping = having("server_optimizer", methods, registered_name)
        check_concerns(self, ("server_optimizer",), methods, stepping)
        for method in stepping:  # raises before a folder is made
            server_optimizer_of(self, registered_name(method))
        self.check_trust(methods, registered_name)
        self.check_settings(methods, registered_name)
        return methods

    def _model(self, method: str) -> str:
        if method in NETWORKS:
            return method
        return OWN_MODELS.get(method, self.model)

    def _going_on(self, method: str, values: dict[str, Any]) -> dict[str, Any]:
        """The values, by which clients' Adam goes on, as OpenFGL's, where it can."""
        if self.client_optimizer is not None:
            return values
        task, name = values["task"], registered_name(method)
        steps = dataclasses.replace(task.optimizer, stateful=True)
        if method in FORGETS:
            steps = dataclasses.replace(steps, momentum=0.0)
        lasting = {"task": dataclasses.replace(task, optimizer=steps)}
        own = self.settings_of(method, name, values)
        with contextlib.suppress(InputError):
            running.build(name, values | lasting | own)
            return values | lasting
        return values

    def method_values(self, method: str, problem: Problem) -> dict[str, Any]:
        """The options under the names of the methods' config fields."""
        encodes, model = method in ENCODES_STRUCTURE, self._model(method)
        has_own_size = method in NETWORKS or not _has_hidden(model)
        steps = self.client_optimizer_config(is_plain=method in PLAIN_STEPS)
        task = SubgraphTask(
            **(problem.structure_sizes if encodes else problem.sizes),
            model=model,
            hidden_size=None if has_own_size else self.hidden_size,
            dropout=self.dropout,
            drops_features=False,
            local_steps=self.local_epochs,
            optimizer=steps,
            query_every=2 if method == "graphfl" else 0,
            fitness="accuracy",
        )
        half = max(1, self.setting("num_rounds", NUM_ROUNDS) // 2)
        own_values: dict[str, dict[str, Any]] = {
            "ada_fgl": {"federated_rounds": half, "hidden_size": self.hidden_size},
            "fed_sage_plus": {
                "generator_rounds": min(GENERATOR_ROUNDS, half),
                "generator": GeneratorConfig(hidden_size=self.hidden_size),
            },
            "graphfl": {"first_order": steps.name not in ("sgd", "nesterov")},
        }
        values = self.trust_values() | own_values.get(method, {})
        values |= {"task": task, "participation": self.participation}
        own = self.adam() if method in NETWORKS else None
        if servers := server_optimizer_of(self, registered_name(method), own):
            values["server_optimizer"] = servers
        return self._going_on(method, values)

    def _values(
        self, method: str, problem: Problem, workdir: pathlib.Path
    ) -> dict[str, Any]:
        """All settings of a method; a prolonged run keeps the rounds of its phases."""
        before = running.saved_config(workdir, method)
        begun = {key: before[key] for key in OF_PHASES if key in before}
        values = self.method_values(method, problem) | begun
        return values | self.settings_of(method, registered_name(method), values)

    def _multiplies_features(self, method: str) -> bool:
        """Whether features are read by a first product alone, and so may be sparse."""
        is_own = method not in METHODS  # of a plugin, as its model may be
        if method not in NETWORKS:
            is_own |= MODELS.is_users(OWN_MODELS.get(method, self.model))
        is_embedded = method in EMBEDS and not _has_hidden(self._model(method))
        return not (is_own or is_embedded or method in READS_FEATURES)

    def _spreads_features(self, method: str) -> bool:
        """Whether S X is all that is read of features X, and may be made once."""
        is_gcn = self._model(method) == "gcn" and method not in OTHER_GRAPHS
        return is_gcn and self._multiplies_features(method)

    def _run_method(self, method: str, problem: Problem, workdir: pathlib.Path) -> Run:
        """Runs or scores one method."""
        splits = problem.splits
        if method in SEES_OUTSIDE:
            splits = problem.deal(outside_neighbours=True)
        elif problem.is_sparse and self._multiplies_features(method):
            splits = problem.deal(is_sparse=True)
        elif self._spreads_features(method):
            splits = client_subgraphs.with_spread_features(splits)
        if method in ENCODES_STRUCTURE:
            splits = structure.with_structure(splits)
        if self.eval_only:  # in training, validation nodes choose the round
            train = splits["train"]
            splits = splits | {"train": train._replace(is_scored=train.is_trained)}
        saved = running.saved_config(workdir, method)
        num_clients = len(splits["train"].client_ids)
        num_rounds = self.setting("num_rounds", NUM_ROUNDS)
        chunk = running.clients_per_chunk(self, workdir, method)
        cohort = clients.cohort_size(num_clients, self.participation)
        values = self._values(method, problem, workdir)
        planned = self.method_values(method, problem)
        planned |= self.settings_of(method, registered_name(method))
        for key in OF_PHASES:
            if key in saved and values[key] != planned[key]:
                print(f"note: {method} goes on with {key}={values[key]}, as it began")
        values["clients_per_chunk"] = chunk
        return running.run_method(
            self,
            method,
            values,
            splits,
            workdir,
            checksum=problem.checksum,
            num_rounds=num_rounds,
            examples_per_round=cohort * self.local_epochs,
            rate_name="client_steps_per_s",
            registered_name=registered_name(method),
            # By default the best of all rounds is tested.
            patience=self.patience or num_rounds + 1,
        )


def _has_hidden(model: str) -> bool:
    return model not in FIXED_GNNS or FIXED_GNNS[model].hidden_size is not None


def registered_name(method: str) -> str:
    """The name under which `algorithms` has a method of the study."""
    return "fed_sgd" if method in NETWORKS else method
