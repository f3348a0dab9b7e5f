"""A graph dealt out to the clients of a study of subgraphs."""

from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.studies import running
from experiments.studies.subgraphs_settings import (
    NUM_CLIENTS,
    SHORT_RUN_DATASET,
    SubgraphSettings,
)
from fedjax_graph import data
from fedjax_graph.core.errors import InputError
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
    normalises: bool  # the features
    splits: dict[str, SubgraphData] = {}
    statistics: dict[str, Any] = {}
    checksum: int = 0

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

    @property
    def is_sparse(self) -> bool:
        """See `node_dataset.has_sparse_features`."""
        return node_dataset.has_sparse_features(self.dataset)

    def notes(self) -> tuple[str, ...]:
        """What a reader of scores should know of how labels were dealt."""
        training, tested = (
            np.unique(self.parts.owners[nodes])
            for nodes in (self.split.train, self.split.test)
        )
        num_idle = len(np.setdiff1d(tested, training))
        if not num_idle:
            return ()
        return (
            f"{num_idle} of {len(tested)} clients with test nodes train on nothing: "
            "where clients have models of their own, theirs may be the first weights",
        )

    def deal(
        self, outside_neighbours: bool = False, is_sparse: bool = False
    ) -> dict[str, SubgraphData]:
        """The splits of clients, as `client_subgraphs.make_splits` makes them."""
        return client_subgraphs.make_splits(
            self.dataset,
            self.parts,
            self.split,
            outside_neighbours=outside_neighbours,
            normalise_features=self.normalises,
            is_linked=True,
            is_sparse=is_sparse,
        )


def make_problem(study: SubgraphSettings) -> Problem:
    """Loads or makes the graph, cuts it, and draws the clients' labels.

    Raises:
      InputError: one line, where an option or a file does not fit.
    """
    name = study.dataset or SHORT_RUN_DATASET
    dataset = data.load(name, study.data_dir, kind="graphs")
    parts = subgraphs.parts(
        node_dataset.adjacency(dataset),
        study.setting("num_clients", NUM_CLIENTS),
        partition=study.partition,
        seed=study.seed,
        labels=dataset.labels,
        config=study.partition_config(),
    )
    split = client_subgraphs.client_split(
        dataset.labels, parts.owners, study.fractions(), study.seed
    )
    for kind, nodes in split._asdict().items():
        if not len(nodes):
            raise InputError(
                f"--split_ratio={study.split_ratio}: the share of {kind} nodes of a "
                f"class is below one with each of the {len(parts.nodes)} clients; ask "
                "for fewer --num_clients or a larger share"
            )
    problem = Problem(dataset, parts, split, study.normalise_features)
    splits = problem.deal()
    leaves = jax.tree.leaves(splits["train"])
    checksum = running.fingerprint(*map(np.asarray, leaves), splits["test"].is_scored)
    statistics = client_subgraphs.statistics(dataset, parts, splits)
    return problem._replace(splits=splits, statistics=statistics, checksum=checksum)
