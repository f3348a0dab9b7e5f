"""The contract of every method: four pure functions that a run calls.

State comes first in and first out, so a round is a `lax.scan` body and a method can be
mapped over seeds. Data is an argument, never a closed-over constant.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_graph.core.privacy import Privacy

State = Any  # pytree of arrays
Data = Any  # pytree of arrays: one split of a dataset
Metrics = dict[str, Any]  # pytree of arrays


class FederatedAlgorithm(NamedTuple):
    """A federated method, built by a factory that closes over a frozen config.

    All four functions are pure and jittable. The fields after them describe the method.
    """

    init: Callable[[jax.Array, Data], State]  # (key, training data)
    round: Callable[[State, Data, jax.Array], tuple[State, Metrics]]
    """One communication round: (state, training data, key of the round)."""
    evaluate: Callable[[State, Data], Metrics]
    """Scores a state on a split; `monitor` names what the best round is chosen by."""
    predict: Callable[[State, Data], jax.Array]
    """The model's outputs for a split, in the units of the data."""
    monitor: str = "loss"
    """The metric of `evaluate`, one number, whose lowest value on the validation split
    makes the best round; `error` where it is a share of wrong answers."""
    privacy: Privacy | None = None
    """What hides what a client sends, if anything: a run then states what it costs."""
    reads_all_clients: bool = False
    """Whether a round reads what clients outside of its cohort keep, so that the rows
    of the cohort are not enough."""
    client_data: Callable[[Data], Any] | None = None
    """Data -> what each client trains on, [K, ...], as of the task; None: not said."""
