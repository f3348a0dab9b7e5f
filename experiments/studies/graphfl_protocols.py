"""Rounds, steps and rates of GraphFL's tasks in paper and released code, and sweeps.

The paper prints no rates: BUILD_NOTES.md says how ours were chosen.
"""

from typing import NamedTuple

from fedjax_graph.core.optimizers import OptimizerConfig


class Protocol(NamedTuple):
    """How long and at which rates the methods train on one task."""

    num_rounds: int
    inner_steps: int
    inner_rate: float  # alpha
    local_rate: float  # of the clients' steps in methods other than GraphFL
    outer_optimizer: OptimizerConfig  # of rate beta


PAPER = {
    "gcn": Protocol(50, 15, 0.1, 0.1, OptimizerConfig("sgd", 0.3)),
    "sgc": Protocol(50, 15, 0.3, 1.0, OptimizerConfig("sgd", 1.0)),
}
PAPER_NEW_LABELS = {
    "gcn": Protocol(50, 15, 0.3, 1.0, OptimizerConfig("sgd", 0.1)),
    "sgc": Protocol(50, 15, 0.3, 1.0, OptimizerConfig("sgd", 0.1)),
}
CODE = {
    "gcn": Protocol(
        20, 10, 0.01, 0.01, OptimizerConfig("adam", 0.02, weight_decay=5e-4)
    ),
    "sgc": Protocol(20, 10, 0.1, 0.1, OptimizerConfig("adam", 0.1, weight_decay=5e-4)),
}
CODE_NEW_LABELS = Protocol(
    11, 50, 0.1, 0.1, OptimizerConfig("adam", 0.001, weight_decay=5e-4)
)
CODE_NUM_TRAIN = 300  # labelled nodes of any class

# Values over which the paper draws its curves.
SWEPT: dict[str, tuple[float, ...]] = {
    "labels_per_class": (10, 20, 40, 80),
    "participation": (0.1, 0.2, 0.4, 0.6, 0.8),
    "overlap": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    "pseudo_labels": (0, 5, 10, 15, 20),
}
SWEPT_NEW_LABELS = (2, 6, 10)  # labels of a class


def protocol_of(model: str, *, is_code: bool, is_new_labels: bool) -> Protocol:
    """Looks up the protocol of a model's task.

    Args:
      model: `gcn` or `sgc`; a plugin's model has the figures of `gcn`.
      is_code: whether it is that of the released code, not of the paper.
      is_new_labels: whether the task is to adapt to classes that nobody trained on.
    """
    if is_code and is_new_labels:
        return CODE_NEW_LABELS
    figures = CODE if is_code else PAPER_NEW_LABELS if is_new_labels else PAPER
    return figures.get(model, figures["gcn"])
