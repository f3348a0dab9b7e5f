"""Self-training: draws enlarged by what each client's own model is surest of."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.node_problem import Problem, World
from experiments.studies.running import Run
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.graphs import label_splits
from fedjax_graph.data.graphs import receptive_fields as nodes
from fedjax_graph.data.graphs.label_splits import Draw, Halves, NodeSets
from fedjax_graph.driver import programs

MOST_PROBABILITY_BYTES = 4 * 2**30


class PseudoLabels(NamedTuple):
    """What self-training added to the draws, and how much of it is right (Table 3)."""

    draws: list[Draw]
    precision: list[float]  # percent, of each draw
    number: list[int]  # of each draw, over all clients

    def facts(self, per_class: int) -> dict[str, Any]:
        """The entry `self_training` of `results.json`."""
        return {
            "per_class": per_class,
            "precision": float(np.mean(self.precision)),
            "precision_by_draw": self.precision,
            "number_by_draw": self.number,
        }

    def note(self) -> str:
        """The line that is printed of them."""
        return (
            f"{np.mean(self.number):.0f} pseudo-labels in all, "
            f"{np.mean(self.precision):.1f} % of them right"
        )


def teach(
    problem: Problem, train: Callable[[dict[str, nodes.NodeData]], Run]
) -> np.ndarray:
    """Predicts all nodes by models that each client trains alone, on all its labels.

    Args:
      problem: the graph and draws of labels.
      train: (splits) -> the run of a method in which clients train alone.

    Returns:
      Class probabilities [D, K, N, classes].

    Raises:
      InputError: if they would not fit in memory.
    """
    world, draws = problem.world, problem.draws
    size = problem.study.num_clients * len(world.labels) * problem.num_classes
    if 4 * size * len(draws) > MOST_PROBABILITY_BYTES:
        raise InputError(
            "--task=self_training: the clients' predictions of all nodes would take "
            f"{4 * size * len(draws) / 2**30:.0f} GiB; take fewer clients or draws, or "
            "a smaller graph"
        )
    splits = problem.splits([teaching(draw, world) for draw in draws])
    run = train(splits)
    return programs.predict_seeds(
        run.algorithm, run.result.best_state, splits["everything"], nodes.is_drawn
    )


def teaching(draw: Draw, world: World) -> Draw:
    """A draw to train on both halves of, with all nodes as a split `everything`."""
    support, query = draw["train"]
    labelled = NodeSets(
        *(np.concatenate(parts, axis=1) for parts in zip(support, query, strict=True))
    )
    numbers = np.arange(len(world.labels), dtype=np.int32)[None]
    everything = NodeSets(
        numbers, np.zeros_like(numbers), np.ones(numbers.shape, np.float32)
    )
    return draw | {
        "train": Halves(labelled, query),
        "everything": Halves(draw["test"].support, everything),
    }


def self_train(
    problem: Problem, probabilities: Iterable[np.ndarray], per_class: int
) -> PseudoLabels:
    """Enlarges the draws by pseudo-labels, which no scored node gets.

    Args:
      problem: the graph and D draws of labels.
      probabilities: [D, K, N, classes] by the clients' own models.
      per_class: most pseudo-labels of a class that a client adds.
    """
    world = problem.world
    true_labels = problem.dataset.labels[world.copies]
    draws, precision, number = [], [], []
    for draw, own in zip(problem.draws, probabilities, strict=True):
        is_free = world.is_held & ~label_splits.is_scored(draw, world.copies)
        enlarged, pseudo = label_splits.with_pseudo_labels(
            draw, own, is_free, per_class
        )
        draws.append(enlarged)
        precision.append(label_splits.precision(pseudo, true_labels))
        number.append(int(np.sum(pseudo.mask)))
    return PseudoLabels(draws, precision, number)
