"""A graph dealt out to the clients of a study of subgraphs."""

from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.studies import running
from experiments.studies.subgraphs_settings import SubgraphSettings
from fedjax_graph import data
from fedjax_graph.data.graphs import (
    client_subgraphs,
    node_dataset,
    structure,
    subgraphs,
)
from fedjax_graph.data.graphs.client_subgraphs import NodeSplit, SubgraphData
from fedjax_graph.data.graphs.node_dataset import NodeDataset


class Problem(NamedTuple):
    """The graph as the clients hold it."""

    dataset: NodeDataset
    parts: subgraphs.Parts
    split: NodeSplit
    splits: dict[str, SubgraphData]
    statistics: dict[str, Any]
    checksum: int
    normalises: bool  # the features

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of features and classes, which any network on it has."""
        return {
            "num_features": self.dataset.features.shape[1],
            "num_classes": len(self.dataset.class_names),
        }

    @property
    def structure_sizes(self) -> dict[str, int]:
        """The same where the last features encode structure."""
        size = structure.NUM_WALKS + structure.NUM_DEGREES
        sizes = self.sizes | {"structure_size": size}
        return sizes | {"num_features": sizes["num_features"] + size}

    def with_outside(self) -> dict[str, SubgraphData]:
        """The splits of clients that know of their nodes' neighbours outside."""
        return _splits(self.dataset, self.parts, self.split, self.normalises, True)


def _splits(
    dataset: NodeDataset,
    parts: subgraphs.Parts,
    split: NodeSplit,
    normalises: bool,
    outside: bool = False,
) -> dict[str, SubgraphData]:
    return client_subgraphs.make_splits(
        dataset,
        parts,
        split,
        outside_neighbours=outside,
        normalise_features=normalises,
        is_linked=True,
    )


def make_problem(study: SubgraphSettings) -> Problem:
    """Loads or makes the graph, cuts it, and draws the clients' labels.

    Raises:
      InputError: one line, where an option or a file does not fit.
    """
    dataset = data.load(study.dataset or "synthetic", study.data_dir, kind="graphs")
    parts = subgraphs.parts(
        node_dataset.adjacency(dataset),
        study.setting("num_clients", 10),
        partition=study.partition,
        seed=study.seed,
        labels=dataset.labels,
        config=study.partition_config(),
    )
    split = client_subgraphs.client_split(
        dataset.labels, parts.owners, study.fractions(), study.seed
    )
    splits = _splits(dataset, parts, split, study.normalise_features)
    leaves = jax.tree.leaves(splits["train"])
    checksum = running.fingerprint(*map(np.asarray, leaves), splits["test"].is_scored)
    return Problem(
        dataset,
        parts,
        split,
        splits,
        client_subgraphs.statistics(dataset, parts, splits),
        checksum,
        study.normalise_features,
    )
