"""A graph as FL-AGCNS's clients hold it: cut into parts, each of which is padded."""

from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.studies import running
from experiments.studies.fl_agcns_settings import SHORT_RUN_DATASET, FLAGCNSSettings
from fedjax_graph import data
from fedjax_graph.core.errors import InputError
from fedjax_graph.data import catalog
from fedjax_graph.data.graphs import client_subgraphs, node_dataset, subgraphs
from fedjax_graph.data.graphs.client_subgraphs import NodeSplit, SubgraphData
from fedjax_graph.data.graphs.node_dataset import NodeDataset

PAPER_CLIENTS = {
    "cora": 3,
    "citeseer": 3,
    "pubmed": 12,
    "cora_full": 16,
    "coauthor_physics": 18,
}

PER_CLASS, NUM_VALIDATION, NUM_TEST = 20, 500, 1000  # nodes of a split that is drawn


class Problem(NamedTuple):
    """The graph as the clients hold it."""

    dataset: NodeDataset
    splits: dict[str, SubgraphData]
    statistics: dict[str, Any]
    checksum: int

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of features and classes, which any network on it has."""
        return {
            "num_features": self.dataset.features.shape[1],
            "num_classes": len(self.dataset.class_names),
        }


def load_dataset(study: FLAGCNSSettings) -> NodeDataset:
    """Loads or makes the graph.

    Raises:
      InputError: one line, as in `data.load`.
    """
    return data.load(study.dataset or SHORT_RUN_DATASET, study.data_dir, kind="graphs")


def num_clients_of(study: FLAGCNSSettings, name: str) -> int:
    """The clients that share a dataset: as given, else the paper's, else 3."""
    name = catalog.resolve(name, "graphs")
    return study.num_clients or PAPER_CLIENTS.get(name, 3)


def make_problem(study: FLAGCNSSettings, dataset: NodeDataset) -> Problem:
    """Cuts the graph and pads the clients' parts.

    Raises:
      InputError: if there are too few nodes, or more clients than nodes.
    """
    num_clients = num_clients_of(study, dataset.name)
    adjacency = node_dataset.adjacency(dataset)
    parts = subgraphs.parts(adjacency, num_clients, 0.0, study.partition, study.seed)
    published = study.labels == "published"
    if published and not client_subgraphs.has_published_split(dataset):
        dataset = node_dataset.noted(
            dataset,
            "no published training, validation and test nodes; drawn by --seed",
        )
    if published and client_subgraphs.has_published_split(dataset):
        split = client_subgraphs.make_split(dataset)
    else:
        dataset, split = draw_split(study, dataset)
    splits = client_subgraphs.make_splits(
        dataset,
        parts,
        split,
        outside_neighbours=study.outside_neighbours,
        normalise_features=study.normalise_features,
        is_sparse=node_dataset.has_sparse_features(dataset),
    )
    leaves = jax.tree.leaves(splits["train"])
    checksum = running.fingerprint(*leaves, splits["test"].is_scored)
    if study.eval_only:  # in training, validation nodes choose the round
        train = splits["train"]
        splits = splits | {"train": train._replace(is_scored=train.is_trained)}
    statistics = client_subgraphs.statistics(dataset, parts, splits)
    return Problem(dataset, splits, statistics, checksum)


def draw_split(
    study: FLAGCNSSettings, dataset: NodeDataset
) -> tuple[NodeDataset, NodeSplit]:
    """Draws training, validation and test nodes by `seed`.

    All nodes of a class that has fewer than it takes train.

    Returns:
      The dataset, with a note where there is such a class, and the split.

    Raises:
      InputError: if there are too few nodes.
    """
    labels, num_classes = dataset.labels, len(dataset.class_names)
    sizes = np.bincount(labels[labels >= 0], minlength=num_classes)
    needed = int(np.minimum(sizes, PER_CLASS).sum()) + NUM_VALIDATION + NUM_TEST
    if sizes.sum() < needed:
        raise InputError(
            f"--labels={study.labels}: {dataset.name} has {sizes.sum()} labelled "
            f"nodes, and {needed} are drawn: {PER_CLASS} of a class to train, "
            f"{NUM_VALIDATION} to validate and {NUM_TEST} to test; take a larger "
            "graph, or a file that says which nodes do"
        )
    is_small = sizes < PER_CLASS
    of_small = np.flatnonzero((labels >= 0) & is_small[labels])
    number_of = np.where(is_small, -1, np.cumsum(~is_small) - 1)
    split = client_subgraphs.planetoid_split(
        np.where(labels >= 0, number_of[labels], -1),
        num_classes=num_classes - int(is_small.sum()),
        per_class=PER_CLASS,
        num_validation=NUM_VALIDATION,
        num_test=NUM_TEST,
        seed=study.seed,
    )
    if is_small.any():
        dataset = node_dataset.noted(
            dataset,
            f"{is_small.sum()} of {num_classes} classes have fewer than {PER_CLASS} "
            "nodes, which all train",
        )
    train = np.sort(np.concatenate([split.train, of_small])).astype(np.int32)
    return dataset, split._replace(train=train)
