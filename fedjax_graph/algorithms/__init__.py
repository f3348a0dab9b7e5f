"""Every method under one name each; the conformance suite runs over this table."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_graph.algorithm import FederatedAlgorithm
from fedjax_graph.algorithms import cnfgnn, fed_avg, naive
from fedjax_graph.errors import InputError


class Method(NamedTuple):
    """A registered method: `factory(config_type(...))` is its algorithm."""

    config_type: type
    factory: Callable[[Any], FederatedAlgorithm]
    is_trained: bool = True


REGISTRY: dict[str, Method] = {
    "cnfgnn": Method(cnfgnn.CNFGNNConfig, cnfgnn.cnfgnn),
    "gru_fedavg": Method(fed_avg.FedAvgConfig, fed_avg.gru_fed_avg),
    "historical_average": Method(
        naive.NaiveConfig, naive.historical_average, is_trained=False
    ),
    "persistence": Method(naive.NaiveConfig, naive.persistence, is_trained=False),
}


def get_method(name: str) -> Method:
    """Looks a method up.

    Raises:
      InputError: if there is none of that name.
    """
    if name not in REGISTRY:
        raise InputError(f"unknown method {name!r}; known: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def make_config(name: str, values: dict[str, Any]) -> Any:
    """A method's config from those of `values` that are its fields."""
    fields = {field.name for field in dataclasses.fields(get_method(name).config_type)}
    chosen = {key: value for key, value in values.items() if key in fields}
    for key, value in chosen.items():
        if isinstance(value, list):
            chosen[key] = tuple(value)
    return get_method(name).config_type(**chosen)
