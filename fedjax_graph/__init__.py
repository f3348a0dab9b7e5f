"""Federated graph learning in functional JAX: the names that a user composes with.

`import fedjax_graph as fg` imports nothing else; a name is imported when it is first
used, so that listing methods or reading a file needs no accelerator.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_graph.algorithms import get_method, make_config, register_method
    from fedjax_graph.core import aggregation, plugins
    from fedjax_graph.core.aggregators import register_aggregator
    from fedjax_graph.core.algorithm import FederatedAlgorithm
    from fedjax_graph.core.clients import Cohort, map_clients
    from fedjax_graph.core.errors import InputError
    from fedjax_graph.core.federated import (
        FederatedConfig,
        federated,
        federated_round,
    )
    from fedjax_graph.core.local import local_update
    from fedjax_graph.core.mesh import make_mesh
    from fedjax_graph.core.optimizers import OptimizerConfig
    from fedjax_graph.core.task import Task
    from fedjax_graph.data.catalog import load, register_dataset
    from fedjax_graph.driver.config import RunConfig
    from fedjax_graph.driver.rounds import run

__version__ = "0.1.0"

__all__ = [
    "Cohort",
    "FederatedAlgorithm",
    "FederatedConfig",
    "InputError",
    "OptimizerConfig",
    "RunConfig",
    "Task",
    "__version__",
    "aggregation",
    "federated",
    "federated_round",
    "get_method",
    "load",
    "local_update",
    "make_config",
    "make_mesh",
    "map_clients",
    "plugins",
    "register_aggregator",
    "register_dataset",
    "register_method",
    "run",
]

_MODULES = {
    "algorithms": ("get_method", "make_config", "register_method"),
    "core": ("aggregation", "plugins"),
    "core.aggregators": ("register_aggregator",),
    "core.algorithm": ("FederatedAlgorithm",),
    "core.clients": ("Cohort", "map_clients"),
    "core.errors": ("InputError",),
    "core.mesh": ("make_mesh",),
    "core.federated": ("FederatedConfig", "federated", "federated_round"),
    "core.local": ("local_update",),
    "core.optimizers": ("OptimizerConfig",),
    "core.task": ("Task",),
    "data.catalog": ("load", "register_dataset"),
    "driver.config": ("RunConfig",),
    "driver.rounds": ("run",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_PLACES[name]}")
    if not hasattr(module, name):  # a module of a package
        return importlib.import_module(f"{module.__name__}.{name}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return __all__
