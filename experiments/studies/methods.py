"""What studies ask of methods: whether options concern them, and their servers' steps.

A study may have a method under a name of its own; `registered` is then the function
that gives the name under which `algorithms` has it.
"""

import dataclasses
from collections.abc import Callable, Iterable

from experiments.studies.base import Study
from fedjax_graph import algorithms
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig, fields_given

TAKES_THE_MEAN = OptimizerConfig("sgd", 1.0)  # of a server that only takes means


def having(
    field: str, methods: Iterable[str], registered: Callable[[str], str] = str
) -> list[str]:
    """Those of some methods whose configs have a field."""
    return [x for x in methods if field in algorithms.get_method(registered(x)).fields]


def check_concerns(
    study: Study,
    names: Iterable[str],
    methods: Iterable[str],
    concerned: Iterable[str],
) -> None:
    """Checks that options that are given concern one of the methods.

    Args:
      study: whose options they are.
      names: of the options.
      methods: those that run.
      concerned: those of them that the options concern.

    Raises:
      InputError: naming the first option that would do nothing.
    """
    if any(concerned):
        return
    for name in filter(study.is_given, names):
        raise InputError(f"--{name} concerns none of the methods {', '.join(methods)}")


def check_participation(
    study: Study, methods: Iterable[str], registered: Callable[[str], str] = str
) -> None:
    """Checks that a cohort trains in every method, where the study has a smaller one.

    Raises:
      InputError: naming a method that is trained and in which all clients take part.
    """
    if study.participation == 1:
        return
    sampling = having("participation", methods, registered)
    check_concerns(study, ("participation",), methods, sampling)
    for name in methods:
        is_trained = algorithms.get_method(registered(name)).is_trained
        if is_trained and name not in sampling:
            raise InputError(
                f"--participation is not for {name}, in which all clients take part"
            )


def server_optimizer_of(
    study: Study,
    method: str,
    own: OptimizerConfig | None = None,
    rate: float | None = None,
) -> OptimizerConfig | None:
    """What the server of a method steps with; None where it only takes means.

    Args:
      study: whose `server_optimizer` changes the default.
      method: as registered.
      own: the study's default, in place of that of the method's config.
      rate: in place of the default's.

    Raises:
      InputError: if the option cannot be read, or makes a server step that otherwise
        takes means, and says of no rate: a mean has 1, at which Adam leads nowhere.
    """
    field = algorithms.get_method(method).fields.get("server_optimizer")
    if field is None:
        return None
    default, text = own or field.default, study.server_optimizer
    is_mean = not isinstance(default, OptimizerConfig)
    if is_mean:
        if text is None:
            return None
        default = TAKES_THE_MEAN
    if rate is not None:
        default = dataclasses.replace(default, learning_rate=rate)
    steps = study.server_steps(default)
    has_rate = rate is not None or "learning_rate" in fields_given(str(text))
    if is_mean and steps.name != default.name and not has_rate:
        raise InputError(
            f"--server_optimizer={text}: give learning_rate, as the server of {method} "
            "has none: it takes means"
        )
    return steps
