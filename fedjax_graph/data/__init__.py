"""Datasets: `load` reads or makes any of them by name; see `catalog`.

Its names are imported when they are first used, as they need every kind of dataset.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_graph.data.catalog import (
        DATASETS,
        kind_of,
        load,
        register_dataset,
        statistics,
    )

__all__ = ["DATASETS", "kind_of", "load", "register_dataset", "statistics"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.catalog"), name)


def __dir__() -> list[str]:
    return __all__
