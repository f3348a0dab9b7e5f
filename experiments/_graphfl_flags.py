"""Flags of GraphFL's binary, the rates of paper and code, and what they choose."""

from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import _flags, _run_flags
from experiments._client_flags import PARTITION
from experiments._node_problem import (
    LABELS_PER_CLASS,
    NUM_TEST,
    OVERLAP,
    TASK,
    Setting,
    is_code,
    is_new_labels,
)
from fedjax_graph.core.errors import InputError
from fedjax_graph.tasks.nodes import MODELS

MODEL = flags.DEFINE_enum("model", "gcn", list(MODELS), "What clients train.")
INNER_STEPS = flags.DEFINE_integer(
    "inner_steps", None, "Gradient steps of a client in a round.", lower_bound=1
)
INNER_RATE = flags.DEFINE_float(
    "inner_rate", None, "alpha, of the clients' steps.", lower_bound=0.0
)
LOCAL_RATE = flags.DEFINE_float(
    "local_rate",
    None,
    "Of the clients' steps in methods other than GraphFL.",
    lower_bound=0.0,
)
OUTER_RATE = flags.DEFINE_float(
    "outer_rate", None, "beta, of GraphFL's server.", lower_bound=0.0
)
FIRST_ORDER = flags.DEFINE_bool(
    "first_order", None, "Meta-gradients without second derivatives (FOMAML)."
)
CHECKPOINT_INNER = flags.DEFINE_bool(
    "checkpoint_inner", False, "Recompute inner steps instead of keeping them."
)
HIDDEN_SIZE = flags.DEFINE_integer("hidden_size", 16, "Of GCN.", lower_bound=1)
DROPOUT = flags.DEFINE_float("dropout", 0.5, "Of GCN's hidden units.", 0.0, 0.99)
PSEUDO_LABELS = flags.DEFINE_integer(
    "pseudo_labels", None, "Of self-training, per class and client (10).", lower_bound=0
)
SWEEP = flags.DEFINE_enum(
    "sweep",
    None,
    ["labels_per_class", "participation", "overlap", "pseudo_labels"],
    "Run GCN and SGC, or --model alone, over several values of that flag, whatever its "
    "own value, and draw the curves.",
)
SWEEP_VALUES = flags.DEFINE_list("sweep_values", None, "By default the paper's.")
_run_flags.refuse_nan(INNER_RATE, LOCAL_RATE, OUTER_RATE, DROPOUT)
flags.set_default(_run_flags.PARTICIPATION, 0.2)
flags.set_default(_run_flags.EVAL_EVERY, 5)

# Name on the command line -> registered method, title.
METHODS = {
    "il": ("local", "IL"),
    "fl": ("fed_avg", "FL"),
    "graphfl": ("graphfl", "GraphFL"),
    "fed_prox": ("fed_prox", "FedProx"),
    "scaffold": ("scaffold", "SCAFFOLD"),
    "ditto": ("ditto", "Ditto"),
    "fed_per": ("fed_per", "FedPer"),
    "lg_fed_avg": ("lg_fed_avg", "LG-FedAvg"),
    "fed_att": ("fed_att", "FedAtt"),
}
SHORT_RUN_LABELS, SHORT_RUN_DRAWS = 40, 3
SWEPT = {
    "labels_per_class": (10, 20, 40, 80),
    "participation": (0.1, 0.2, 0.4, 0.6, 0.8),
    "overlap": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    "pseudo_labels": (0, 5, 10, 15, 20),
}
SWEPT_NEW_LABELS = (2, 6, 10)


class Protocol(NamedTuple):
    """Figures of a task, as the paper or the released code has them."""

    num_rounds: int
    inner_steps: int
    inner_rate: float  # alpha
    local_rate: float  # of other methods
    outer_rate: float  # beta
    outer_optimizer: str = "sgd"
    weight_decay: float = 0.0


# The paper prints no rates: BUILD_NOTES.md says how ours were chosen.
PAPER = {
    "gcn": Protocol(50, 15, 0.1, 0.1, 0.3),
    "sgc": Protocol(50, 15, 0.3, 1.0, 1.0),
}
PAPER_NEW_LABELS = {
    "gcn": Protocol(50, 15, 0.3, 1.0, 0.1),
    "sgc": Protocol(50, 15, 0.3, 1.0, 0.1),
}
CODE = {
    "gcn": Protocol(20, 10, 0.01, 0.01, 0.02, "adam", 5e-4),
    "sgc": Protocol(20, 10, 0.1, 0.1, 0.1, "adam", 5e-4),
}
CODE_NEW_LABELS = Protocol(11, 50, 0.1, 0.1, 0.001, "adam", 5e-4)


def protocol_of(model: str) -> Protocol:
    """The protocol, with what the flags change of it."""
    if is_code():
        chosen = CODE_NEW_LABELS if is_new_labels() else CODE[model]
    else:
        chosen = (PAPER_NEW_LABELS if is_new_labels() else PAPER)[model]
    given = {
        "num_rounds": _run_flags.NUM_ROUNDS.value,
        "inner_steps": INNER_STEPS.value,
        "inner_rate": INNER_RATE.value,
        "local_rate": LOCAL_RATE.value,
        "outer_rate": OUTER_RATE.value,
    }
    return chosen._replace(**{k: v for k, v in given.items() if v is not None})


def chosen_methods() -> list[str]:
    """The methods that the flags name.

    Raises:
      InputError: if one is not known here.
    """
    methods = _run_flags.METHODS.value or ["il", "fl", "graphfl"]
    if methods == ["all"]:
        return list(METHODS)
    for method in methods:
        if method not in METHODS:
            raise InputError(
                f"--methods: unknown method {method!r}; known: all, "
                + ", ".join(METHODS)
            )
    return methods


def first_setting() -> Setting:
    """The flags, with what the protocol says where they are silent.

    Raises:
      InputError: if two of them do not go together.
    """
    if is_new_labels() and (OVERLAP.value is not None or SWEEP.value == "overlap"):
        raise InputError(
            "--overlap is not for --task=new_labels, whose clients hold the whole graph"
        )
    is_swept = SWEEP.value == "pseudo_labels"
    if (PSEUDO_LABELS.present or is_swept) and TASK.value != "self_training":
        raise InputError("pseudo-labels need --task=self_training")
    if is_new_labels() and NUM_TEST.present:
        raise InputError("--num_test is not for --task=new_labels: a task scores 20")
    if PARTITION.present and OVERLAP.value is None and SWEEP.value != "overlap":
        raise InputError("--partition needs --overlap: else all hold the whole graph")
    if SWEEP_VALUES.present and not SWEEP.value:
        raise InputError("--sweep_values needs --sweep")
    if SWEEP.value and _run_flags.EVAL_ONLY.value:
        raise InputError("--eval_only scores a single run; name its folder")
    labels_per_class, num_train = LABELS_PER_CLASS.value, None
    if labels_per_class is None and SWEEP.value != "labels_per_class":
        if is_new_labels():
            labels_per_class = 2
        elif is_code():
            num_train = 300
        else:
            labels_per_class = SHORT_RUN_LABELS if is_short_run() else 80
    pseudo_labels = None
    if TASK.value == "self_training":
        pseudo_labels = 10 if PSEUDO_LABELS.value is None else PSEUDO_LABELS.value
    return Setting(
        model=MODEL.value,
        labels_per_class=labels_per_class,
        participation=_run_flags.PARTICIPATION.value,
        overlap=OVERLAP.value,
        pseudo_labels=pseudo_labels,
        num_train=num_train,
    )


def swept_values() -> list[Any]:
    """The values of --sweep, as the paper has them or as given.

    Raises:
      InputError: if they cannot be read.
    """
    field = SWEEP.value
    if SWEEP_VALUES.value is None:
        if field == "labels_per_class" and is_new_labels():
            return list(SWEPT_NEW_LABELS)
        return list(SWEPT[field])
    try:
        values = [flags.FLAGS[field].parser.parse(x) for x in SWEEP_VALUES.value]
    except ValueError as error:
        raise InputError(f"--sweep_values: {error}") from error
    if not values or any(np.isnan(values)) or len(set(values)) < len(values):
        raise InputError("--sweep_values: expected different numbers")
    return values


def is_short_run() -> bool:
    """Without --dataset: fewer labels, as GraphFL is for, and a few draws."""
    return _flags.DATASET.value is None
