"""A graph as FL-AGCNS's clients hold it: cut into parts, each of which is padded."""

from typing import Any, NamedTuple

import jax

from experiments.studies import running
from experiments.studies.fl_agcns_settings import SHORT_RUN_DATASET, FLAGCNSSettings
from fedjax_graph import data
from fedjax_graph.data import catalog
from fedjax_graph.data.graphs import client_subgraphs, node_dataset, subgraphs
from fedjax_graph.data.graphs.client_subgraphs import SubgraphData
from fedjax_graph.data.graphs.node_dataset import NodeDataset

PAPER_CLIENTS = {
    "cora": 3,
    "citeseer": 3,
    "pubmed": 12,
    "cora_full": 16,
    "coauthor_physics": 18,
}


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
    """Cuts the graph and pads the clients' parts."""
    num_clients = num_clients_of(study, dataset.name)
    adjacency = node_dataset.adjacency(dataset)
    parts = subgraphs.parts(adjacency, num_clients, 0.0, study.partition, study.seed)
    published = study.labels == "published"
    if published and not client_subgraphs.has_published_split(dataset):
        dataset = node_dataset.noted(
            dataset,
            "no published training, validation and test nodes; drawn by --seed",
        )
    split = client_subgraphs.make_split(dataset, published=published, seed=study.seed)
    splits = client_subgraphs.make_splits(
        dataset,
        parts,
        split,
        outside_neighbours=study.outside_neighbours,
        normalise_features=study.normalise_features,
    )
    leaves = jax.tree.leaves(splits["train"])
    checksum = running.fingerprint(*leaves, splits["test"].is_scored)
    if study.eval_only:  # in training, validation nodes choose the round
        train = splits["train"]
        splits = splits | {"train": train._replace(is_scored=train.is_trained)}
    statistics = client_subgraphs.statistics(dataset, parts, splits)
    return Problem(dataset, splits, statistics, checksum)
