"""What a run does when its figures are no longer finite, and who began."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import faults, mesh, processes
from fedjax_graph.core.algorithm import NO_LOSS
from fedjax_graph.core.errors import InputError

OnNaN = Literal["stop", "skip_client", "ignore"]


class Divergence:
    """Follows the clients of a run, as `RunConfig.on_nan` says.

    `watch` is what its rounds are traced with: nothing unless clients are left out, so
    that a run which stops costs no more than one which ignores what is not finite. It
    finds out whose fault it was by computing the last rounds once more. Of several
    processes the first alone is told of clients, so the others ask it.
    """

    def __init__(self, name: str, on_nan: OnNaN) -> None:
        self._name, self._on_nan = name, on_nan
        self._diverged: dict[int, set[int]] = defaultdict(set)
        self._deserted: set[int] = set()  # rounds with a cohort that lost everybody
        self._kinds: list[np.ndarray] | None = None  # of the first state's numbers
        self._reasons: dict[str, int] = {}  # and the first round of each
        skips, explain = on_nan == "skip_client", self._explain
        self.watch = faults.Watch(self._report, True, explain) if skips else None
        self.search = faults.Watch(self._report, False, explain)

    def _report(self, round_, client_ids, weights, is_finite, is_trial=False) -> None:
        """Takes note of one cohort of one seed; a round may have several of them."""
        takes_part = np.asarray(weights) > 0
        is_lost = takes_part & ~np.asarray(is_finite)
        if not round_ or not is_lost.any():
            return
        self._diverged[int(round_)] |= set(np.asarray(client_ids)[is_lost].tolist())
        if not is_trial and is_lost.sum() == takes_part.sum():
            self._deserted.add(int(round_))

    def _explain(self, round_: int, reason: str) -> None:
        self._reasons[reason] = min(round_, self._reasons.get(reason, round_))

    def skipped(self, round_: int) -> list[int]:
        """The clients that were left out of a round, by any seed."""
        return sorted(self._diverged.pop(round_, ())) if self.watch else []

    def check_losses(
        self, round_: int, losses: np.ndarray, again: Callable[[faults.Watch], Any]
    ) -> None:
        """Checks the training losses of a round.

        Args:
          round_: its number.
          losses: [seeds], of those that still run.
          again: computes the rounds since the last checkpoint, watched.

        Raises:
          InputError: if one is not finite, or no client of a cohort is left, and this
            is not to be ignored.
        """
        if self._on_nan == "ignore":
            return
        is_bad = not np.all(np.isfinite(losses[losses != NO_LOSS]))
        if self.watch:
            is_bad |= processes.any_says(round_ in self._deserted)
        if is_bad:
            self._stop(f"the training loss of round {round_}", again)

    def check_state(
        self,
        round_: int,
        state: Any,
        is_watched: np.ndarray,
        first_state: Callable[[], Any],
        again: Callable[[faults.Watch], Any],
    ) -> None:
        """Checks what a checkpoint is to be made of; see `check_losses`.

        Args:
          round_: the last one.
          state: arrays [seeds, ...], also those spread over processes, which all have
            to call this then.
          is_watched: [seeds] bool, of those that ran since the last one.
          first_state: computes the state before the first round, likewise.
          again: see `check_losses`.

        Raises:
          InputError: if a number is not finite that was in the first state, or is NaN
            where that was infinite, as a score of nothing yet, and this is not to be
            ignored.
        """
        if self._on_nan == "ignore":
            return
        found = floats(state)
        if not processes.any_says(not all(np.isfinite(x).all() for x in found)):
            return
        if self._kinds is None:
            self._kinds = [kinds(x) for x in floats(first_state())]
        pairs = zip(found, self._kinds, strict=True)
        is_worse = any(np.any((kinds(x) > first)[is_watched]) for x, first in pairs)
        if processes.any_says(is_worse):
            self._stop(f"the model after round {round_}", again)

    def _stop(self, what: str, again: Callable[[faults.Watch], Any]) -> None:
        if not self.watch:
            again(self.search)
        found = next(((r, x) for r, x in sorted(self._diverged.items()) if x), None)
        began = min(self._reasons.values(), default=None)
        if found and began is not None and began < found[0]:
            found = None  # they started from what the server had computed
        who = "all clients were finite, what the server computed is not"
        who = "; ".join([who, *sorted(self._reasons)])
        if found:
            ids = sorted(found[1])
            shown = ", ".join(map(str, ids[:5])) + " ..." * (len(ids) > 5)
            who = f"it began in round {found[0]} with client {shown}"
        ways = "try a smaller learning rate"
        if found and not self.watch:
            ways += ", or go on from the last checkpoint with on_nan=skip_client"
        said = processes.gather(f"{who}; {ways}")[0]
        raise InputError(f"{self._name}: {what} is not finite: {said}")


def floats(tree: Any) -> list[np.ndarray]:
    """This process's parts of the arrays that may hold what is not finite."""
    found = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return [part for x in found for _, part in mesh.own_parts(x)]


def kinds(x: np.ndarray) -> np.ndarray:
    """Marks each number of an array: 0 if it is finite, 1 if infinite, 2 if NaN."""
    return np.isnan(x) * np.int8(2) + np.isinf(x)
