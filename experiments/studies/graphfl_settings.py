"""The options of a GraphFL study, and what they mean together."""

import dataclasses
from typing import Any, ClassVar, Self

from experiments.studies import options
from experiments.studies.graphfl_protocols import (
    CODE_NUM_TRAIN,
    SWEPT,
    SWEPT_NEW_LABELS,
    Protocol,
    protocol_of,
)
from experiments.studies.method_settings import MethodSettings
from experiments.studies.options import option
from fedjax_graph.core.errors import InputError
from fedjax_graph.tasks.nodes import MODELS

SHORT_RUN_LABELS, SHORT_RUN_DRAWS = 40, 3
NEVER = 10**6  # rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphFLSettings(MethodSettings):
    """Settings of GraphFL's comparison on the nodes of one graph."""

    subject: ClassVar[str] = "GraphFL and its tasks"
    duration: ClassVar[str] = "Without flags: a minute or two on a CPU."
    system: ClassVar[str] = "graphfl"

    participation: float = option(
        0.2, "Share of the clients in a round.", lower=1e-9, upper=1.0
    )
    eval_every: int = option(
        5,
        "Rounds between evaluations; where not given, 1 of --protocol=code.",
        lower=1,
    )
    num_seeds: int = option(
        1,
        "Draws of labels run in one program, from --seed on; where not given, "
        f"{SHORT_RUN_DRAWS} without --dataset.",
        lower=1,
    )
    num_clients: int = option(50, "Clients that share the data.", lower=1)
    partition: str = option(
        "random",
        "How a graph is cut into subgraphs.",
        choices=["random", "metis"],
    )
    task: str = option(
        "non_iid",
        "Few and skewed labels a client; test classes that no client has seen; or few "
        "labels and pseudo-labels of each client's own model.",
        choices=["non_iid", "new_labels", "self_training"],
    )
    protocol: str = option(
        "paper",
        "code: as the released code runs it: first-order, Adam as outer step, fewer "
        "rounds, the whole graph, and the highest test accuracy over the rounds.",
        choices=["paper", "code"],
    )
    labels_per_class: int | None = option(
        None,
        "Labelled nodes of a class: of all clients together (80), or for new labels "
        "of each task that is adapted to (2).",
        lower=1,
    )
    overlap: float | None = option(
        None,
        "Clients hold subgraphs and share this part of their nodes with a neighbour; "
        "by default everybody holds the whole graph.",
        lower=0.0,
        upper=1.0,
    )
    num_test: int | None = option(
        None,
        "Nodes to test on, not for new labels; by default 1000, of large graphs 10000.",
        lower=1,
    )
    model: str | None = option(
        None,
        "What clients train: gcn, sgc or a plugin's model, with the rates of gcn; by "
        "default gcn, and in a sweep gcn and sgc.",
    )
    inner_steps: int | None = option(
        None, "Gradient steps of a client in a round.", lower=1
    )
    inner_rate: float | None = option(None, "alpha, of the clients' steps.", lower=0.0)
    local_rate: float | None = option(
        None, "Of the clients' steps in methods other than GraphFL.", lower=0.0
    )
    outer_rate: float | None = option(None, "beta, of GraphFL's server.", lower=0.0)
    first_order: bool | None = option(
        None, "Meta-gradients without second derivatives (FOMAML)."
    )
    checkpoint_inner: bool = option(
        False, "Recompute inner steps instead of keeping them."
    )
    hidden_size: int = option(16, "Of GCN, or of a plugin's model.", lower=1)
    dropout: float = option(0.5, "Of GCN's hidden units.", lower=0.0, upper=0.99)
    pseudo_labels: int | None = option(
        None, "Of self-training, per class and client (10).", lower=0
    )
    sweep: str | None = option(
        None,
        "Run GCN and SGC, or --model alone, over several values of that flag, "
        "whatever its own value, and draw the curves.",
        choices=["labels_per_class", "participation", "overlap", "pseudo_labels"],
    )
    sweep_values: tuple[str, ...] | None = option(None, "By default the paper's.")

    # --- What follows from one option ------------------------------------------------

    @property
    def is_new_labels(self) -> bool:
        """Whether the test classes are those that no client has seen."""
        return self.task == "new_labels"

    @property
    def is_code(self) -> bool:
        """Whether all is done as the released code does it."""
        return self.protocol == "code"

    @property
    def is_short_run(self) -> bool:
        """Whether there are few labels, as GraphFL is for, and a few draws."""
        return self.dataset is None

    @property
    def is_first_order(self) -> bool:
        """Whether meta-gradients go without second derivatives."""
        return self.is_code if self.first_order is None else self.first_order

    @property
    def model_name(self) -> str:
        """Name of what clients train in a single run."""
        return self.model or "gcn"

    @property
    def num_pseudo_labels(self) -> int | None:
        """Pseudo-labels of a class and client; None without self-training."""
        if self.task != "self_training":
            return None
        return 10 if self.pseudo_labels is None else self.pseudo_labels

    # --- What follows from several ---------------------------------------------------

    def resolved(self) -> Self:
        """The study with a model, and the draws and evaluations of a run of its kind.

        Draws and evaluations that were given (`is_given`) stay.
        """
        changes: dict[str, Any] = {}
        if self.model is None and self.sweep is None:
            changes["model"] = self.model_name
        if self.is_short_run and not self.is_given("num_seeds"):
            changes["num_seeds"] = SHORT_RUN_DRAWS
        if self.is_code:  # which scores every round, and never stops
            changes["patience"] = self.patience or NEVER
            if not self.is_given("eval_every"):
                changes["eval_every"] = 1
        return dataclasses.replace(self, **changes)

    def check(self) -> None:
        """Checks that there is such a model and that the options go together.

        Raises:
          InputError: if there is none, or two of them do not.
        """
        if self.model_name not in MODELS:
            raise InputError(
                f"--model={self.model_name}: unknown; known: {', '.join(MODELS)}"
            )
        self.check_given_once("client_optimizer", ("inner_rate", "local_rate"))
        self.check_given_once("server_optimizer", ("outer_rate",))
        for name in filter(self.is_given, ("hidden_size", "dropout")):
            if self.model == "sgc":
                raise InputError(f"--{name}: --model=sgc has no hidden units")
        has_overlap = self.overlap is not None or self.sweep == "overlap"
        if self.is_new_labels and has_overlap:
            raise InputError(
                "--overlap is not for --task=new_labels, whose clients hold the whole "
                "graph"
            )
        has_pseudo_labels = (
            self.pseudo_labels is not None or self.sweep == "pseudo_labels"
        )
        if has_pseudo_labels and self.task != "self_training":
            raise InputError("pseudo-labels need --task=self_training")
        if self.is_new_labels and self.num_test is not None:
            raise InputError(
                "--num_test is not for --task=new_labels: a task scores 20"
            )
        if self.is_given("partition") and not has_overlap:
            raise InputError(
                "--partition needs --overlap: else all hold the whole graph"
            )
        if self.patience is not None and not self.is_code:
            raise InputError(
                "--patience needs --protocol=code: the paper's runs all rounds"
            )
        if self.sweep_values is not None and not self.sweep:
            raise InputError("--sweep_values needs --sweep")
        if self.sweep and self.eval_only:
            raise InputError("--eval_only scores a single run; name its folder")

    def swept_values(self) -> list[float]:
        """The values of the sweep, as the paper has them or as given; none without.

        Raises:
          InputError: if they cannot be read.
        """
        if self.sweep is None:
            return []
        if self.sweep_values is None:
            if self.sweep == "labels_per_class" and self.is_new_labels:
                return list(SWEPT_NEW_LABELS)
            return list(SWEPT[self.sweep])
        kind = options.kind_of(type(self), self.sweep)
        try:
            found = [kind(text) for text in self.sweep_values]
        except ValueError as error:
            raise InputError(f"--sweep_values: {error}") from error
        if len(set(found)) < len(found):
            raise InputError("--sweep_values: expected different numbers")
        return found

    def label_counts(self) -> dict[str, int]:
        """Labelled nodes `labels_per_class` or, of any class, `num_train`."""
        if self.labels_per_class is not None:
            return {"labels_per_class": self.labels_per_class}
        if self.is_new_labels:
            return {"labels_per_class": 2}
        if self.is_code:
            return {"num_train": CODE_NUM_TRAIN}
        return {"labels_per_class": SHORT_RUN_LABELS if self.is_short_run else 80}

    def figures(self) -> Protocol:
        """The protocol's rounds, steps and rates, with what the options change."""
        chosen = protocol_of(
            self.model_name, is_code=self.is_code, is_new_labels=self.is_new_labels
        )
        given = {
            "num_rounds": self.num_rounds,
            "inner_steps": self.inner_steps,
            "inner_rate": self.inner_rate,
            "local_rate": self.local_rate,
        }
        if self.outer_rate is not None:
            given["outer_optimizer"] = dataclasses.replace(
                chosen.outer_optimizer, learning_rate=self.outer_rate
            )
        return chosen._replace(**{k: v for k, v in given.items() if v is not None})

    def described(self) -> dict[str, Any]:
        """What a single run is of, as `results.json` has it."""
        counts = self.label_counts()
        return {
            "model": self.model_name,
            "labels_per_class": counts.get("labels_per_class"),
            "participation": self.participation,
            "overlap": self.overlap,
            "pseudo_labels": self.num_pseudo_labels,
            "num_train": counts.get("num_train"),
        }
