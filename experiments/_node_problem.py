"""Node classification as the flags say: the graph, its clients, and draws of labels."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from absl import flags

from experiments import _flags, _run_flags
from experiments._client_flags import NUM_CLIENTS, PARTITION
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import datasets as citation
from fedjax_graph.data.graphs import label_splits, subgraphs
from fedjax_graph.data.graphs import node_dataset as node_graphs
from fedjax_graph.data.graphs import receptive_fields as nodes
from fedjax_graph.data.graphs import synthetic as synthetic_graphs
from fedjax_graph.tasks.nodes import NodeTask

TASK = flags.DEFINE_enum(
    "task",
    "non_iid",
    ["non_iid", "new_labels", "self_training"],
    "Few and skewed labels a client; test classes that no client has seen; or few "
    "labels and pseudo-labels of each client's own model.",
)
PROTOCOL = flags.DEFINE_enum(
    "protocol",
    "paper",
    ["paper", "code"],
    "code: as the released code runs it: first-order, Adam as outer step, fewer "
    "rounds, the whole graph, and the highest test accuracy over the rounds.",
)
LABELS_PER_CLASS = flags.DEFINE_integer(
    "labels_per_class",
    None,
    "Labelled nodes of a class: of all clients together (80), or for new labels of "
    "each task that is adapted to (2).",
    lower_bound=1,
)
OVERLAP = flags.DEFINE_float(
    "overlap",
    None,
    "Clients hold subgraphs and share this part of their nodes with a neighbour; by "
    "default everybody holds the whole graph.",
    0.0,
    1.0,
)
NUM_TEST = flags.DEFINE_integer(
    "num_test",
    None,
    "Nodes to test on, not for new labels; by default 1000, of large graphs 10000.",
    lower_bound=1,
)
_run_flags.refuse_nan(OVERLAP)
flags.set_default(NUM_CLIENTS, 50)

LARGEST_COMPONENT = ("cora", "citeseer")  # is what the paper has of them
SMALL_CLASS = 200  # nodes; below, a class cannot give 80 to train and as many to score
LARGE = 15_000  # nodes from which on the paper tests on 10000 of them


def is_new_labels() -> bool:
    return TASK.value == "new_labels"


def is_code() -> bool:
    return PROTOCOL.value == "code"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one run is of; a sweep replaces a field."""

    model: str
    labels_per_class: int | None  # None: `num_train` nodes of any class
    participation: float
    overlap: float | None
    pseudo_labels: int | None  # of self-training
    num_train: int | None = None


class World(NamedTuple):
    """The graph as the clients hold it; nodes are rows, copies count as nodes."""

    adjacency: scipy.sparse.csr_array  # [N, N]
    features: Any  # [N, F]
    copies: np.ndarray  # [N], the node of the dataset that each row is
    labels: np.ndarray  # [N], -1 for copies of nodes that another client owns
    owners: np.ndarray | None  # [N], of subgraphs
    is_held: np.ndarray  # [K or 1, N] bool, rows that a client's model may read
    statistics: dict[str, Any]


def load_dataset() -> node_graphs.NodeDataset:
    """The dataset, prepared by the protocol."""
    name = _flags.DATASET.value or "synthetic"
    if name in ("synthetic", "synthetic_graph"):
        return synthetic_graphs.node_graph()
    if name == "synthetic_large":
        return synthetic_graphs.large_node_graph()
    dataset = citation.load(name, _flags.DATA_DIR.value)
    if name.startswith("coauthor"):
        dataset = node_graphs.binarised(dataset)
    if name in LARGEST_COMPONENT and not is_code():
        dataset = node_graphs.largest_component(dataset)
    if name == "amazon2m":  # some of its classes have a handful of nodes
        dataset = node_graphs.without_small_classes(dataset, SMALL_CLASS)
    return dataset


def make_world(dataset: node_graphs.NodeDataset, overlap: float | None) -> World:
    """The whole graph for everybody, or the clients' subgraphs side by side."""
    adjacency = node_graphs.adjacency(dataset)
    if overlap is None:
        everything = np.ones((1, len(dataset.labels)), bool)
        labels = dataset.labels
        numbers = np.arange(len(labels))
        return World(adjacency, dataset.features, numbers, labels, None, everything, {})
    num_clients = NUM_CLIENTS.value
    parts = subgraphs.parts(
        adjacency, num_clients, overlap, PARTITION.value, _run_flags.SEED.value
    )
    union = subgraphs.disjoint_union(adjacency, parts)
    labels = dataset.labels[union.copies]
    is_own = parts.owners[union.copies] == union.holders
    return World(
        adjacency=union.adjacency,
        features=dataset.features[union.copies],
        copies=union.copies,
        labels=np.where(is_own, labels, -1),
        owners=union.holders,
        is_held=union.holders == np.arange(num_clients)[:, None],
        statistics=subgraphs.statistics(adjacency, parts),
    )


def make_draw(world: World, num_classes: int, setting: Setting, seed: int):
    """The label sets of one draw."""
    num_clients = NUM_CLIENTS.value
    if is_new_labels():
        return label_splits.new_labels(
            world.labels,
            num_classes=num_classes,
            num_new_classes=num_new_classes(num_classes),
            num_clients=num_clients,
            labels_per_class=setting.labels_per_class,
            seed=seed,
        )
    is_large = np.count_nonzero(world.labels >= 0) > LARGE
    return label_splits.non_iid(
        world.labels,
        num_classes=num_classes,
        num_clients=num_clients,
        labels_per_class=setting.labels_per_class,
        num_train=setting.num_train,
        num_test=NUM_TEST.value or (10_000 if is_large else 1000),
        owners=world.owners,
        seed=seed,
    )


def num_new_classes(num_classes: int) -> int:
    """K0: 2 of Cora's and CiteSeer's 7 and 6 classes, 3 where there are more.

    Raises:
      InputError: if that leaves too few to train on.
    """
    if num_classes < 4:
        raise InputError(
            f"--task=new_labels needs 4 classes or more; there are {num_classes}"
        )
    return 2 if num_classes <= 7 else 3


class Problem(NamedTuple):
    """What the methods of one setting are run on."""

    dataset: node_graphs.NodeDataset
    world: World
    draws: list[label_splits.Draw]
    setting: Setting
    num_classes: int  # of the head

    @property
    def num_hops(self) -> int:
        task = NodeTask(num_features=1, num_classes=1, model=self.setting.model)
        return task.module().num_hops

    def splits(self, draws=None) -> dict[str, nodes.NodeData]:
        """Of these draws or others."""
        kind = "row" if is_code() else "symmetric"
        return nodes.make_splits(
            subgraphs.normalise(self.world.adjacency, kind),
            self.world.features,
            label_splits.stack(draws or self.draws),
            NUM_CLIENTS.value,
            num_propagations=2 - self.num_hops,
            num_hops=self.num_hops,
        )


def make_problem(dataset: node_graphs.NodeDataset, setting: Setting) -> Problem:
    world = make_world(dataset, setting.overlap)
    num_classes = len(dataset.class_names)
    draws = [
        make_draw(world, num_classes, setting, seed) for seed in _run_flags.seeds()
    ]
    return Problem(
        dataset,
        world,
        draws,
        setting,
        num_classes=num_new_classes(num_classes) if is_new_labels() else num_classes,
    )
