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

from experiments import _flags, _graphfl_flags, _run_flags, _runs
from experiments._client_flags import NUM_CLIENTS
from experiments._node_problem import (
    Problem,
    Setting,
    World,
    is_code,
    is_new_labels,
    load_dataset,
    make_problem,
)
from fedjax_graph.core import clients
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.data.graphs import label_splits
from fedjax_graph.data.graphs import node_dataset as node_graphs
from fedjax_graph.data.graphs import receptive_fields as nodes
from fedjax_graph.driver import plots, results, rounds, writers
from fedjax_graph.tasks.nodes import MODELS, NodeTask

KEYS = ("accuracy", "cross_entropy")
MOST_PROBABILITY_BYTES = 4 * 2**30
AXIS_TITLES = {
    "labels_per_class": "labelled nodes of a class",
    "participation": "participating clients",
    "overlap": "share of nodes that neighbouring clients share",
    "pseudo_labels": "pseudo-labels of a class",
}


# --- Runs ----------------------------------------------------------------------------


def config_values(method: str, problem: Problem, workdir: pathlib.Path):
    """Values of the methods' config fields."""
    setting = problem.setting
    protocol = _graphfl_flags.protocol_of(setting.model)
    is_meta = method == "graphfl"
    rate = protocol.inner_rate if is_meta else protocol.local_rate
    task = NodeTask(
        num_features=problem.dataset.features.shape[1],
        num_classes=problem.num_classes,
        model=setting.model,
        hidden_size=_graphfl_flags.HIDDEN_SIZE.value,
        dropout=_graphfl_flags.DROPOUT.value,
        inner_steps=protocol.inner_steps,
        optimizer=OptimizerConfig("sgd", rate),
        adapt_steps=protocol.inner_steps if is_new_labels() else 0,
        checkpoint_inner=_graphfl_flags.CHECKPOINT_INNER.value,
    )
    first_order = _graphfl_flags.FIRST_ORDER.value
    return {
        "task": task,
        "participation": 1.0 if method == "il" else setting.participation,
        "clients_per_chunk": _run_flags.clients_per_chunk(workdir, method),
        "server_optimizer": OptimizerConfig(
            protocol.outer_optimizer,
            protocol.outer_rate,
            weight_decay=protocol.weight_decay,
        )
        if is_meta
        else None,
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
    protocol = _graphfl_flags.protocol_of(problem.setting.model)
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
        registered_name=_graphfl_flags.METHODS[method][0],
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
            _graphfl_flags.METHODS[method][1],
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
        titles = {name: title for name, (_, title) in _graphfl_flags.METHODS.items()}
        records = _runs.records_of(workdir, titles)
        plots.training_curves(workdir / "training_curves.png", records)
    return Outcome(entries, facts)


def sweep(
    dataset: node_graphs.NodeDataset,
    first: Setting,
    values: list[Any],
    methods: list[str],
    workdir: pathlib.Path,
) -> None:
    """Runs the models over the values of a flag; `sweep.json` and `sweep.png`."""
    field, rows, teachers = _graphfl_flags.SWEEP.value, [], {}
    models = (
        [_graphfl_flags.MODEL.value] if _graphfl_flags.MODEL.present else list(MODELS)
    )
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
            _, title = _graphfl_flags.METHODS[method]
            series[f"{title}, {model.upper()}"] = plots.Line(
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
    if _graphfl_flags.SWEEP.value == "participation":
        return clients.cohort_size(NUM_CLIENTS.value, value)
    return value


# --- The binary ----------------------------------------------------------------------


def follow_code(dataset: node_graphs.NodeDataset) -> node_graphs.NodeDataset:
    """Scores every round on the test nodes and never stops, and says so."""
    flags.set_default(_run_flags.EVAL_EVERY, 1)
    flags.set_default(_run_flags.PATIENCE, 10**6)
    note = (
        "as the released code reports it: the highest test accuracy over the rounds, "
        "which is not a fair estimate"
    )
    return dataset._replace(notes=(*dataset.notes, note))


def main(argv: list[str]) -> None:
    del argv
    if _graphfl_flags.is_short_run():
        flags.set_default(_run_flags.NUM_SEEDS, _graphfl_flags.SHORT_RUN_DRAWS)
    methods, setting = _graphfl_flags.chosen_methods(), _graphfl_flags.first_setting()
    dataset = load_dataset()
    features_bytes = 4 * math.prod(dataset.features.shape)
    _run_flags.set_up_jax(copied_bytes=2 * features_bytes)  # the host has them as well
    if is_code():
        dataset = follow_code(dataset)
    if _graphfl_flags.SWEEP.value:
        values = _graphfl_flags.swept_values()
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
