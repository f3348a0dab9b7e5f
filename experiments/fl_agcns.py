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

import contextlib
import pathlib
import shutil
import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import _flags, _run_flags, _runs
from experiments._client_flags import NUM_CLIENTS, PARTITION
from experiments._measure import compiled, seconds
from fedjax_graph import algorithms, architecture, encryption, evolution
from fedjax_graph.algorithms.fl_random import make_trial
from fedjax_graph.algorithms.fl_rl import FLRLConfig
from fedjax_graph.architecture_search import make_scorer
from fedjax_graph.data import citation, client_graphs, subgraphs, synthetic_graphs
from fedjax_graph.data.client_graphs import SubgraphData
from fedjax_graph.driver import plots, results, writers
from fedjax_graph.driver.checkpoint import Checkpoints
from fedjax_graph.errors import InputError
from fedjax_graph.models.supernet import WIDTH
from fedjax_graph.tasks.subgraphs import SubgraphTask

FUSION = flags.DEFINE_enum(
    "fusion",
    "leaves",
    ["leaves", "all"],
    "Whose outputs an architecture averages: of layers that no other reads, or all.",
)
STAGES = flags.DEFINE_string(
    "stages",
    "0,0",
    "Activations of the input and output stage of all codes that are searched, such as "
    "3,5 for ReLU and Identity; 0: any.",
)
FITNESS = flags.DEFINE_enum(
    "fitness",
    "loss",
    ["loss", "accuracy"],
    "By which validation score architectures, and rounds of a training, are chosen.",
)
NUM_GENERATIONS = flags.DEFINE_integer(
    "num_generations", 250, "Rounds of an evolutionary search.", lower_bound=1
)
POPULATION_SIZE = flags.DEFINE_integer(
    "population_size", 60, "Architectures in a population.", lower_bound=2
)
NUM_WARM_UP = flags.DEFINE_integer(
    "num_warm_up", 50, "First generations, without evolution.", lower_bound=0
)
SUPERNET_STEPS = flags.DEFINE_integer(
    "supernet_steps", 5, "Steps of the shared weights in a round.", lower_bound=1
)
CODES_PER_STEP = flags.DEFINE_integer(
    "codes_per_step", 20, "Architectures that such a step trains.", lower_bound=1
)
NUM_TRIALS = flags.DEFINE_integer(
    "num_trials", 50, "Architectures that FL-Random and FL-RL train.", lower_bound=1
)
NUM_RELAXED_ROUNDS = flags.DEFINE_integer(
    "num_relaxed_rounds", 50, "Rounds of FL-Gradient.", lower_bound=1
)
NUM_LAYERS = flags.DEFINE_integer(
    "num_layers", architecture.NUM_LAYERS, "Of an architecture, at most.", lower_bound=1
)
NUM_EPOCHS = flags.DEFINE_integer(
    "num_epochs", 50, "Rounds of a network's training from scratch.", lower_bound=1
)
NUM_RETRAIN = flags.DEFINE_integer(
    "num_retrain", 10, "Trainings of each network, from --seed on.", lower_bound=1
)
NUM_FINALISTS = flags.DEFINE_integer(
    "num_finalists",
    1,
    "Of the last population, those that an evolutionary search trains once from "
    "scratch, to take the best by validation; 1, as in the paper: the best by shared "
    "weights.",
    lower_bound=1,
)
DROPOUT = flags.DEFINE_float(
    "dropout",
    0.0,
    "Of both stages' inputs, in trainings and of a search's shared weights; the paper "
    "names none.",
    0.0,
    0.99,
)
LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.02, "Of Adam at the server.", lower_bound=0.0
)
CODE = flags.DEFINE_string(
    "code", None, "An architecture to train, as 3,6,0,0,6,54,55,5; method `code`."
)
ENCRYPTION = flags.DEFINE_enum(
    "encryption", "none", ["none", "ckks"], "Of what leaves a client."
)
OUTSIDE_NEIGHBOURS = flags.DEFINE_bool(
    "outside_neighbours", False, "Clients keep copies of their nodes' neighbours."
)
NORMALISE_FEATURES = flags.DEFINE_bool(
    "normalise_features", False, "Divide each node's features by their sum."
)
LABELS = flags.DEFINE_enum(
    "labels",
    "published",
    ["published", "drawn"],
    "Training, validation and test nodes: those published with the dataset, if there "
    "are any, or 20 of a class, 500 and 1000 drawn by --seed.",
)
_run_flags.refuse_nan(DROPOUT, LEARNING_RATE)
flags.set_default(PARTITION, "metis")
# Clients are few and their products large enough for one device's threads: two CPU
# devices took twice as long for a generation on Cora.
flags.set_default(_run_flags.NUM_CPU_DEVICES, 1)

SEARCHES = {
    "fl_agcns": "FL-AGCNS",
    "controller_eo": "ControllerEO",
    "client_eo": "ClientEO",
    "fl_random": "FL-Random",
    "fl_rl": "FL-RL",
    "fl_gradient": "FL-Gradient",
}
EVOLUTIONARY = ("fl_agcns", "controller_eo", "client_eo")
FIXED = {
    "gat": "GAT",
    "sage": "SAGE",
    "gcn": "GCN",
    "sgc": "SGC",
    "appnp": "APPNP",
    "agnn": "AGNN",
    "arma": "ARMA",
    "gated_graph": "GatedGraph",
}
TITLES = SEARCHES | FIXED | {"code": "given code"}
KEYS = ("accuracy", "cross_entropy")
PAPER_CLIENTS = {
    "cora": 3,
    "citeseer": 3,
    "pubmed": 12,
    "cora_full": 16,
    "coauthor_physics": 18,
}
ALIASES = {"physics": "coauthor_physics"}
SHORT_RUN = {  # without --dataset
    "num_generations": 20,
    "population_size": 20,
    "num_warm_up": 4,
    "supernet_steps": 2,
    "codes_per_step": 8,
    "num_trials": 5,
    "num_relaxed_rounds": 2,
    "num_finalists": 8,
    "num_retrain": 3,
}
SHORT_RUN_METHODS = ["fl_agcns", "gcn", "appnp"]
NUM_TIMED = 5


class Problem(NamedTuple):
    """The graph as the clients hold it."""

    dataset: citation.NodeDataset
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


def load_dataset() -> citation.NodeDataset:
    name = _flags.DATASET.value or "synthetic"
    if name in ("synthetic", "synthetic_graph"):
        return synthetic_graphs.node_graph()
    return citation.load(ALIASES.get(name, name), _flags.DATA_DIR.value)


def make_problem(dataset: citation.NodeDataset) -> Problem:
    """Cuts the graph and pads the clients' parts."""
    num_clients = NUM_CLIENTS.value or PAPER_CLIENTS.get(dataset.name, 3)
    seed = _run_flags.SEED.value
    parts = subgraphs.parts(
        citation.adjacency(dataset), num_clients, 0.0, PARTITION.value, seed
    )
    split = client_graphs.make_split(
        dataset, published=LABELS.value == "published", seed=seed
    )
    splits = client_graphs.make_splits(
        dataset,
        parts,
        split,
        outside_neighbours=OUTSIDE_NEIGHBOURS.value,
        normalise_features=NORMALISE_FEATURES.value,
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


def search_values(problem: Problem, name: str, workdir: pathlib.Path):
    """Values of the searches' config fields."""
    values = problem.sizes | {
        "num_layers": NUM_LAYERS.value,
        "fusion": FUSION.value,
        "stages": given_stages(),
        "fitness": FITNESS.value,
        "dropout": DROPOUT.value,
        "learning_rate": LEARNING_RATE.value,
        "encryption": ENCRYPTION.value,
        "clients_per_chunk": _run_flags.clients_per_chunk(workdir, name),
        "population_size": POPULATION_SIZE.value,
        "num_steps": SUPERNET_STEPS.value,
        "codes_per_step": CODES_PER_STEP.value,
        "num_warm_up": NUM_WARM_UP.value,
        "num_epochs": NUM_EPOCHS.value,
    }
    if name == "fl_rl_search":
        values["codes_per_round"] = min(FLRLConfig.codes_per_round, NUM_TRIALS.value)
    return values


def given_stages() -> architecture.Stages:
    """Those that --stages gives.

    Raises:
      InputError: if it is no pair of activations.
    """
    genes = STAGES.value.split(",")
    if not all(gene.strip().isdecimal() for gene in genes):
        raise InputError(f"--stages={STAGES.value}: expected two numbers, such as 3,5")
    return architecture.check_stages(tuple(map(int, genes)))


def search_rounds(method: str, config: Any) -> int:
    """Rounds of a search that make up what the flags allow it."""
    if method == "fl_gradient":
        return NUM_RELAXED_ROUNDS.value
    if method in ("fl_random", "fl_rl"):
        return NUM_TRIALS.value // config.codes_per_round
    return NUM_GENERATIONS.value


def search(method: str, problem: Problem, workdir: pathlib.Path) -> _runs.Run:
    """Runs or scores a search; its state has the best code."""
    name = f"{method}_search"
    values = search_values(problem, name, workdir)
    config = algorithms.make_config(method, values)
    return _runs.run_method(
        name,
        values,
        problem.splits,
        workdir,
        checksum=problem.checksum,
        num_rounds=search_rounds(method, config),
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
    first, epochs = _run_flags.SEED.value, NUM_EPOCHS.value
    task = SubgraphTask(
        **problem.sizes,
        model="code" if code else method,
        code=code,
        fusion=FUSION.value,
        width=WIDTH,
        dropout=DROPOUT.value,
        fitness=FITNESS.value,
    )
    values = {
        "task": task,
        "server_rate": LEARNING_RATE.value,
        "encryption": ENCRYPTION.value,
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
        seeds=tuple(range(first, first + NUM_RETRAIN.value)),
        patience=epochs + 1,  # the best of all rounds is tested
    )


class Finalists(NamedTuple):
    """Codes that were trained once from scratch."""

    codes: np.ndarray  # [C, L + 2], best first by shared weights
    scores: np.ndarray  # [C] federated validation scores after that training
    seconds: float  # of all, compilation included

    @property
    def best(self) -> tuple[int, ...]:
        return tuple(self.codes[np.argmax(self.scores)].tolist())


def judge_finalists(
    method: str, problem: Problem, state: Any, workdir: pathlib.Path
) -> Finalists:
    """Trains the different networks of the last population that shared weights prefer.

    Args:
      method: an evolutionary search.
      problem: the clients' data.
      state: of the search after its last round.
      workdir: of the search.
    """
    values = search_values(problem, f"{method}_search", workdir)
    config, data = algorithms.make_config("fl_random", values), problem.splits["train"]
    codes = np.concatenate([state.code[None], state.memory.controller])
    codes = codes[~np.asarray(evolution.is_repeated(codes))]
    start = time.perf_counter()

    @jax.jit
    def by_shared_weights(model, data, codes):
        scores, _, _ = make_scorer(config, model, data).federated(codes)
        return scores

    @jax.jit
    def from_scratch(data, codes, keys):
        trial = make_trial(config)
        return jax.lax.map(lambda args: trial(data, *args).score, (codes, keys))

    scores = np.asarray(by_shared_weights(state.weights.model, data, codes))
    codes = codes[np.argsort(-scores, stable=True)][: NUM_FINALISTS.value]
    keys = jax.random.split(jax.random.key(_run_flags.SEED.value), len(codes))
    scores = np.asarray(from_scratch(data, codes, keys))
    return Finalists(codes, scores, time.perf_counter() - start)


def forget_other_network(folder: pathlib.Path, code: tuple[int, ...]) -> None:
    """Removes the training of a network that a search left behind when it went on."""
    if not (folder / "checkpoints").is_dir():
        return
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        if checkpoints.latest_round() is None:
            return
        trained = checkpoints.settings()["config"]["task"]["code"]
    if tuple(trained) != code:
        text = architecture.to_text(trained)
        print(f"note: the search went on from {text}, whose training is removed")
        shutil.rmtree(folder)


class Outcome(NamedTuple):
    """Of a method."""

    training: _runs.Run
    search: _runs.Run | None
    code: tuple[int, ...]  # () for a fixed network
    finalists: Finalists | None = None


def run_method(method: str, problem: Problem, workdir: pathlib.Path) -> Outcome:
    """Searches if the method does, and trains the network."""
    if method in FIXED:
        return Outcome(train(method, problem, workdir), None, ())
    if method == "code":
        code = tuple(architecture.parse(CODE.value).tolist())
        return Outcome(train(method, problem, workdir, code), None, code)
    found = search(method, problem, workdir)
    state = jax.tree.map(lambda x: np.asarray(x[0]), found.result.best_state)
    code, finalists = tuple(state.code.tolist()), None
    if NUM_FINALISTS.value > 1 and method in EVOLUTIONARY:
        finalists = judge_finalists(method, problem, state, workdir)
        code = finalists.best
    print(f"{method}: {architecture.to_text(code)}", flush=True)
    if not _run_flags.EVAL_ONLY.value:
        forget_other_network(workdir / method, code)
    return Outcome(train(method, problem, workdir, code), found, code, finalists)


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
        described = architecture.describe(outcome.code, FUSION.value)
        entry["architecture"] = described.splitlines()
    if outcome.search:
        found = results.method_entry(outcome.search.result, KEYS, outcome.search.config)
        entry["search"] = found
        if outcome.finalists:
            entry["search"]["finalists"] = outcome.finalists._asdict()
        if cost := encryption_cost(records, f"{method}_search"):
            entry["search"]["encryption"] = cost
    if cost := encryption_cost(records, method):
        entry["encryption"] = cost
    return writers.to_jsonable(entry)


def table(entries: dict[str, dict[str, Any]]) -> str:
    """Accuracy and cost of each network, and the code of a found one."""
    rows = []
    for method, entry in entries.items():
        found, code = entry["search"], entry["code"]
        spread = (entry["test_std"] or {}).get("accuracy")
        rows.append(
            [
                TITLES[method],
                results.with_std(entry["test"]["accuracy"], spread),
                f"{entry['params_millions']:.3f}",
                f"{entry['inference_seconds']:.4f}",
                f"{found['seconds']:.0f}" if found else "",
                architecture.to_text(code) if code else "",
            ]
        )
    header = ["method", "accuracy %", "params M", "inference s", "search s", "code"]
    return results.format_table(header, rows)


def draw(entries: dict[str, dict[str, Any]], workdir: pathlib.Path, name: str) -> None:
    """The pictures of a run."""
    records = _runs.records_of(workdir, TITLES)
    trained = [r for r in records if r["method"] in TITLES.values()]
    plots.training_curves(workdir / "training_curves.png", trained)
    searches = {f"{method}_search": title for method, title in SEARCHES.items()}
    searched = [r for r in records if r["method"] in searches]
    if searched:
        searched = [r | {"method": searches[r["method"]]} for r in searched]
        plots.search_curves(workdir / "search_curves.png", searched)
    points = {
        TITLES[method]: (entry["params_millions"], entry["test"]["accuracy"])
        for method, entry in entries.items()
    }
    found = [TITLES[method] for method in entries if method in SEARCHES]
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
            labels, edges = architecture.diagram(entry["code"], FUSION.value)
            path = workdir / f"architecture_{method}.png"
            plots.architecture(path, labels, edges, TITLES[method])


# --- Flags ---------------------------------------------------------------------------


def chosen_methods() -> list[str]:
    """The methods that the flags name.

    Raises:
      InputError: if one is not known here, or flags do not go together.
    """
    if _run_flags.NUM_SEEDS.present and _run_flags.NUM_SEEDS.value > 1:
        raise InputError(
            "--num_seeds: a search has one seed, --seed; --num_retrain says how often "
            "what it found is trained"
        )
    if _run_flags.NUM_ROUNDS.present:
        raise InputError(
            "--num_rounds: a search has --num_generations, --num_trials or "
            "--num_relaxed_rounds, a training --num_epochs"
        )
    if _run_flags.PARTICIPATION.value < 1:
        raise InputError("--participation: every client takes part in FL-AGCNS")
    if CODES_PER_STEP.value > POPULATION_SIZE.value:
        raise InputError(
            f"--codes_per_step={CODES_PER_STEP.value}: expected at most "
            f"--population_size={POPULATION_SIZE.value}, from which they are drawn"
        )
    if _run_flags.PATIENCE.present:
        raise InputError(
            "--patience: a training runs --num_epochs, a search all rounds"
        )
    methods = _run_flags.METHODS.value
    if methods is None:
        if CODE.value:
            return ["code"]
        return SHORT_RUN_METHODS if _flags.DATASET.value is None else ["fl_agcns"]
    if methods == ["all"]:
        methods = [*SEARCHES, *FIXED]
    for method in methods:
        if method not in TITLES:
            raise InputError(
                f"--methods: unknown method {method!r}; known: all, "
                + ", ".join(TITLES)
            )
    num_trials, size = NUM_TRIALS.value, FLRLConfig.codes_per_round
    if "fl_rl" in methods and num_trials > size and num_trials % size:
        raise InputError(
            f"--num_trials={num_trials}: FL-RL trains {size} architectures a round; "
            f"expected a multiple of {size}"
        )
    if "code" in methods and not CODE.value:
        raise InputError("--methods=code needs --code=3,6,0,0,6,54,55,5")
    if CODE.value and "code" not in methods:
        methods = [*methods, "code"]
    return methods


def main(argv: list[str]) -> None:
    del argv
    if _flags.DATASET.value is None:
        for flag, value in SHORT_RUN.items():
            flags.FLAGS.set_default(flag, value)
    methods = chosen_methods()
    if CODE.value:
        architecture.parse(CODE.value)
    given_stages()
    encryption.check(ENCRYPTION.value)
    dataset = load_dataset()
    _run_flags.set_up_jax()
    problem = make_problem(dataset)
    if (
        NUM_WARM_UP.value >= NUM_GENERATIONS.value
        and not _run_flags.EVAL_ONLY.value
        and any(method in EVOLUTIONARY for method in methods)
    ):
        print(
            f"note: nothing evolves in {NUM_GENERATIONS.value} generations: the first "
            f"--num_warm_up={NUM_WARM_UP.value} only train weights"
        )
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
