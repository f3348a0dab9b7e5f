"""The datasets of the SFL study made ready for clients, and what each is scored by."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from experiments.studies.running import Cell, Entry, fingerprint
from experiments.studies.sfl_settings import SFLSettings
from experiments.studies.traffic import time_checksum
from fedjax_graph import data
from fedjax_graph.core import batching, graphs
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.images import datasets as images
from fedjax_graph.data.images import label_shards
from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.published import PUBLISHED
from fedjax_graph.data.traffic.synthetic_flows import TWINS
from fedjax_graph.models import resnet
from fedjax_graph.tasks import images as image_task
from fedjax_graph.tasks import traffic_rnn
from fedjax_graph.tasks.images import GROUPS, ImageTask
from fedjax_graph.tasks.traffic_rnn import TrafficRNNTask

TaskType = TypeVar("TaskType", ImageTask, TrafficRNNTask)

VALIDATION_FRACTION = 0.1  # of a client's training images
IMAGE_OPTIONS = (
    *("num_clients", "shards", "relation_weights", "num_images", "num_test_images"),
    *("width", "augment", "drop_last"),
)
TRAFFIC_OPTIONS = ("num_sensors", "num_days", "split_ratio", "rnn_hidden_size")


def over_clients(name: str) -> Callable[[Entry], str]:
    """A column of Tables 2 and 3: ± is over the clients of a group."""

    def cell(entry: Entry) -> str:
        test = entry["test"]
        return f"{test[name]:.2f} ± {test[f'{name}_client_std']:.2f}"

    return cell


TRAFFIC_COLUMNS: dict[str, Cell] = {  # Table 1
    "MAE": "mae",
    "MAPE %": "mape",
    "RMSE": "rmse",
}
IMAGE_COLUMNS: dict[str, Cell] = {  # Tables 2 and 3
    title: over_clients(name)
    for title, name in zip(("mean", "best 5 %", "worst 5 %"), GROUPS, strict=True)
}


class Problem(NamedTuple):
    """A dataset made ready, and what differs between traffic and images."""

    dataset: Any
    splits: dict[str, Any]
    task: Any  # its config
    size: dict[str, int]
    num_examples: int  # of all clients in a local epoch
    checksum: int
    also: dict[str, int]  # see `running.run_method`
    rate_name: str
    test_keys: Sequence[str]  # of the metrics, in `test` of `results.json`
    entry_keys: Sequence[str]  # of those beside it
    scores: str  # header of the table
    columns: Mapping[str, Cell]  # of the table
    curve: tuple[str, str]  # the figure that shows convergence, and its name


def make(study: SFLSettings) -> Problem:
    """Loads or makes the study's dataset, and shares it out to the clients.

    Raises:
      InputError: one line, where an option or a file does not fit.
    """
    if study.kind == "traffic":
        return traffic_problem(study)
    return image_problem(study)


def make_task(study: SFLSettings, task_type: type[TaskType], **own: Any) -> TaskType:
    """A task whose fields are the study's, where it says them.

    Args:
      study: rate, batches and epochs.
      task_type: config of the task.
      own: fields that only this task has; None stands for the default.

    Raises:
      InputError: if the clients' optimizer cannot be read.
    """
    fields = {name: study.setting(name) for name in ("batch_size", "local_epochs")}
    given = {key: x for key, x in (fields | own).items() if x is not None}
    optimizer = task_type.optimizer
    if study.learning_rate is not None:
        optimizer = dataclasses.replace(optimizer, learning_rate=study.learning_rate)
    return task_type(**given, optimizer=study.client_steps(optimizer))


def traffic_problem(study: SFLSettings) -> Problem:
    """A traffic network: one sensor is one client."""
    study.refuse(IMAGE_OPTIONS, "is for images; --num_sensors cuts a traffic network")
    fractions = None
    if study.split_ratio is not None:
        fractions = batching.parse_fractions(study.split_ratio)
    task = make_task(
        study,
        TrafficRNNTask,
        model=study.model,
        hidden_size=study.rnn_hidden_size,
    )
    task.module()  # raises before a folder is made
    dataset = study.load_network(needs_graph=study.client_graph == "given")
    fractions = fractions or dataset.fractions
    splits = windows.make_splits(dataset, fractions)
    num_steps, num_sensors = dataset.speed.shape
    ahead = dataset.step.words(windows.TARGET_STEPS, minutes=" minutes")
    scored_at = f"at {ahead} ({dataset.unit})"
    return Problem(
        dataset,
        splits,
        task=task,
        size={"num_sensors": num_sensors, "num_steps": num_steps},
        num_examples=num_sensors * len(splits["train"].starts),
        checksum=fingerprint(dataset.speed, dataset.adjacency, np.array(fractions)),
        also=time_checksum(dataset),
        rate_name="windows_per_s",
        test_keys=traffic_rnn.TEST_METRICS,
        entry_keys=traffic_rnn.ENTRY_METRICS,
        scores=scored_at,
        columns=TRAFFIC_COLUMNS,
        curve=("validation_mae", f"validation MAE {scored_at}"),
    )


def image_problem(study: SFLSettings) -> Problem:
    """Images shared out to clients by shards of the sorted labels."""
    study.refuse(TRAFFIC_OPTIONS, "is for traffic; --num_images cuts an image set")
    is_code = study.protocol == "code"
    drop_last = study.drop_last if study.is_given("drop_last") else is_code
    own = {"model": study.model, "width": study.setting("width")}
    own |= {"augment": study.augment, "drop_last": drop_last}
    task = make_task(study, ImageTask, **own)
    task.module()  # raises before a folder is made
    dataset = data.load(study.dataset_name, study.data_dir, kind="images")
    height, width = dataset.train_images.shape[1:3]
    is_resnet = task.model == ImageTask.model
    least = resnet.MIN_IMAGE_SIZE if is_resnet or task.augment else 1
    if min(height, width) < least:
        hint = "" if is_resnet else ", or --noaugment"
        raise InputError(
            f"{dataset.name}: images of {height} x {width} pixels, expected at least "
            f"{least} each way{hint}"
        )
    dataset = images.cut(dataset, study.num_images, study.num_test_images)
    num_clients = study.setting("num_clients")
    per_client = len(dataset.train_images) // num_clients
    if not round(VALIDATION_FRACTION * per_client):
        raise InputError(
            f"--num_clients={num_clients} of {len(dataset.train_images)} training "
            f"images have {per_client} each, of which {VALIDATION_FRACTION:.0%} "
            "validate: too few for one; take fewer clients or more --num_images"
        )
    splits = label_shards.make_splits(
        dataset,
        num_clients,
        study.shards,
        study.seed,
        validation_fraction=VALIDATION_FRACTION,
        relation_weights=study.relation_weights,
        ties="higher" if is_code else "lower",
    )
    train = splits["train"]
    most = train.indices.shape[1]
    if drop_last and most < task.batch_size:
        raise InputError(
            f"--drop_last, which --protocol=code sets: a client has {most} images to "
            f"train on, expected --batch_size={task.batch_size} or more"
        )
    size = {
        "num_clients": num_clients,
        "num_shards": study.shards,
        "num_images": len(dataset.train_images),
        "num_test_images": len(dataset.test_images),
    }
    return Problem(
        dataset,
        splits,
        task=dataclasses.replace(
            task,
            num_classes=len(dataset.class_names),
            image_shape=dataset.train_images.shape[1:],
        ),
        size=size,
        num_examples=_num_trained(train.mask, task),
        checksum=fingerprint(
            dataset.train_images,
            dataset.test_images,
            train.labels,
            *[split.indices for split in splits.values()],
        ),
        also={"graph": fingerprint(*map(np.asarray, jax.tree.leaves(train.graph)))},
        rate_name="images_per_s",
        test_keys=image_task.TEST_METRICS,
        entry_keys=(),
        scores="accuracy %, ± over clients",
        columns=IMAGE_COLUMNS,
        curve=("validation_accuracy", "validation accuracy (%)"),
    )


def _num_trained(mask: np.ndarray, task: ImageTask) -> int:
    """How many images all clients train on in an epoch, a dropped batch left out."""
    num_clients, most = mask.shape
    return (
        num_clients * (most - most % task.batch_size)
        if task.drop_last
        else int(np.sum(mask))
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


def model_bytes(study: SFLSettings) -> int:
    """Bytes of the clients' models that a device holds a copy of, with room to work."""
    if study.kind == "traffic":
        return 0  # 5068 parameters each
    num_parameters = 596 * study.setting("width", ImageTask.width) ** 2
    copies = 4  # state, best state, the updated models, the mixed ones
    return 4 * copies * study.setting("num_clients") * num_parameters


def split_in_words(name: str) -> str:
    """Train, validation and test of a traffic network, in percent: `70/10/20`."""
    published = PUBLISHED.get(TWINS.get(name, name))
    fractions = published.fractions if published else batching.FRACTIONS
    return "/".join(f"{100 * x:g}" for x in fractions)


def in_effect(study: SFLSettings) -> dict[str, Any]:
    """What options stand for that are not given; see `Options.in_effect`."""
    is_traffic = study.kind == "traffic"
    task = make_task(study, TrafficRNNTask if is_traffic else ImageTask)
    found = {
        "dataset": study.dataset_name,
        "batch_size": task.batch_size,
        "local_epochs": task.local_epochs,
        "learning_rate": task.optimizer.learning_rate,
        "client_optimizer": task.optimizer,
    }
    if isinstance(task, TrafficRNNTask):
        return found | {
            "model": study.model or task.model,
            "rnn_hidden_size": study.rnn_hidden_size or task.hidden_size,
            "split_ratio": study.split_ratio or split_in_words(study.dataset_name),
        }
    return found | {
        "model": study.model or task.model,
        "num_clients": study.setting("num_clients"),
        "width": study.setting("width", task.width),
        "num_images": study.num_images or "all",
        "num_test_images": study.num_test_images or "all",
        "num_sensors": None,
        "num_days": None,
    }
