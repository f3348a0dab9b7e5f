"""The methods of a GraphFL study, and their configs."""

from typing import Any

from experiments.studies.base import titles_of
from experiments.studies.graphfl_settings import GraphFLSettings
from experiments.studies.methods import check_concerns, having, server_optimizer_of
from fedjax_graph.algorithms.graphfl import ROOTED
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.tasks.nodes import NodeTask

METHODS = (
    *("il", "fl", "graphfl", "fed_prox", "scaffold", "ditto", "fed_per"),
    *("lg_fed_avg", "fed_att", "fed_avg_m", "fed_adam", "fed_yogi"),
)
OWN_TITLES = {"il": "IL", "fl": "FL"}
REGISTERED = {"il": "local", "fl": "fed_avg"}  # names where they are other ones
THREE = ("il", "fl", "graphfl")  # are what the paper compares


def titles() -> dict[str, str]:
    """Titles of the methods of the study, and of users'."""
    return titles_of(METHODS, OWN_TITLES)


def registered_name(method: str) -> str:
    """The name under which `algorithms` has a method of the study."""
    return REGISTERED.get(method, method)


def chosen_methods(study: GraphFLSettings) -> list[str]:
    """The methods of a study, whose optimizers can be read.

    Raises:
      InputError: if one is not known here, an option does not fit it, an optimizer
        cannot be read, or an option concerns none of the methods.
    """
    methods = study.choose_methods(METHODS, THREE)
    study.check_trust(methods, registered_name)
    study.check_settings(methods, registered_name)
    for method in methods:
        client_optimizer(study, method)
        server_optimizer(study, method)
    stepping = having("server_optimizer", methods, registered_name)
    check_concerns(study, ("server_optimizer",), methods, stepping)
    federated = [method for method in methods if method != "il"]
    check_concerns(study, ("participation",), methods, federated)
    of_meta = having("first_order", methods, registered_name)
    check_concerns(study, ("first_order",), methods, of_meta)
    of_graphfl = [method for method in methods if method == "graphfl"]
    check_concerns(study, ("inner_rate", "outer_rate"), methods, of_graphfl)
    if not study.num_pseudo_labels:  # which are of local models, trained before
        others = [method for method in methods if method != "graphfl"]
        check_concerns(study, ("local_rate",), methods, others)
    return methods


def client_optimizer(study: GraphFLSettings, method: str) -> OptimizerConfig:
    """What the clients of a method step with.

    Raises:
      InputError: if the option cannot be read, or GraphFL has no gradient through it.
    """
    figures, is_meta = study.figures(), method == "graphfl"
    rate = figures.inner_rate if is_meta else figures.local_rate
    steps = study.client_steps(OptimizerConfig("sgd", rate))
    if is_meta and not study.is_first_order and steps.name in ROOTED:
        raise InputError(
            f"--client_optimizer={steps.name}: its root has no derivative where a "
            "gradient is 0, which GraphFL needs; give --first_order, or another such "
            "as sgd"
        )
    return steps


def server_optimizer(study: GraphFLSettings, method: str) -> OptimizerConfig | None:
    """What the server of a method steps with; None where it only takes means.

    Raises:
      InputError: if the option cannot be read.
    """
    own = study.figures().outer_optimizer if method == "graphfl" else None
    return server_optimizer_of(study, registered_name(method), own)


def config_values(
    study: GraphFLSettings, method: str, num_features: int, num_classes: int
) -> dict[str, Any]:
    """Values of a method's config fields, by name, and of other methods' fields.

    Args:
      study: the options.
      method: its name in the study.
      num_features: of a node.
      num_classes: of the head.
    """
    figures = study.figures()
    task = NodeTask(
        num_features=num_features,
        num_classes=num_classes,
        model=study.model_name,
        hidden_size=study.hidden_size,
        dropout=study.dropout,
        inner_steps=figures.inner_steps,
        optimizer=client_optimizer(study, method),
        adapt_steps=figures.inner_steps if study.is_new_labels else 0,
        checkpoint_inner=study.checkpoint_inner,
    )
    values = study.trust_values() | {
        "task": task,
        "participation": 1.0 if method == "il" else study.participation,
    }
    if steps := server_optimizer(study, method):
        values["server_optimizer"] = steps
    if method == "graphfl" or study.is_given("first_order"):
        values["first_order"] = study.is_first_order
    if method == "graphfl":
        values["fine_tune"] = not study.is_new_labels
    return values | study.settings_of(method, registered_name(method), values)


def in_effect(study: GraphFLSettings) -> dict[str, Any]:
    """What options stand for that are not given; see `Options.in_effect`."""
    chosen = study.resolved()
    chosen.check()
    figures = chosen.figures()
    return {
        "dataset": chosen.dataset or "synthetic",
        "methods": chosen_methods(chosen),
        "num_rounds": figures.num_rounds,
        "patience": study.patience if study.is_code else None,  # else all are run
        "num_seeds": chosen.num_seeds,
        "eval_every": chosen.eval_every,
        "model": chosen.model or "gcn,sgc",
        "labels_per_class": chosen.label_counts().get("labels_per_class"),
        "num_test": chosen.num_test or "1000 or 10000",
        "inner_steps": figures.inner_steps,
        "inner_rate": figures.inner_rate,
        "local_rate": figures.local_rate,
        "outer_rate": figures.outer_optimizer.learning_rate,
        "client_optimizer": client_optimizer(chosen, "fl"),
        "server_optimizer": server_optimizer(chosen, "graphfl"),
        "first_order": chosen.is_first_order,
        "pseudo_labels": chosen.num_pseudo_labels,
        "sweep_values": chosen.swept_values() or None,
    }
