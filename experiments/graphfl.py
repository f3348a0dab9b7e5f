"""Compares GraphFL with individual and federated learning of node labels.

python -m experiments.graphfl
python -m experiments.graphfl --dataset=cora --data_dir=FOLDER --num_seeds=5
python -m experiments.graphfl --dataset=citeseer --task=new_labels --labels_per_class=6
python -m experiments.graphfl --dataset=cora --task=self_training --pseudo_labels=10
python -m experiments.graphfl --dataset=coauthor_cs --sweep=overlap
python -m experiments.graphfl --workdir=FOLDER --resume

A draw of labels is a seed: `--num_seeds=5` runs five, and reports mean and deviation.
"""

import dataclasses
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import _flags, _run_flags, _runs
from experiments._client_flags import NUM_CLIENTS, PARTITION
from experiments._node_problem import (
    LABELS_PER_CLASS,
    NUM_TEST,
    OVERLAP,
    TASK,
    Problem,
    Setting,
    World,
    is_code,
    is_new_labels,
    load_dataset,
    make_problem,
)
from fedjax_graph import clients
from fedjax_graph.data import citation, label_splits, nodes
from fedjax_graph.driver import plots, results, rounds, writers
from fedjax_graph.errors import InputError
from fedjax_graph.tasks.nodes import MODELS, NodeTask

MODEL = flags.DEFINE_enum("model", "gcn", list(MODELS), "What clients train.")
INNER_STEPS = flags.DEFINE_integer(
    "inner_steps", None, "Gradient steps of a client in a round.", lower_bound=1
)
INNER_RATE = flags.DEFINE_float(
    "inner_rate", None, "alpha, of the clients' steps.", lower_bound=0.0
)
LOCAL_RATE = flags.DEFINE_float(
    "local_rate",
    None,
    "Of the clients' steps in methods other than GraphFL.",
    lower_bound=0.0,
)
OUTER_RATE = flags.DEFINE_float(
    "outer_rate", None, "beta, of GraphFL's server.", lower_bound=0.0
)
FIRST_ORDER = flags.DEFINE_bool(
    "first_order", None, "Meta-gradients without second derivatives (FOMAML)."
)
CHECKPOINT_INNER = flags.DEFINE_bool(
    "checkpoint_inner", False, "Recompute inner steps instead of keeping them."
)
HIDDEN_SIZE = flags.DEFINE_integer("hidden_size", 16, "Of GCN.", lower_bound=1)
DROPOUT = flags.DEFINE_float("dropout", 0.5, "Of GCN's hidden units.", 0.0, 0.99)
PSEUDO_LABELS = flags.DEFINE_integer(
    "pseudo_labels", None, "Of self-training, per class and client (10).", lower_bound=0
)
SWEEP = flags.DEFINE_enum(
    "sweep",
    None,
    ["labels_per_class", "participation", "overlap", "pseudo_labels"],
    "Run GCN and SGC, or --model alone, over several values of that flag, whatever its "
    "own value, and draw the curves.",
)
SWEEP_VALUES = flags.DEFINE_list("sweep_values", None, "By default the paper's.")
_run_flags.refuse_nan(INNER_RATE, LOCAL_RATE, OUTER_RATE, DROPOUT)
flags.set_default(_run_flags.PARTICIPATION, 0.2)
flags.set_default(_run_flags.EVAL_EVERY, 5)

# Name on the command line -> registered method, title.
METHODS = {
    "il": ("local", "IL"),
    "fl": ("fed_avg", "FL"),
    "graphfl": ("graphfl", "GraphFL"),
    "fed_prox": ("fed_prox", "FedProx"),
    "scaffold": ("scaffold", "SCAFFOLD"),
    "ditto": ("ditto", "Ditto"),
    "fed_per": ("fed_per", "FedPer"),
    "lg_fed_avg": ("lg_fed_avg", "LG-FedAvg"),
    "fed_att": ("fed_att", "FedAtt"),
}
KEYS = ("accuracy", "cross_entropy")
SHORT_RUN_LABELS, SHORT_RUN_DRAWS = 40, 3
SWEPT = {
    "labels_per_class": (10, 20, 40, 80),
    "participation": (0.1, 0.2, 0.4, 0.6, 0.8),
    "overlap": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    "pseudo_labels": (0, 5, 10, 15, 20),
}
SWEPT_NEW_LABELS = (2, 6, 10)
MOST_PROBABILITY_BYTES = 4 * 2**30
AXIS_TITLES = {
    "labels_per_class": "labelled nodes of a class",
    "participation": "participating clients",
    "overlap": "share of nodes that neighbouring clients share",
    "pseudo_labels": "pseudo-labels of a class",
}


class Protocol(NamedTuple):
    """Figures of a task, as the paper or the released code has them."""

    num_rounds: int
    inner_steps: int
    inner_rate: float  # alpha
    local_rate: float  # of other methods
    outer_rate: float  # beta
    outer_optimiser: str = "sgd"
    weight_decay: float = 0.0


# The paper prints no rates: BUILD_NOTES.md says how ours were chosen.
PAPER = {
    "gcn": Protocol(50, 15, 0.1, 0.1, 0.3),
    "sgc": Protocol(50, 15, 0.3, 1.0, 1.0),
}
PAPER_NEW_LABELS = {
    "gcn": Protocol(50, 15, 0.3, 1.0, 0.1),
    "sgc": Protocol(50, 15, 0.3, 1.0, 0.1),
}
CODE = {
    "gcn": Protocol(20, 10, 0.01, 0.01, 0.02, "adam", 5e-4),
    "sgc": Protocol(20, 10, 0.1, 0.1, 0.1, "adam", 5e-4),
}
CODE_NEW_LABELS = Protocol(11, 50, 0.1, 0.1, 0.001, "adam", 5e-4)


def protocol_of(model: str) -> Protocol:
    """The protocol, with what the flags change of it."""
    if is_code():
        chosen = CODE_NEW_LABELS if is_new_labels() else CODE[model]
    else:
        chosen = (PAPER_NEW_LABELS if is_new_labels() else PAPER)[model]
    given = {
        "num_rounds": _run_flags.NUM_ROUNDS.value,
        "inner_steps": INNER_STEPS.value,
        "inner_rate": INNER_RATE.value,
        "local_rate": LOCAL_RATE.value,
        "outer_rate": OUTER_RATE.value,
    }
    return chosen._replace(**{k: v for k, v in given.items() if v is not None})


# --- Runs ----------------------------------------------------------------------------


def config_values(method: str, problem: Problem, workdir: pathlib.Path):
    """Values of the methods' config fields."""
    setting, protocol = problem.setting, protocol_of(problem.setting.model)
    is_meta = method == "graphfl"
    rate = protocol.inner_rate if is_meta else protocol.local_rate
    task = NodeTask(
        num_features=problem.dataset.features.shape[1],
        num_classes=problem.num_classes,
        model=setting.model,
        hidden_size=HIDDEN_SIZE.value,
        dropout=DROPOUT.value,
        inner_steps=protocol.inner_steps,
        inner_rate=rate,
        adapt_steps=protocol.inner_steps if is_new_labels() else 0,
        checkpoint_inner=CHECKPOINT_INNER.value,
    )
    first_order = FIRST_ORDER.value
    return {
        "task": task,
        "participation": 1.0 if method == "il" else setting.participation,
        "clients_per_chunk": _run_flags.clients_per_chunk(workdir, method),
        "outer_rate": protocol.outer_rate,
        "outer_optimiser": protocol.outer_optimiser,
        "weight_decay": protocol.weight_decay,
        "first_order": is_code() if first_order is None else first_order,
        "fine_tune": not is_new_labels(),
    }


def fingerprint(splits: dict[str, nodes.NodeData]) -> int:
    """A checksum of what was read and drawn; `gram` follows from it, up to rounding."""
    fields = [
        field._replace(gram=None)
        for split in splits.values()
        for field in (split.support, split.query)
    ]
    features = splits["train"].features  # those of all splits
    return _runs.fingerprint(*jax.tree.leaves((features, fields)))


def run_method(
    method: str,
    problem: Problem,
    splits: dict[str, nodes.NodeData],
    workdir: pathlib.Path,
    checksum: int,
    keep_last: bool,
) -> _runs.Run:
    """Runs or scores one method over all draws.

    Raises:
      InputError: if its model has diverged.
    """
    protocol = protocol_of(problem.setting.model)
    values = config_values(method, problem, workdir)
    cohort = clients.cohort_size(NUM_CLIENTS.value, values["participation"])
    run = _runs.run_method(
        method,
        values,
        splits,
        workdir,
        checksum=checksum,
        num_rounds=protocol.num_rounds,
        examples_per_round=cohort * protocol.inner_steps,
        rate_name="client_steps_per_s",
        registered_name=METHODS[method][0],
        is_drawn=nodes.is_drawn,
        keep_last=keep_last,
    )
    if not np.all(np.isfinite(run.result.test["cross_entropy"])):
        raise InputError(
            f"{method}: the model is not finite after {run.result.num_rounds} rounds; "
            "try smaller rates"
        )
    return run


# --- Self-training -------------------------------------------------------------------


class PseudoLabels(NamedTuple):
    """What self-training added to the draws, and how much of it is right (Table 3)."""

    draws: list[label_splits.Draw]
    precision: list[float]  # percent, of each draw
    number: list[int]  # of each draw, over all clients


def teach(problem: Problem, workdir: pathlib.Path) -> np.ndarray:
    """Class probabilities of all nodes, [D, K, N, classes].

    They are of models that each client trains alone, on all its labels.
    """
    size = NUM_CLIENTS.value * len(problem.world.labels) * problem.num_classes
    if 4 * size * len(problem.draws) > MOST_PROBABILITY_BYTES:
        raise InputError(
            "--task=self_training: the clients' predictions of all nodes would take "
            f"{4 * size * len(problem.draws) / 2**30:.0f} GiB; take fewer clients or "
            "draws, or a smaller graph"
        )
    draws = [teaching(draw, problem.world) for draw in problem.draws]
    splits = problem.splits(draws)
    run = run_method("il", problem, splits, workdir, fingerprint(splits), True)
    return rounds.predict_seeds(
        run.algorithm, run.result.best_state, splits["everything"], nodes.is_drawn
    )


def self_train(problem: Problem, probabilities: np.ndarray) -> PseudoLabels:
    """Draws enlarged by what each client's own model is surest of."""
    world, setting = problem.world, problem.setting
    true_labels = problem.dataset.labels[world.copies]
    draws, precision, number = [], [], []
    for draw, own in zip(problem.draws, probabilities, strict=True):
        is_free = world.is_held & ~label_splits.is_scored(draw, world.copies)
        enlarged, pseudo = label_splits.with_pseudo_labels(
            draw, own, is_free, setting.pseudo_labels
        )
        draws.append(enlarged)
        precision.append(label_splits.precision(pseudo, true_labels))
        number.append(int(np.sum(pseudo.mask)))
    return PseudoLabels(draws, precision, number)


def teaching(draw: label_splits.Draw, world: World) -> label_splits.Draw:
    """A draw to train on both halves of, with all nodes as a split `everything`."""
    support, query = draw["train"]
    labelled = label_splits.NodeSets(
        *(np.concatenate(parts, axis=1) for parts in zip(support, query, strict=True))
    )
    numbers = np.arange(len(world.labels), dtype=np.int32)[None]
    everything = label_splits.NodeSets(
        numbers, np.zeros_like(numbers), np.ones(numbers.shape, np.float32)
    )
    return draw | {
        "train": label_splits.Halves(labelled, query),
        "everything": label_splits.Halves(draw["test"].support, everything),
    }


# --- Output --------------------------------------------------------------------------


def table(entries: dict[str, dict[str, Any]]) -> str:
    """Test accuracy of each method."""
    rows = [
        [
            METHODS[method][1],
            results.with_std(
                entry["test"]["accuracy"], (entry["test_std"] or {}).get("accuracy")
            ),
            str(entry["best_round"]),
            f"{entry['seconds']:.1f}",
        ]
        for method, entry in entries.items()
    ]
    return results.format_table(["method", "accuracy %", "round", "seconds"], rows)


class Outcome(NamedTuple):
    """Of a setting."""

    entries: dict[str, dict[str, Any]]  # of `results.json`, by method
    facts: dict[str, Any]  # what else is known


def run_problem(
    problem: Problem,
    methods: list[str],
    workdir: pathlib.Path,
    teachers: dict[str, np.ndarray],
) -> Outcome:
    """Runs all methods on one problem and writes what came out.

    Args:
      problem: the graph and draws of labels.
      methods: names.
      workdir: receives the output.
      teachers: by model what `teach` returned; filled where it lacks this one.
    """
    dataset, setting = problem.dataset, problem.setting
    notes, facts = dataset.notes, {}
    if problem.world.statistics:
        facts["subgraphs"] = problem.world.statistics
    if setting.pseudo_labels:
        if setting.model not in teachers:
            teachers[setting.model] = teach(problem, workdir / "teacher")
        pseudo = self_train(problem, teachers[setting.model])
        problem = problem._replace(draws=pseudo.draws)
        facts["self_training"] = {
            "per_class": setting.pseudo_labels,
            "precision": float(np.mean(pseudo.precision)),
            "precision_by_draw": pseudo.precision,
            "number_by_draw": pseudo.number,
        }
        notes += (
            f"{np.mean(pseudo.number):.0f} pseudo-labels in all, "
            f"{np.mean(pseudo.precision):.1f} % of them right",
        )
    splits = problem.splits()
    checksum = fingerprint(splits)
    if is_code() and not _run_flags.EVAL_ONLY.value:
        splits["validation"] = splits["test"]
    size = f"{len(dataset.labels)} nodes, {len(dataset.edges)} edges"
    text = f"{dataset.name}: {size}, {NUM_CLIENTS.value} clients, {setting.model}"
    _runs.announce(text, notes, workdir)
    before = results.read_methods(workdir, checksum)
    runs = {
        method: run_method(method, problem, splits, workdir, checksum, not is_code())
        for method in methods
    }
    entries = _runs.entries_of(runs, KEYS)
    print(table(entries))
    if not _run_flags.EVAL_ONLY.value:
        settings = {
            "flags": _run_flags.flag_values(),
            "setting": dataclasses.asdict(setting),
            "notes": notes,
            "data": checksum,
            "num_nodes": len(dataset.labels),
            "num_edges": len(dataset.edges),
            **facts,
        }
        results.write_results(workdir, dataset.name, settings, {**before, **entries})
        titles = {name: title for name, (_, title) in METHODS.items()}
        records = _runs.records_of(workdir, titles)
        plots.training_curves(workdir / "training_curves.png", records)
    return Outcome(entries, facts)


def sweep(
    dataset: citation.NodeDataset,
    first: Setting,
    values: list[Any],
    methods: list[str],
    workdir: pathlib.Path,
) -> None:
    """Runs the models over the values of a flag; `sweep.json` and `sweep.png`."""
    field, rows, teachers = SWEEP.value, [], {}
    models = [MODEL.value] if MODEL.present else list(MODELS)
    for model in models:
        for value in values:
            setting = dataclasses.replace(first, model=model, **{field: value})
            folder = workdir / f"{model}-{value}"
            folder.mkdir(exist_ok=True)
            if field != "pseudo_labels":  # which alone leaves the draws as they are
                teachers = {}
            problem = make_problem(dataset, setting)
            outcome = run_problem(problem, methods, folder, teachers)
            for method, entry in outcome.entries.items():
                rows.append(
                    {
                        "model": model,
                        "method": method,
                        field: value,
                        "accuracy": entry["test"]["accuracy"],
                        "std": (entry["test_std"] or {}).get("accuracy"),
                        **outcome.facts,
                    }
                )
            text = json.dumps(writers.to_jsonable(rows), indent=2)
            writers.write_atomically(workdir / "sweep.json", text + "\n")
    series = {}
    for model in models:
        for method in methods:
            own = [r for r in rows if (r["model"], r["method"]) == (model, method)]
            spread = [r["std"] or 0.0 for r in own]
            series[f"{METHODS[method][1]}, {model.upper()}"] = plots.Line(
                [x_of(r[field]) for r in own], [r["accuracy"] for r in own], spread
            )
    plots.curves(
        workdir / "sweep.png",
        series,
        AXIS_TITLES[field],
        "test accuracy (%)",
        dataset.name,
    )


def x_of(value: float) -> float:
    """Where a swept value stands in the picture: clients, not their share."""
    if SWEEP.value == "participation":
        return clients.cohort_size(NUM_CLIENTS.value, value)
    return value


# --- Flags ---------------------------------------------------------------------------


def swept_values() -> list[Any]:
    """The values of --sweep, as the paper has them or as given.

    Raises:
      InputError: if they cannot be read.
    """
    field = SWEEP.value
    if SWEEP_VALUES.value is None:
        if field == "labels_per_class" and is_new_labels():
            return list(SWEPT_NEW_LABELS)
        return list(SWEPT[field])
    try:
        values = [flags.FLAGS[field].parser.parse(x) for x in SWEEP_VALUES.value]
    except ValueError as error:
        raise InputError(f"--sweep_values: {error}") from error
    if not values or any(np.isnan(values)) or len(set(values)) < len(values):
        raise InputError("--sweep_values: expected different numbers")
    return values


def chosen_methods() -> list[str]:
    """The methods that the flags name.

    Raises:
      InputError: if one is not known here.
    """
    methods = _run_flags.METHODS.value or ["il", "fl", "graphfl"]
    if methods == ["all"]:
        return list(METHODS)
    for method in methods:
        if method not in METHODS:
            raise InputError(
                f"--methods: unknown method {method!r}; known: all, "
                + ", ".join(METHODS)
            )
    return methods


def first_setting() -> Setting:
    """The flags, with what the protocol says where they are silent.

    Raises:
      InputError: if two of them do not go together.
    """
    if is_new_labels() and (OVERLAP.value is not None or SWEEP.value == "overlap"):
        raise InputError(
            "--overlap is not for --task=new_labels, whose clients hold the whole graph"
        )
    is_swept = SWEEP.value == "pseudo_labels"
    if (PSEUDO_LABELS.present or is_swept) and TASK.value != "self_training":
        raise InputError("pseudo-labels need --task=self_training")
    if is_new_labels() and NUM_TEST.present:
        raise InputError("--num_test is not for --task=new_labels: a task scores 20")
    if PARTITION.present and OVERLAP.value is None and SWEEP.value != "overlap":
        raise InputError("--partition needs --overlap: else all hold the whole graph")
    if SWEEP_VALUES.present and not SWEEP.value:
        raise InputError("--sweep_values needs --sweep")
    if SWEEP.value and _run_flags.EVAL_ONLY.value:
        raise InputError("--eval_only scores a single run; name its folder")
    labels_per_class, num_train = LABELS_PER_CLASS.value, None
    if labels_per_class is None and SWEEP.value != "labels_per_class":
        if is_new_labels():
            labels_per_class = 2
        elif is_code():
            num_train = 300
        else:
            labels_per_class = SHORT_RUN_LABELS if is_short_run() else 80
    pseudo_labels = None
    if TASK.value == "self_training":
        pseudo_labels = 10 if PSEUDO_LABELS.value is None else PSEUDO_LABELS.value
    return Setting(
        model=MODEL.value,
        labels_per_class=labels_per_class,
        participation=_run_flags.PARTICIPATION.value,
        overlap=OVERLAP.value,
        pseudo_labels=pseudo_labels,
        num_train=num_train,
    )


def follow_code(dataset: citation.NodeDataset) -> citation.NodeDataset:
    """Scores every round on the test nodes and never stops, and says so."""
    flags.set_default(_run_flags.EVAL_EVERY, 1)
    flags.set_default(_run_flags.PATIENCE, 10**6)
    note = (
        "as the released code reports it: the highest test accuracy over the rounds, "
        "which is not a fair estimate"
    )
    return dataset._replace(notes=(*dataset.notes, note))


def is_short_run() -> bool:
    """Without --dataset: fewer labels, as GraphFL is for, and a few draws."""
    return _flags.DATASET.value is None


def main(argv: list[str]) -> None:
    del argv
    if is_short_run():
        flags.set_default(_run_flags.NUM_SEEDS, SHORT_RUN_DRAWS)
    methods, setting = chosen_methods(), first_setting()
    dataset = load_dataset()
    features_bytes = 4 * math.prod(dataset.features.shape)
    _run_flags.set_up_jax(copied_bytes=2 * features_bytes)  # the host has them as well
    if is_code():
        dataset = follow_code(dataset)
    if SWEEP.value:
        values = swept_values()
        workdir = _run_flags.make_workdir("graphfl", dataset.name)
        if (workdir / "results.json").exists():
            raise InputError(f"--workdir={workdir} holds a single run, not a sweep")
        sweep(dataset, setting, values, methods, workdir)
        print(f"sweep.json, sweep.png and a folder of each run are in {workdir}")
        return
    problem = make_problem(dataset, setting)
    workdir = _run_flags.make_workdir("graphfl", dataset.name)
    if (workdir / "sweep.json").exists():
        raise InputError(f"--workdir={workdir} holds a sweep; name one of its folders")
    run_problem(problem, methods, workdir, teachers={})
    if not _run_flags.EVAL_ONLY.value:
        print(f"results.json, metrics.jsonl and a picture are in {workdir}")


if __name__ == "__main__":
    _flags.run(main)
