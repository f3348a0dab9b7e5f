"""The contract of every method: four pure functions that a run calls.

State comes first in and first out, so a round is a `lax.scan` body and a method can be
mapped over seeds. Data is an argument, never a closed-over constant.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from fedjax_graph.core import faults, trees
from fedjax_graph.core.privacy import Privacy

State = Any  # pytree of arrays
Data = Any  # pytree of arrays: one split of a dataset
Metrics = dict[str, Any]  # pytree of arrays

NO_LOSS = -math.inf  # the training loss of a round in which nobody took part


class Phase(NamedTuple):
    """What the rounds of a method do from one of them on, up to the next phase."""

    first_round: int  # 1 is the first of a run
    round: Callable[[State, Data, jax.Array], tuple[State, Metrics]]
    opening: Callable[[State, Data], Any] | None = None
    """Marks what crosses once, before the first of these rounds, for the ledger alone:
    it is traced, and not run."""


class FederatedAlgorithm(NamedTuple):
    """A federated method, built by a factory that closes over a frozen config.

    All four functions are pure and jittable. The fields after them describe the method.
    In a run `evaluate` and `predict` see what `kept` leaves of a state.
    """

    init: Callable[[jax.Array, Data], State]  # (key, training data)
    round: Callable[[State, Data, jax.Array], tuple[State, Metrics]]
    """One communication round: (state, training data, key of the round). Its metrics
    are single numbers, none called `validation`; `train_loss` is one of them, `NO_LOSS`
    where nobody took part, which a run leaves out."""
    evaluate: Callable[[State, Data], Metrics]
    """Scores a state on a split; `monitor` names what the best round is chosen by."""
    predict: Callable[[State, Data], jax.Array]
    """The model's outputs for a split, in the units of the data."""
    monitor: str = "loss"
    """The metric of `evaluate`, one number, whose lowest value on the validation split
    makes the best round; `error` where it is a share of wrong answers."""
    privacy: Privacy | None = None
    """Settings of differential privacy; with them a run reports the epsilon spent."""
    reads_all_clients: bool = False
    """Whether a round reads what clients outside of its cohort keep, so that the rows
    of the cohort are not enough."""
    participation: float = 1.0
    """The share of the clients that a round samples."""
    phases: tuple[Phase, ...] = ()
    """The phases, in order, of a method whose later rounds do something else; `round`
    is then made by `by_phase`. The last phase trains what is scored: the best round is
    one of its rounds."""
    client_data: Callable[[Data], Any] | None = None
    """Split -> what each client trains on, [K, ...], as `Task.client_data`; None: not
    known."""
    exchange: Callable[[Data], dict[str, Any]] | None = None
    """What clients tell each other of their data once, before anything else: a split,
    a NamedTuple -> the fields of it that the four functions read with other values.
    It is pure and jittable as well. A run calls it; who calls the functions by hand
    gives them what `prepared` makes of a split. `communication.up` and `down` in it
    are counted as those of `init`."""
    kept: Callable[[State], State] = trees.without_opt_state
    """State -> what a run keeps of it where it is the best one: without the parts, such
    as an optimizer's moments or what a client remembers, that `evaluate` and `predict`
    do not read. By default those whose names end with `opt_state` become None."""

    def prepared(self, data: Data) -> Data:
        """A split as `init`, `round`, `evaluate` and `predict` read it."""
        return data._replace(**self.exchange(data)) if self.exchange else data

    @property
    def scored_from(self) -> int:
        """The first of the rounds that train what is scored."""
        return self.phases[-1].first_round if self.phases else 1

    def during(self, first_round: int, last_round: int) -> "FederatedAlgorithm":
        """This method for some rounds: where all are of one phase, with its `round`."""
        begun = [x for x in self.phases if x.first_round <= last_round]
        if not begun or begun[-1].first_round > first_round:
            return self
        return self._replace(round=begun[-1].round)


def by_phase(
    phases: Sequence[Phase], rounds_so_far: Callable[[State], jax.Array]
) -> Callable[[State, Data, jax.Array], tuple[State, Metrics]]:
    """Makes a `round` that computes the one phase which it belongs to.

    Args:
      phases: in order, the first one from round 1 on.
      rounds_so_far: state -> their number.
    """

    def round_(state, data, key):
        number = rounds_so_far(state) + 1
        index = sum(number >= phase.first_round for phase in phases[1:])

        def watched(place, phase):
            def branch(*args):
                with faults.watched_if(index == place):
                    return phase.round(*args)

            return branch

        branches = [watched(i, phase) for i, phase in enumerate(phases)]
        return jax.lax.switch(index, branches, state, data, key)

    return round_
