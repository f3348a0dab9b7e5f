"""Aggregators by name: those that need nothing but the cohort.

`aggregation` and `robust` have the functions; here are the names that a config gives.
"""

import contextlib
import dataclasses
import functools
import inspect
from typing import Any, cast

from fedjax_graph.core import aggregation, robust
from fedjax_graph.core.aggregation import Aggregator
from fedjax_graph.core.checks import Checked, limited
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.registry import Registry
from fedjax_graph.core.robust import TOLERANCE

AGGREGATORS: Registry[Aggregator] = Registry(
    "aggregator",
    {
        "median": aggregation.median,
        "weighted_mean": aggregation.weighted_mean,
        "geometric_median": robust.geometric_median,
        "krum": robust.krum,
        "multi_krum": robust.multi_krum,
        "trimmed_mean": robust.trimmed_mean,
    },
    is_callable=True,
)
"""Name -> aggregator."""
register_aggregator = AGGREGATORS.registering()


def takes_tolerance(name: str) -> bool:
    """Tells whether an aggregator of that name has a parameter `tolerance`.

    Raises:
      InputError: if there is none of that name.
    """
    return _tolerance_of(name) is not None


def _tolerance_of(name: str) -> inspect.Parameter | None:
    aggregate = AGGREGATORS.look_up(name)
    with contextlib.suppress(TypeError, ValueError):  # which some builtins raise
        return inspect.signature(aggregate).parameters.get("tolerance")
    return None


def tolerant_names() -> str:
    """Lists the aggregators with such a parameter, for messages."""
    return ", ".join(filter(takes_tolerance, AGGREGATORS))


def named(name: str, tolerance: float = TOLERANCE) -> Aggregator:
    """An aggregator, told how many clients to withstand, if it asks for that.

    Args:
      name: of the aggregator.
      tolerance: for it; the default leaves it its own, if it has one.

    Raises:
      InputError: if there is none of that name.
    """
    aggregate = AGGREGATORS.look_up(name)
    parameter = _tolerance_of(name)
    has_own = parameter is None or parameter.default is not parameter.empty
    if parameter is None or (has_own and tolerance == TOLERANCE):
        return aggregate
    return functools.partial(cast(Any, aggregate), tolerance=tolerance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedAggregator(Checked):
    """Configures which of `AGGREGATORS` merges the clients' models."""

    aggregator: str = limited("weighted_mean", choices=AGGREGATORS)
    # share of a cohort that the trimmed mean, Krum and multi-Krum withstand
    tolerance: float = limited(TOLERANCE, lower=0, below=0.5)

    def __post_init__(self) -> None:
        """Checks types and limits; raises `InputError`."""
        super().__post_init__()
        if self.tolerance != TOLERANCE and not takes_tolerance(self.aggregator):
            raise InputError(
                f"tolerance={self.tolerance}: aggregator={self.aggregator!r} takes "
                f"none; {tolerant_names()} do"
            )

    def named_aggregator(self) -> Aggregator:
        """The aggregator; by default the mean by number of examples."""
        return named(self.aggregator, self.tolerance)
