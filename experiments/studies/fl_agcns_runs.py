"""Runs of FL-AGCNS's study: searches, their networks, trainings from scratch."""

import pathlib
from typing import Any, NamedTuple

import jax

from experiments.studies import fl_agcns_choice, running
from experiments.studies.fl_agcns_choice import search_name
from experiments.studies.fl_agcns_methods import EVOLUTIONARY, NETWORKS
from experiments.studies.fl_agcns_problem import Problem
from experiments.studies.fl_agcns_settings import FLAGCNSSettings
from fedjax_graph.algorithms.fl_agcns.fl_agcns import OF_SCRATCH, OF_SHARED, WARM_UP
from fedjax_graph.algorithms.fl_agcns.fl_rl import FLRLConfig
from fedjax_graph.algorithms.fl_agcns.trainings import make_schedule
from fedjax_graph.models import architecture
from fedjax_graph.models.supernet import WIDTH
from fedjax_graph.tasks.subgraphs import SubgraphTask

SEEDS_APART = 1000  # the first trainings of networks beside two searches


class Outcome(NamedTuple):
    """A trained network and, of a method that searches, how it was found."""

    training: running.Run
    search: running.Run | None
    code: tuple[int, ...]  # () for a fixed network
    finalists: fl_agcns_choice.Finalists | None = None


def run_method(
    study: FLAGCNSSettings, method: str, problem: Problem, workdir: pathlib.Path
) -> Outcome:
    """Searches if the method does, and trains the network."""
    if method in NETWORKS:
        return Outcome(train(study, method, problem, workdir), None, ())
    if method == "code":
        code = tuple(architecture.parse(study.code or "").tolist())
        return Outcome(train(study, method, problem, workdir, code), None, code)
    values = search_values(study, method, problem, workdir)
    found = search(study, method, values, problem, workdir)
    state = jax.device_get(jax.tree.map(lambda x: x[0], found.result.best_state))
    choice = fl_agcns_choice.choose(
        study, method, state, values, problem.splits["train"], workdir
    )
    print(f"{method}: {architecture.to_text(choice.code)}", flush=True)
    code = tuple(choice.code)
    training = train(study, method, problem, workdir, code)
    return Outcome(training, found, code, choice.finalists)


def search(
    study: FLAGCNSSettings,
    method: str,
    values: dict[str, Any],
    problem: Problem,
    workdir: pathlib.Path,
) -> running.Run:
    """Runs or scores a search; its state has the best code."""
    config = running.config_of(method, values)
    return running.run_method(
        study,
        search_name(method),
        values,
        problem.splits,
        workdir,
        checksum=problem.checksum,
        num_rounds=search_rounds(study, method, config),
        examples_per_round=0,
        registered_name=method,
        seeds=(study.seed,),
        seeds_per_chunk=1,  # a `vmap` over codes of seeds would run every op for each
        keep_last=True,
    )


def search_values(
    study: FLAGCNSSettings, method: str, problem: Problem, workdir: pathlib.Path
) -> dict[str, Any]:
    """Settings under the names of a search's config fields."""
    values = problem.sizes | {
        "num_layers": study.num_layers,
        "space": study.space,
        "fusion": study.chosen_fusion(),
        "stages": study.given_stages(),
        "ops": study.chosen_ops(),
        "fitness": study.fitness,
        "dropout": study.dropout,
        "server_optimizer": study.adam(),
        "encryption": study.encryption,
        "clients_per_chunk": running.clients_per_chunk(
            study, workdir, search_name(method)
        ),
        "fitness_from": study.fitness_from,
        "population_size": study.population_size,
    }
    if method == "fl_rl":
        values["codes_per_round"] = min(FLRLConfig.codes_per_round, study.num_trials)
    own = {
        "num_generations": study.generations(),
        "first_epochs": study.first_epochs,
        "rungs": study.rungs,
        "num_epochs": study.num_epochs,
        "num_steps": study.supernet_steps,
        "codes_per_step": study.codes_per_step,
        "num_warm_up": study.num_warm_up,
        "warm_up_codes": study.warm_up_codes,
        "scored_by": study.scored_by,
    }
    names = OF_SHARED if study.fitness_from == "shared" else OF_SCRATCH
    if method not in EVOLUTIONARY:  # gradients have weights to share, trials none
        names = ("num_steps", "scored_by") if method == "fl_gradient" else OF_SCRATCH
    return values | {name: own[name] for name in names}


def search_rounds(study: FLAGCNSSettings, method: str, config: Any) -> int:
    """Number of rounds of a search that make up what the settings allow it."""
    if method == "fl_gradient":
        return study.num_relaxed_rounds
    if method in ("fl_random", "fl_rl"):
        return study.num_trials // config.codes_per_round
    if study.fitness_from == "scratch":
        return make_schedule(config).num_rounds
    return study.generations()


def note_of_no_evolution(study: FLAGCNSSettings, methods: list[str]) -> None:
    """Prints a note where a search ends before populations change."""
    evolves = any(method in EVOLUTIONARY for method in methods)
    num_warm_up = study.num_warm_up
    if num_warm_up is None:
        num_warm_up = WARM_UP[study.space]
    is_shared = study.fitness_from == "shared"
    if is_shared and evolves and num_warm_up >= study.generations():
        print(
            f"note: nothing evolves in {study.generations()} generations: the first "
            f"--num_warm_up={num_warm_up} only train weights"
        )


def retraining_seeds(study: FLAGCNSSettings) -> tuple[int, ...]:
    """The seeds of a network's trainings, which no other `seed` has.

    Else the trainings of fixed networks beside several searches would be nearly the
    same ones, and differences to them not independent.
    """
    first = study.seed * SEEDS_APART
    return tuple((first + i) % 2**32 for i in range(study.num_retrain))


def train(
    study: FLAGCNSSettings,
    method: str,
    problem: Problem,
    workdir: pathlib.Path,
    code: tuple[int, ...] = (),
) -> running.Run:
    """Trains or scores a network `num_retrain` times: a fixed one, or of a code."""
    task = SubgraphTask(
        **problem.sizes,
        model="code" if code else method,
        code=code,
        space=study.space,
        fusion=study.chosen_fusion(),
        width=WIDTH,
        dropout=study.dropout,
        fitness=study.fitness,
    )
    values = {
        "task": task,
        "server_optimizer": study.adam(),
        "encryption": study.encryption,
        "clients_per_chunk": running.clients_per_chunk(study, workdir, method),
    }
    return running.run_method(
        study,
        method,
        values,
        problem.splits,
        workdir,
        checksum=problem.checksum,
        num_rounds=study.num_epochs,
        examples_per_round=len(problem.splits["train"].client_ids),
        rate_name="client_steps_per_s",
        registered_name="fed_sgd",
        seeds=retraining_seeds(study),
        patience=study.num_epochs + 1,  # the best of all rounds is tested
    )
