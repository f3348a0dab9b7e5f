"""Settings of the SFL study: data, clients, and what tells the methods apart."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

from experiments.studies.options import option
from experiments.studies.traffic import TrafficStudy
from fedjax_graph import data
from fedjax_graph.core.errors import InputError
from fedjax_graph.data.images.label_shards import RelationWeights

Kind = Literal["traffic", "images"]
KINDS = get_args(Kind)
# By dataset or kind: the paper's, where they differ from the tasks' defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    "images": {"methods": ("fed_avg", "sfl"), "num_clients": 100},
    "synthetic_images": {  # a smaller model, so that two cores need a minute or two
        "methods": ("fed_avg", "sfl"),
        "num_clients": 20,
        "width": 8,
        "batch_size": 32,
        "local_epochs": 5,
        "num_rounds": 6,
    },
    "traffic": {"methods": ("fed_avg", "fed_att", "sfl", "sfl_star")},
}


def kind_of(dataset: str) -> Kind:
    """What a dataset holds.

    Raises:
      InputError: if there is no such dataset, or it holds something else.
    """
    kind = data.kind_of(dataset)
    if kind not in KINDS:
        raise InputError(
            f"--dataset={dataset} is one of {kind}; expected traffic or images"
        )
    return kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFLSettings(TrafficStudy):
    """Settings of a comparison on sensors, or on images that clients share by labels.

    Without a dataset: synthetic images and a small model. An option that is None has
    the dataset's value, see `DEFAULTS`, else the task's.
    """

    subject: ClassVar[str] = "SFL and the methods beside it"
    duration: ClassVar[str] = "Without flags: a minute or two on a CPU."
    system: ClassVar[str] = "sfl"

    num_clients: int | None = option(None, "Clients that share the data.", lower=1)
    shards: int = option(2, "Shards a client has of the sorted labels.", lower=1)
    relation_weights: str = option(
        "binary",
        "Of the graph of images: 1 for clients that share one of their five most "
        "frequent labels, or the number that they share (count).",
        choices=get_args(RelationWeights),
    )
    num_images: int | None = option(
        None, "Cut the training images to this many.", lower=1
    )
    num_test_images: int | None = option(
        None, "Cut the test images to this many.", lower=1
    )
    split_ratio: str | None = option(
        None,
        "Of traffic: train, validation and test, in percent; by default 70/10/20, of "
        "LargeST 60/20/20.",
    )
    local_epochs: int | None = option(
        None, "Passes of a client over its data in a round.", lower=1
    )
    batch_size: int | None = option(None, "Examples in a client's minibatch.", lower=1)
    augment: bool = option(
        True, "Of images: crop, mirror and cut out at random in training."
    )
    drop_last: bool = option(
        False, "Of images: leave out a client's last batch where it is not full."
    )
    learning_rate: float | None = option(
        None, "Of the clients' SGD, on images its peak.", lower=0.0
    )
    width: int | None = option(
        None, "Channels of ResNet9's first layer; the paper's: 64.", lower=1
    )
    model: str | None = option(
        None, "The papers': rnn on traffic, resnet9 on images; or a plugin's by name."
    )
    rnn_hidden_size: int | None = option(
        None, "Of the traffic model; the paper's: 64.", lower=1
    )
    propagation_steps: int = option(3, "m of A^m V in SFL.", lower=0)
    alpha: float = option(1.0, "Share of A^m V in SFL's u.", lower=0.0, upper=1.0)
    pull_weight: float | None = option(
        None, "lambda of SFL, of each pull; by default 0.", lower=0.0
    )
    pull_distance: str = option("l2", "R of SFL's pulls.", choices=["l2", "squared_l2"])
    client_start: str = option(
        "global",
        "Where SFL's clients start a round: from w (global), u_i (personal), or the "
        "v_i that they trained last, as in Algorithm 1 (own).",
        choices=["global", "personal", "own"],
    )
    score: str = option(
        "aggregated",
        "Of SFL: u_i, or v_i after local training.",
        choices=["aggregated", "local"],
    )
    client_graph: str = option(
        "given", "none: SFL* learns it from nothing.", choices=["given", "none"]
    )
    structure_target: str = option(
        "distance",
        "What SFL* learns its graph from: the paper's distances, or similarities "
        "(ours).",
        choices=["distance", "similarity"],
    )
    protocol: str = option(
        "paper",
        "code: as in the code released for images, where docs/sfl.md says so.",
        choices=["paper", "code"],
    )

    # --- What is not given ------------------------------------------------------------

    @property
    def dataset_name(self) -> str:
        """Name of the dataset; the synthetic images where none is given."""
        return self.dataset or "synthetic_images"

    @property
    def kind(self) -> Kind:
        """What the dataset holds: traffic or images.

        Raises:
          InputError: if there is no such dataset.
        """
        return kind_of(self.dataset_name)

    def setting(self, name: str, default: Any = None) -> Any:
        """An option's value, else the dataset's default, else `default`."""
        value = getattr(self, name)
        if value is not None:
            return value
        known = DEFAULTS.get(self.dataset_name) or DEFAULTS[self.kind]
        return known.get(name, default)

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Refuses options that would do nothing.

        Raises:
          InputError: naming the first one that is given.
        """
        for name in names:
            if self.is_given(name):
                raise InputError(f"--{name} {reason}")
