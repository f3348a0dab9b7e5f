"""Searches graph networks over federated subgraphs, and trains what was found anew.

python -m experiments.fl_agcns
python -m experiments.fl_agcns --dataset=cora --data_dir=FOLDER
python -m experiments.fl_agcns --dataset=citeseer --methods=fl_agcns,fl_random,gcn,appnp
python -m experiments.fl_agcns --dataset=cora --code=3,6,0,0,6,54,55,5
python -m experiments.fl_agcns --dataset=cora --partition=random --encryption=ckks
python -m experiments.fl_agcns --workdir=FOLDER --resume

A search ends with one architecture code. It, like each fixed network, is trained
`--num_retrain` times from other initial weights and tested at its best validation
round: the table has means and deviations.
"""

import pathlib
import statistics
from typing import Any, NamedTuple

import jax
from absl import flags

from experiments import _fl_agcns_choice, _fl_agcns_flags, _flags, _run_flags, _runs
from experiments._client_flags import NUM_CLIENTS, PARTITION
from experiments.benchmarks.measure import compiled, seconds
from fedjax_graph import algorithms
from fedjax_graph.core import encryption
from fedjax_graph.data.graphs import client_subgraphs as client_graphs
from fedjax_graph.data.graphs import datasets as citation
from fedjax_graph.data.graphs import node_dataset as node_graphs
from fedjax_graph.data.graphs import subgraphs
from fedjax_graph.data.graphs import synthetic as synthetic_graphs
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.driver import diagrams, plots, results, writers
from fedjax_graph.models import architecture
from fedjax_graph.models.supernet import WIDTH
from fedjax_graph.tasks.subgraphs import SubgraphTask

KEYS = ("accuracy", "cross_entropy")
NUM_TIMED = 5
PAPER_CLIENTS = {
    "cora": 3,
    "citeseer": 3,
    "pubmed": 12,
    "cora_full": 16,
    "coauthor_physics": 18,
}


class Problem(NamedTuple):
    """The graph as the clients hold it."""

    dataset: node_graphs.NodeDataset
    splits: dict[str, SubgraphData]
    statistics: dict[str, Any]
    checksum: int

    @property
    def sizes(self) -> dict[str, int]:
        """Of any network on it."""
        return {
            "num_features": self.dataset.features.shape[1],
            "num_classes": len(self.dataset.class_names),
        }


def load_dataset() -> node_graphs.NodeDataset:
    name = _flags.DATASET.value or "synthetic"
    if name in ("synthetic", "synthetic_graph"):
        return synthetic_graphs.node_graph()
    return citation.load(name, _flags.DATA_DIR.value)


def make_problem(dataset: node_graphs.NodeDataset) -> Problem:
    """Cuts the graph and pads the clients' parts."""
    num_clients = NUM_CLIENTS.value or PAPER_CLIENTS.get(dataset.name, 3)
    seed = _run_flags.SEED.value
    parts = subgraphs.parts(
        node_graphs.adjacency(dataset), num_clients, 0.0, PARTITION.value, seed
    )
    published = _fl_agcns_flags.LABELS.value == "published"
    if published and not client_graphs.has_published_split(dataset):
        dataset = node_graphs.noted(
            dataset,
            "no published training, validation and test nodes; drawn by --seed",
        )
    split = client_graphs.make_split(dataset, published=published, seed=seed)
    splits = client_graphs.make_splits(
        dataset,
        parts,
        split,
        outside_neighbours=_fl_agcns_flags.OUTSIDE_NEIGHBOURS.value,
        normalise_features=_fl_agcns_flags.NORMALISE_FEATURES.value,
    )
    checksum = _runs.fingerprint(*splits["train"], splits["test"].is_scored)
    if _run_flags.EVAL_ONLY.value:  # in training, validation nodes choose the round
        train = splits["train"]
        splits = splits | {"train": train._replace(is_scored=train.is_trained)}
    return Problem(
        dataset,
        splits,
        client_graphs.statistics(dataset, parts, splits),
        checksum,
    )


# --- Runs ----------------------------------------------------------------------------


def search(
    method: str, values: dict[str, Any], problem: Problem, workdir: pathlib.Path
) -> _runs.Run:
    """Runs or scores a search with the values of its config.

    Its state has the best code.
    """
    config = algorithms.make_config(method, values)
    return _runs.run_method(
        _fl_agcns_flags.search_name(method),
        values,
        problem.splits,
        workdir,
        checksum=problem.checksum,
        num_rounds=_fl_agcns_flags.search_rounds(method, config),
        examples_per_round=0,
        registered_name=method,
        seeds=(_run_flags.SEED.value,),
        seeds_per_chunk=1,  # a `vmap` over codes of seeds would run every op for each
        keep_last=True,
    )


def train(
    method: str, problem: Problem, workdir: pathlib.Path, code: tuple[int, ...] = ()
) -> _runs.Run:
    """Trains or scores a network `--num_retrain` times: a fixed one, or of a code."""
    first, epochs = _run_flags.SEED.value, _fl_agcns_flags.NUM_EPOCHS.value
    task = SubgraphTask(
        **problem.sizes,
        model="code" if code else method,
        code=code,
        fusion=_fl_agcns_flags.FUSION.value,
        width=WIDTH,
        dropout=_fl_agcns_flags.DROPOUT.value,
        fitness=_fl_agcns_flags.FITNESS.value,
    )
    values = {
        "task": task,
        "server_rate": _fl_agcns_flags.LEARNING_RATE.value,
        "encryption": _fl_agcns_flags.ENCRYPTION.value,
        "clients_per_chunk": _run_flags.clients_per_chunk(workdir, method),
    }
    return _runs.run_method(
        method,
        values,
        problem.splits,
        workdir,
        checksum=problem.checksum,
        num_rounds=epochs,
        examples_per_round=len(problem.splits["train"].client_ids),
        rate_name="client_steps_per_s",
        registered_name="fed_sgd",
        seeds=tuple(range(first, first + _fl_agcns_flags.NUM_RETRAIN.value)),
        patience=epochs + 1,  # the best of all rounds is tested
    )


class Outcome(NamedTuple):
    """Of a method."""

    training: _runs.Run
    search: _runs.Run | None
    code: tuple[int, ...]  # () for a fixed network
    finalists: _fl_agcns_choice.Finalists | None = None


def run_method(method: str, problem: Problem, workdir: pathlib.Path) -> Outcome:
    """Searches if the method does, and trains the network."""
    if method in _fl_agcns_flags.FIXED:
        return Outcome(train(method, problem, workdir), None, ())
    if method == "code":
        code = tuple(architecture.parse(_fl_agcns_flags.CODE.value).tolist())
        return Outcome(train(method, problem, workdir, code), None, code)
    values = _fl_agcns_flags.search_values(method, problem.sizes, workdir)
    found = search(method, values, problem, workdir)
    state = jax.device_get(jax.tree.map(lambda x: x[0], found.result.best_state))
    choice = _fl_agcns_choice.choose(
        method, state, values, problem.splits["train"], workdir
    )
    print(f"{method}: {architecture.to_text(choice.code)}", flush=True)
    code = tuple(choice.code)
    return Outcome(train(method, problem, workdir, code), found, code, choice.finalists)


# --- Output --------------------------------------------------------------------------


def encryption_cost(records: list[dict[str, Any]], name: str) -> dict[str, float]:
    """What encryption took in a run of all its seeds: {} without it."""
    own = [r for r in records if r["method"] == name and "encryption_bytes" in r]
    if not own:
        return {}

    def of_seeds(kind):
        key = f"encryption_{kind}"
        return [x for r in own for x in r.get(f"{key}_by_seed", [r[key]])]

    return {
        "bytes": sum(of_seeds("bytes")),
        "seconds": sum(of_seeds("seconds")),
        "largest_error": max(of_seeds("error")),
    }


def complexity(run: _runs.Run, problem: Problem) -> dict[str, float]:
    """Millions of parameters, and seconds of one inference for the test nodes."""
    state = jax.tree.map(lambda x: x[0], run.result.best_state)
    sizes = [x.size for x in jax.tree.leaves(state.models["params"])]
    args = state, problem.splits["test"]
    program, _ = compiled(run.algorithm.predict, *args)
    times = [seconds(program, *args) for _ in range(NUM_TIMED)]
    return {
        "params_millions": sum(sizes) / 1e6,
        "inference_seconds": statistics.median(times),
    }


def entry_of(
    method: str, outcome: Outcome, problem: Problem, workdir: pathlib.Path
) -> dict[str, Any]:
    """The entry of `results.json`."""
    run = outcome.training
    records = writers.read_records(workdir / "metrics.jsonl")
    entry = results.method_entry(run.result, KEYS, run.config)
    entry |= complexity(run, problem) | {"code": None, "search": None}
    if outcome.code:
        entry["code"] = list(outcome.code)
        described = architecture.describe(outcome.code, _fl_agcns_flags.FUSION.value)
        entry["architecture"] = described.splitlines()
    if outcome.search:
        found = results.method_entry(outcome.search.result, KEYS, outcome.search.config)
        entry["search"] = found
        if outcome.finalists:
            entry["search"]["finalists"] = outcome.finalists._asdict()
        if cost := encryption_cost(records, _fl_agcns_flags.search_name(method)):
            entry["search"]["encryption"] = cost
    if cost := encryption_cost(records, method):
        entry["encryption"] = cost
    return writers.to_jsonable(entry)


def search_seconds(found: dict[str, Any]) -> float:
    """Of a search and its finalists."""
    return found["seconds"] + found.get("finalists", {}).get("seconds", 0)


def table(entries: dict[str, dict[str, Any]]) -> str:
    """Accuracy and cost of each network, and the code of a found one."""
    rows = []
    for method, entry in entries.items():
        found, code = entry["search"], entry["code"]
        spread = (entry["test_std"] or {}).get("accuracy")
        rows.append(
            [
                _fl_agcns_flags.TITLES[method],
                results.with_std(entry["test"]["accuracy"], spread),
                f"{entry['params_millions']:.3f}",
                f"{entry['inference_seconds']:.4f}",
                f"{search_seconds(found):.0f}" if found else "",
                architecture.to_text(code) if code else "",
            ]
        )
    header = ["method", "accuracy %", "params M", "inference s", "search s", "code"]
    return results.format_table(header, rows)


def draw(entries: dict[str, dict[str, Any]], workdir: pathlib.Path, name: str) -> None:
    """The pictures of a run."""
    records = _runs.records_of(workdir, _fl_agcns_flags.TITLES)
    trained = [r for r in records if r["method"] in _fl_agcns_flags.TITLES.values()]
    plots.training_curves(workdir / "training_curves.png", trained)
    searches = {
        _fl_agcns_flags.search_name(method): title
        for method, title in _fl_agcns_flags.SEARCHES.items()
    }
    searched = [r for r in records if r["method"] in searches]
    if searched:
        searched = [r | {"method": searches[r["method"]]} for r in searched]
        plots.search_curves(workdir / "search_curves.png", searched)
    points = {
        _fl_agcns_flags.TITLES[method]: (
            entry["params_millions"],
            entry["test"]["accuracy"],
        )
        for method, entry in entries.items()
    }
    found = [
        _fl_agcns_flags.TITLES[method]
        for method in entries
        if method in _fl_agcns_flags.SEARCHES
    ]
    plots.scatter(
        workdir / "accuracy_and_complexity.png",
        points,
        "parameters (millions)",
        "test accuracy (%)",
        name,
        found,
    )
    for method, entry in entries.items():
        if entry["code"]:
            labels, edges = architecture.diagram(
                entry["code"], _fl_agcns_flags.FUSION.value
            )
            path = workdir / f"architecture_{method}.png"
            diagrams.architecture(path, labels, edges, _fl_agcns_flags.TITLES[method])


# --- The binary ----------------------------------------------------------------------


def main(argv: list[str]) -> None:
    del argv
    if _flags.DATASET.value is None:
        for flag, value in _fl_agcns_flags.SHORT_RUN.items():
            flags.FLAGS.set_default(flag, value)
    methods = _fl_agcns_flags.chosen_methods()
    if _fl_agcns_flags.CODE.value:
        architecture.parse(_fl_agcns_flags.CODE.value)
    _fl_agcns_flags.given_stages()
    encryption.check(_fl_agcns_flags.ENCRYPTION.value)
    _run_flags.set_up_jax()
    problem = make_problem(load_dataset())
    dataset = problem.dataset
    if not _run_flags.EVAL_ONLY.value:
        _fl_agcns_flags.note_of_no_evolution(methods)
    workdir = _run_flags.make_workdir("fl_agcns", dataset.name)
    facts = problem.statistics
    _runs.announce(
        f"{dataset.name}: {len(dataset.labels)} nodes, {len(dataset.edges)} edges, of "
        f"which {facts['edges_cut_share']:.1%} lie between the {facts['num_clients']} "
        f"clients; padding is {facts['padded_nodes_share']:.1%} of nodes and "
        f"{facts['padded_edges_share']:.1%} of edges",
        dataset.notes,
        workdir,
    )
    is_scoring = _run_flags.EVAL_ONLY.value
    entries = results.read_methods(workdir, problem.checksum)
    scored = {}
    for method in methods:
        outcome = run_method(method, problem, workdir)
        scored[method] = entry_of(method, outcome, problem, workdir)
        entries[method] = scored[method]
        if not is_scoring:
            settings = {
                "flags": _run_flags.flag_values(),
                "notes": dataset.notes,
                "data": problem.checksum,
                "num_nodes": len(dataset.labels),
                "num_edges": len(dataset.edges),
                "subgraphs": facts,
            }
            results.write_results(workdir, dataset.name, settings, entries)
            draw(entries, workdir, dataset.name)
    print(table(scored))
    if not is_scoring:
        print(f"results.json, metrics.jsonl and pictures are in {workdir}")


if __name__ == "__main__":
    _flags.run(main)
