"""What FL-AGCNS's study writes: entries of `results.json`, the table, pictures."""

import pathlib
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax

from experiments.studies import pictures, running
from experiments.studies.fl_agcns_choice import search_name
from experiments.studies.fl_agcns_methods import SEARCHES, titles
from experiments.studies.fl_agcns_problem import Problem
from experiments.studies.fl_agcns_runs import Outcome
from experiments.studies.fl_agcns_settings import FLAGCNSSettings
from experiments.studies.running import Entry
from fedjax_graph.driver import plots, results, writers
from fedjax_graph.models import architecture
from fedjax_graph.tasks.subgraphs import MONITORS

KEYS = ("accuracy", "cross_entropy")
NUM_TIMED = 5


def entry_of(
    study: FLAGCNSSettings,
    method: str,
    outcome: Outcome,
    problem: Problem,
    workdir: pathlib.Path,
) -> Entry:
    """The entry of `results.json`."""
    run = outcome.training
    records = writers.read_records(workdir / "metrics.jsonl")
    entry = results.method_entry(run.result, KEYS, run.config)
    entry |= complexity(run, problem) | {"code": None, "search": None}
    if outcome.code:
        entry["code"] = list(outcome.code)
        described = architecture.describe(
            outcome.code, study.chosen_fusion(), study.space
        )
        entry["architecture"] = described.splitlines()
    if outcome.search:
        found = results.method_entry(outcome.search.result, KEYS, outcome.search.config)
        entry["search"] = found
        if outcome.finalists:
            entry["search"]["finalists"] = outcome.finalists._asdict()
        if cost := encryption_cost(records, search_name(method)):
            entry["search"]["encryption"] = cost
    if cost := encryption_cost(records, method):
        entry["encryption"] = cost
    return writers.to_jsonable(entry)


def encryption_cost(records: list[dict[str, Any]], name: str) -> dict[str, float]:
    """What encryption took in a run of all its seeds: {} without it."""
    own = [r for r in records if r["method"] == name and "encryption_bytes" in r]
    if not own:
        return {}

    def of_seeds(kind: str) -> list[float]:
        key = f"encryption_{kind}"
        return [x for r in own for x in r.get(f"{key}_by_seed", [r[key]])]

    return {
        "bytes": sum(of_seeds("bytes")),
        "seconds": sum(of_seeds("seconds")),
        "largest_error": max(of_seeds("error")),
    }


def complexity(run: running.Run, problem: Problem) -> dict[str, float]:
    """Millions of parameters, and seconds of one inference for the test nodes."""
    state = jax.tree.map(lambda x: x[0], run.result.best_state)
    sizes = [x.size for x in jax.tree.leaves(state.models["params"])]
    args = state, problem.splits["test"]
    program = jax.jit(run.algorithm.predict).lower(*args).compile()
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    return {
        "params_millions": sum(sizes) / 1e6,
        "inference_seconds": statistics.median(times),
    }


def search_seconds(entry: Entry) -> str:
    """Seconds of a search and its finalists, for the table."""
    found = entry["search"]
    if not found:
        return ""
    return f"{found['seconds'] + found.get('finalists', {}).get('seconds', 0):.0f}"


def table(entries: Mapping[str, Entry]) -> results.Table:
    """Accuracy and cost of each network, and the code of a found one."""
    columns = {
        "accuracy %": "accuracy",
        "params M": lambda entry: f"{entry['params_millions']:.3f}",
        "inference s": lambda entry: f"{entry['inference_seconds']:.4f}",
        "search s": search_seconds,
        "code": lambda entry: architecture.to_text(entry["code"] or ()),
    }
    return running.table("method", columns, entries, titles())


def draw(
    study: FLAGCNSSettings,
    entries: Mapping[str, Entry],
    workdir: pathlib.Path,
    name: str,
) -> None:
    """Draws the pictures of a run."""
    from fedjax_graph.driver import diagrams, scatter  # matplotlib comes with them

    title_of, made = titles(), entries.values()
    records = running.records_of(workdir, title_of)
    trained = [r for r in records if r["method"] in title_of.values()]
    kinds = (entry["config"]["task"]["fitness"] for entry in made)
    monitors = [MONITORS[kind] for kind in dict.fromkeys(kinds)]
    counts = {len(entry["best_round_by_seed"]) for entry in made}
    number = " to ".join(map(str, sorted({min(counts), max(counts)})))
    trainings = f"{number} trainings of each network"
    look = pictures.look(study, name, entries, title_of, trainings)
    plots.training_curves(workdir / "training_curves.png", trained, monitors, look)
    searches = {search_name(method): title_of[method] for method in SEARCHES}
    searched = [r for r in records if r["method"] in searches]
    if searched:
        searched = [r | {"method": searches[r["method"]]} for r in searched]
        plots.search_curves(workdir / "search_curves.png", searched, look)
    points = {
        title_of[method]: (entry["params_millions"], entry["test"]["accuracy"])
        for method, entry in entries.items()
    }
    scatter.scatter(
        workdir / "accuracy_and_complexity.png",
        points,
        "parameters (millions)",
        "test accuracy (%)",
        look,
        [title_of[method] for method in entries if method in SEARCHES],
    )
    for method, entry in entries.items():
        if entry["code"]:
            task = entry["config"]["task"]
            labels, edges = architecture.diagram(
                entry["code"], task["fusion"], task["space"]
            )
            path = workdir / f"architecture_{method}.png"
            title, flags = title_of[method], entry.get("flags", study.record())
            said = f"{title}: {name}, seed {flags['seed']}"
            diagrams.architecture(path, labels, edges, said, look.colour(title))
