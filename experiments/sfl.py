"""Compares SFL with personalised federated methods, on traffic or on images.

python -m experiments.sfl
python -m experiments.sfl --dataset=metr_la --data_dir=FOLDER --methods=all
python -m experiments.sfl --dataset=cifar10 --shards=5 --methods=fed_avg,sfl
python -m experiments.sfl --dataset=metr_la --methods=sfl_star --client_graph=none
python -m experiments.sfl --workdir=FOLDER --resume
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import _flags, _run_flags, _runs, _traffic_flags
from experiments._client_flags import NUM_CLIENTS
from fedjax_graph import algorithms
from fedjax_graph.algorithms.sfl.structure_learning import StructureConfig
from fedjax_graph.core import batching, clients, graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.task import TaskConfig
from fedjax_graph.data.images import datasets as images
from fedjax_graph.data.images import label_shards as partition
from fedjax_graph.data.images import synthetic as synthetic_images
from fedjax_graph.data.traffic import datasets as traffic
from fedjax_graph.data.traffic import windows
from fedjax_graph.driver import plots, results
from fedjax_graph.driver.serving import save_network
from fedjax_graph.models import resnet
from fedjax_graph.tasks.images import ImageTask
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask

SHARDS = flags.DEFINE_integer(
    "shards", 2, "Shards a client has of the sorted labels.", lower_bound=1
)
NUM_IMAGES = flags.DEFINE_integer(
    "num_images", None, "Cut the training images to this many.", lower_bound=1
)
NUM_TEST_IMAGES = flags.DEFINE_integer(
    "num_test_images", None, "Cut the test images to this many.", lower_bound=1
)
SPLIT_RATIO = flags.DEFINE_string(
    "split_ratio", "70/10/20", "Of traffic: train, validation and test, in percent."
)
LOCAL_EPOCHS = flags.DEFINE_integer(
    "local_epochs", None, "Passes of a client over its data in a round.", lower_bound=1
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Examples in a client's minibatch.", lower_bound=1
)
LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", None, "Of the clients' SGD, on images its peak.", lower_bound=0.0
)
WIDTH = flags.DEFINE_integer(
    "width", None, "Channels of ResNet9's first layer; the paper's: 64.", lower_bound=1
)
RNN_HIDDEN_SIZE = flags.DEFINE_integer(
    "rnn_hidden_size", None, "Of the traffic model; the paper's: 64.", lower_bound=1
)
PROPAGATION_STEPS = flags.DEFINE_integer(
    "propagation_steps", 3, "m of A^m V in SFL.", lower_bound=0
)
ALPHA = flags.DEFINE_float("alpha", 1.0, "Share of A^m V in SFL's u.", 0.0, 1.0)
PULL_WEIGHT = flags.DEFINE_float(
    "pull_weight", None, "lambda of SFL, of each pull; by default 0.3.", lower_bound=0.0
)
PULL_DISTANCE = flags.DEFINE_enum(
    "pull_distance", "l2", ["l2", "squared_l2"], "R of SFL's pulls."
)
CLIENT_START = flags.DEFINE_enum(
    "client_start",
    "global",
    ["global", "personal"],
    "Where SFL's clients start a round: from the read-out w, or from their own u.",
)
CLIENT_GRAPH = flags.DEFINE_enum(
    "client_graph", "given", ["given", "none"], "none: SFL* learns it from nothing."
)
STRUCTURE_TARGET = flags.DEFINE_enum(
    "structure_target",
    "distance",
    ["distance", "similarity"],
    "What SFL* learns its graph from: the paper's distances, or similarities (ours).",
)
PROTOCOL = flags.DEFINE_enum(
    "protocol",
    "paper",
    ["paper", "code"],
    "code: as in the released code, the proximal terms of SFL and FedProx have no "
    "gradient and the averaging baselines add noise of 0.001.",
)
_run_flags.refuse_nan(LEARNING_RATE, ALPHA, PULL_WEIGHT)

TITLES = {
    "fed_avg": "FedAvg",
    "fed_att": "FedAtt",
    "fed_prox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fed_per": "FedPer",
    "lg_fed_avg": "LG-FedAvg",
    "ditto": "Ditto",
    "graph_fed_avg": "GraphFedAvg",
    "mp_fed_avg": "MPFedAvg",
    "sfl": "SFL",
    "sfl_star": "SFL*",
    "sfl_per": "SFL + FedPer",
    "sfl_lg": "SFL + LG-FedAvg",
    "local": "local",
}
GRAPH_METHODS = ("graph_fed_avg", "mp_fed_avg", "sfl", "sfl_per", "sfl_lg")
IMAGE_KEYS = tuple(
    f"{name}{end}"
    for name in ("mean_accuracy", "best_5_percent", "worst_5_percent")
    for end in ("", "_client_std")
)
TRAFFIC_KEYS = ("mae", "mape", "rmse", "masked")


def traffic_cells(test: dict[str, Any], std: dict[str, Any]) -> list[str]:
    """The columns of Table 1."""
    return [results.with_std(test[k], std.get(k)) for k in TRAFFIC_KEYS[:3]]


def image_cells(test: dict[str, Any], std: dict[str, Any]) -> list[str]:
    """The columns of Tables 2 and 3: ± is over the clients of a group."""
    del std
    names = IMAGE_KEYS[::2]
    return [f"{test[n]:.2f} ± {test[f'{n}_client_std']:.2f}" for n in names]


IMAGE_SETS = ("cifar10", "synthetic_images")
IMAGE_FLAGS = (NUM_CLIENTS, SHARDS, NUM_IMAGES, NUM_TEST_IMAGES, WIDTH)
TRAFFIC_FLAGS = (
    _traffic_flags.NUM_SENSORS,
    _traffic_flags.NUM_DAYS,
    RNN_HIDDEN_SIZE,
    SPLIT_RATIO,
)
METHOD_FLAGS = (
    (PROPAGATION_STEPS, "propagation_steps"),
    (ALPHA, "alpha"),
    (PULL_WEIGHT, "pull_weight"),
    (PULL_DISTANCE, "pull_distance"),
    (CLIENT_START, "start"),
    (STRUCTURE_TARGET, "structure"),
)
# The paper's, where they differ from the tasks' defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cifar10": {"methods": ["fed_avg", "sfl"], "num_clients": 100},
    "synthetic_images": {  # a smaller model, so that two cores need a minute or two
        "methods": ["fed_avg", "sfl"],
        "num_clients": 20,
        "width": 8,
        "batch_size": 32,
        "local_epochs": 5,
        "num_rounds": 6,
    },
    "traffic": {"methods": ["fed_avg", "fed_att", "sfl", "sfl_star"]},
}


class Problem(NamedTuple):
    """A dataset made ready, and what differs between traffic and images."""

    dataset: Any
    splits: dict[str, Any]
    task: Any  # its config
    size: dict[str, int]
    num_examples: int  # of all clients in a local epoch
    checksum: int
    rate_name: str
    test_keys: tuple[str, ...]  # of `results.json`
    header: tuple[str, ...]  # of the table
    cells: Callable[[dict, dict], list[str]]  # (test, test_std) -> a row of it
    curve: tuple[str, str]  # the figure that shows convergence, and its name


def is_traffic() -> bool:
    """Whether the flags name a traffic dataset; images without --dataset.

    Raises:
      InputError: if they name neither.
    """
    name = _flags.DATASET.value or "synthetic_images"
    if name in ("synthetic", *traffic.PUBLISHED):
        return True
    if name.endswith(".npz"):
        return not images.reads(name)
    if name in IMAGE_SETS or name.endswith(".tar.gz") or pathlib.Path(name).is_dir():
        return False
    known = ", ".join(("synthetic", *traffic.PUBLISHED, *IMAGE_SETS))
    raise InputError(
        f"unknown dataset {name!r}; known: {known}, or the path of a .npz file, or "
        "of a folder or archive with the batches of CIFAR-10"
    )


def refuse(flags_given: tuple[flags.FlagHolder, ...], reason: str) -> None:
    """Refuses flags that would do nothing.

    Raises:
      InputError: naming the first one that is given.
    """
    for flag in flags_given:
        if flag.present:
            raise InputError(f"--{flag.name} {reason}")


def setting(name: str, default: Any = None) -> Any:
    """A flag's value, else the dataset's default, else `default`."""
    if flags.FLAGS[name].value is not None:
        return flags.FLAGS[name].value
    dataset = _flags.DATASET.value or "synthetic_images"
    kind = "traffic" if is_traffic() else "cifar10"
    return DEFAULTS.get(dataset, DEFAULTS[kind]).get(name, default)


def make_task(task_type: type, own: dict[str, str], **values: Any) -> TaskConfig:
    """A task from the flags that are given.

    Args:
      task_type: of its config.
      own: fields that only this task has, and their flags.
      values: of further fields.
    """
    names = {name: name for name in ("batch_size", "local_epochs")} | own
    given = {field: setting(flag) for field, flag in names.items()}
    values |= {field: value for field, value in given.items() if value is not None}
    rate = setting("learning_rate")
    if rate is not None:
        values["optimizer"] = dataclasses.replace(
            task_type.optimizer, learning_rate=rate
        )
    return task_type(**values)


def traffic_problem() -> Problem:
    """A traffic network: one sensor is one client."""
    refuse(IMAGE_FLAGS, "is for images; --num_sensors cuts a traffic network")
    fractions = batching.parse_fractions(SPLIT_RATIO.value)
    dataset = _traffic_flags.load_dataset(CLIENT_GRAPH.value == "given")
    splits = windows.make_splits(dataset, fractions)
    num_steps, num_sensors = dataset.speed.shape
    return Problem(
        dataset,
        splits,
        task=make_task(TrafficRNNTask, {"hidden_size": "rnn_hidden_size"}),
        size={"num_sensors": num_sensors, "num_steps": num_steps},
        num_examples=num_sensors * len(splits["train"].starts),
        checksum=_runs.fingerprint(
            dataset.speed, dataset.adjacency, np.array(fractions)
        ),
        rate_name="windows_per_s",
        test_keys=TRAFFIC_KEYS,
        header=(f"at 60 minutes ({dataset.unit})", "MAE", "MAPE %", "RMSE"),
        cells=traffic_cells,
        curve=("validation_mae", f"validation MAE at 60 minutes ({dataset.unit})"),
    )


def image_problem() -> Problem:
    """Images shared out to clients by shards of the sorted labels."""
    refuse(TRAFFIC_FLAGS, "is for traffic; --num_images cuts an image set")
    name = _flags.DATASET.value or "synthetic_images"
    if name == "synthetic_images":
        dataset = synthetic_images.images()
    else:
        dataset = images.load(name, _flags.DATA_DIR.value)
    height, width = dataset.train_images.shape[1:3]
    if min(height, width) < resnet.MIN_IMAGE_SIZE:
        raise InputError(
            f"{dataset.name}: images of {height} x {width} pixels, expected at least "
            f"{resnet.MIN_IMAGE_SIZE} each way"
        )
    dataset = images.cut(dataset, NUM_IMAGES.value, NUM_TEST_IMAGES.value)
    num_clients = setting("num_clients")
    splits = partition.make_splits(
        dataset, num_clients, SHARDS.value, _run_flags.SEED.value
    )
    train = splits["train"]
    size = {"num_clients": num_clients, "num_shards": SHARDS.value}
    return Problem(
        dataset,
        splits,
        task=make_task(
            ImageTask, {"width": "width"}, num_classes=len(dataset.class_names)
        ),
        size={**size, "num_images": len(dataset.train_images)},
        num_examples=int(np.sum(train.mask)),
        checksum=_runs.fingerprint(
            dataset.train_images,
            dataset.test_images,
            train.labels,
            *[split.indices for split in splits.values()],
        ),
        rate_name="images_per_s",
        test_keys=IMAGE_KEYS,
        header=("accuracy %, ± over clients", "mean", "best 5 %", "worst 5 %"),
        cells=image_cells,
        curve=("validation_accuracy", "validation accuracy (%)"),
    )


def note_on_graph(problem: Problem) -> tuple[str, ...]:
    """One line on clients without a neighbour: SFL leaves them to themselves."""
    adjacency = np.array(graphs.dense_adjacency(problem.splits["train"].graph))
    np.fill_diagonal(adjacency, 0)
    alone = np.flatnonzero(~(adjacency > 0).any(axis=1))
    if not len(alone):
        return ()
    names = ", ".join(str(i) for i in alone[:5]) + (", ..." if len(alone) > 5 else "")
    return (
        f"{len(alone)} of {len(adjacency)} clients take from no neighbour in the graph "
        f"(indices {names}): along it they keep their own model",
    )


def config_values(method: str, problem: Problem, workdir: pathlib.Path):
    """Flags under the names of the methods' config fields."""
    values = {
        "task": problem.task,
        "participation": _run_flags.PARTICIPATION.value,
        "clients_per_chunk": _run_flags.clients_per_chunk(workdir, method),
        "propagation_steps": PROPAGATION_STEPS.value,
        "alpha": ALPHA.value,
        "pull_distance": PULL_DISTANCE.value,
        "start": CLIENT_START.value,
        "client_graph": CLIENT_GRAPH.value,
        "structure": StructureConfig(target=STRUCTURE_TARGET.value),
    }
    if PROTOCOL.value == "code":
        values |= {"pull_weight": 0.0, "proximal_weight": 0.0}
        values |= {"aggregation_noise": 1e-3}
    if PULL_WEIGHT.value is not None:
        values["pull_weight"] = PULL_WEIGHT.value
    return values


def chosen_methods() -> list[str]:
    """The methods that the flags name; without a graph, those that need none.

    Raises:
      InputError: if one is not known here or needs the graph that is not given, or if
        a flag concerns none of them.
    """
    named = _run_flags.METHODS.value
    methods = setting("methods")
    if methods == ["all"]:
        methods = list(TITLES)
    elif "all" in methods:
        raise InputError("--methods: all stands alone")
    if CLIENT_GRAPH.value == "none" and named in (None, ["all"]):
        methods = [m for m in methods if m not in (*GRAPH_METHODS, "sfl_star")]
        methods += ["sfl_star"]
    for method in methods:
        if method not in TITLES:
            raise InputError(
                f"--methods: unknown method {method!r}; known: all, {', '.join(TITLES)}"
            )
        if CLIENT_GRAPH.value == "none" and method in GRAPH_METHODS:
            raise InputError(
                f"{method} needs the graph of the data; with --client_graph=none run "
                "sfl_star, which learns it"
            )
    for flag, field in METHOD_FLAGS:
        if not any(has_field(method, field) for method in methods):
            refuse((flag,), f"concerns none of the methods {', '.join(methods)}")
    return methods


def has_field(method: str, field: str) -> bool:
    """Whether a method's config has a field of that name."""
    config_type = algorithms.get_method(method).config_type
    return field in {f.name for f in dataclasses.fields(config_type)}


def table(problem: Problem, entries: dict[str, dict[str, Any]]) -> str:
    """The paper's columns: Table 1, or Tables 2 and 3."""
    rows = [
        [
            TITLES[method],
            *problem.cells(entry["test"], entry["test_std"] or {}),
            str(entry["best_round"]),
        ]
        for method, entry in entries.items()
    ]
    return results.format_table([*problem.header, "best round"], rows)


def few_of(matrix: np.ndarray) -> str:
    """Says that a picture shows a part, as the paper's does."""
    return f", clients 0 to 24 of {len(matrix)}" if len(matrix) > 25 else ""


def draw(workdir: pathlib.Path, problem: Problem, runs: dict[str, _runs.Run]) -> None:
    """Pictures: convergence of all methods; the given and the learnt graph."""
    records = _runs.records_of(workdir, TITLES)
    key, label = problem.curve
    known = [r for r in records if key in r]
    series = {
        title: plots.Line(
            [r["round"] for r in known if r["method"] == title],
            [r[key] for r in known if r["method"] == title],
        )
        for title in dict.fromkeys(r["method"] for r in known)
    }
    plots.curves(workdir / "convergence.png", series, "round", label)
    plots.training_curves(workdir / "training_curves.png", records)
    given = graphs.row_normalise(graphs.dense_adjacency(problem.splits["train"].graph))
    matrices = {"given, row-normalised": given}
    if "sfl_star" in runs:
        matrices["learnt by SFL*"] = runs[
            "sfl_star"
        ].result.best_state.learnt_adjacency[0]
    few = {t + few_of(x): np.asarray(x)[:25, :25] for t, x in matrices.items()}
    path = workdir / "client_graph.png"
    if "sfl_star" in runs or not path.exists():  # keeps what an earlier SFL* learnt
        plots.heat_maps(path, few, "takes from client", "client")


def run_methods(methods: list[str], problem: Problem, workdir: pathlib.Path):
    """Runs or scores the methods one after another."""
    num_clients = len(problem.splits["train"].client_ids)
    cohort = clients.cohort_size(num_clients, _run_flags.PARTICIPATION.value)
    examples = problem.num_examples * cohort // num_clients * problem.task.local_epochs
    runs = {}
    for method in methods:
        run = _runs.run_method(
            method,
            config_values(method, problem, workdir),
            problem.splits,
            workdir,
            checksum=problem.checksum,
            num_rounds=setting("num_rounds", 20),
            examples_per_round=examples,
            rate_name=problem.rate_name,
        )
        if method != "sfl_star":  # the models of all methods would fill the memory
            run = run._replace(result=run.result._replace(best_state=None))
        runs[method] = run
    return runs


def model_bytes() -> int:
    """Bytes of the clients' models that a device holds a copy of, with room to work."""
    if is_traffic():
        return 0  # 5068 parameters each
    num_parameters = 596 * setting("width", ImageTask.width) ** 2
    copies = 4  # state, best state, the updated models, the mixed ones
    return 4 * copies * setting("num_clients") * num_parameters


def main(argv: list[str]) -> None:
    del argv
    _run_flags.set_up_jax(copied_bytes=model_bytes())
    methods = chosen_methods()
    problem = traffic_problem() if is_traffic() else image_problem()
    dataset = problem.dataset
    workdir = _run_flags.make_workdir("sfl", dataset.name)
    size = ", ".join(f"{key[4:]} {n}" for key, n in problem.size.items())
    notes = dataset.notes
    if CLIENT_GRAPH.value == "given":
        notes += note_on_graph(problem)
    _runs.announce(f"{dataset.name}: {size}", notes, workdir)
    before = results.read_methods(workdir, problem.checksum)
    if is_traffic():
        save_network(workdir / "network.npz", dataset, problem.splits["train"])
    runs = run_methods(methods, problem, workdir)
    entries = _runs.entries_of(runs, problem.test_keys)
    print(table(problem, entries))
    if _run_flags.EVAL_ONLY.value:
        return
    settings = {
        "flags": _run_flags.flag_values(),
        "notes": notes,
        "data": problem.checksum,
        **problem.size,
    }
    results.write_results(workdir, dataset.name, settings, {**before, **entries})
    draw(workdir, problem, runs)
    print(f"results.json, metrics.jsonl and pictures are in {workdir}")


if __name__ == "__main__":
    _flags.run(main)
