"""What a run does when its figures are no longer finite, and who began."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import faults
from fedjax_graph.core.errors import InputError

OnNaN = Literal["stop", "skip_client", "ignore"]


class Divergence:
    """Follows the clients of a run, as `RunConfig.on_nan` says.

    `watch` is what its rounds are traced with: nothing unless clients are left out, so
    that a run which stops costs no more than one which ignores what is not finite. It
    finds out whose fault it was by computing the last rounds once more.
    """

    def __init__(self, name: str, on_nan: OnNaN) -> None:
        self._name, self._on_nan = name, on_nan
        self._diverged: dict[int, set[int]] = defaultdict(set)
        self._intact: dict[int, int] = defaultdict(int)  # how many were finite
        self._had_nan: bool | None = None
        self._reasons: set[str] = set()
        skips, found = on_nan == "skip_client", self._reasons.add
        self.watch = faults.Watch(self._report, True, found) if skips else None
        self.search = faults.Watch(self._report, False, found)

    def _report(self, round_, client_ids, weights, is_finite) -> None:
        takes_part = np.asarray(weights) > 0
        is_lost = takes_part & ~np.asarray(is_finite)
        self._diverged[int(round_)] |= set(np.asarray(client_ids)[is_lost].tolist())
        self._intact[int(round_)] += int(np.sum(takes_part & ~is_lost))

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
          InputError: if one is not finite, or no client is left, and this is not to be
            ignored.
        """
        if self._on_nan == "ignore":
            return
        nobody = self._diverged.get(round_) and not self._intact.get(round_)
        if not np.all(np.isfinite(losses)) or nobody:
            self._stop(f"the training loss of round {round_}", again)

    def check_state(
        self,
        round_: int,
        state: Any,
        is_running: np.ndarray,
        again: Callable[[faults.Watch], Any],
    ) -> None:
        """Checks what a checkpoint is to be made of; see `check_losses`.

        Args:
          round_: the last one.
          state: NumPy arrays [seeds, ...].
          is_running: [seeds] bool.
          again: see `check_losses`.

        Raises:
          InputError: if it has a NaN that was not there from the start, and this is not
            to be ignored.
        """
        if self._on_nan == "ignore" or self._had_nan:
            return
        if has_nan(state, is_running):
            self._stop(f"the model after round {round_}", again)

    def start(self, state: Any) -> None:
        """Notes whether a method has NaN in its state by itself."""
        self._had_nan = has_nan(state)

    def _stop(self, what: str, again: Callable[[faults.Watch], Any]) -> None:
        if not self.watch:
            again(self.search)
        found = next(((r, x) for r, x in sorted(self._diverged.items()) if x), None)
        if self._reasons:  # clients that start from what the server computed are next
            found = None
        who = "all clients were finite, what the server computed is not"
        who = "; ".join([who, *sorted(self._reasons)])
        if found:
            ids = sorted(found[1])
            shown = ", ".join(map(str, ids[:5])) + " ..." * (len(ids) > 5)
            who = f"it began in round {found[0]} with client {shown}"
        ways = "try a smaller learning rate"
        if found and not self.watch:
            ways += ", or go on from the last checkpoint with on_nan=skip_client"
        raise InputError(f"{self._name}: {what} is not finite: {who}; {ways}")


def has_nan(tree: Any, rows: Any = slice(None)) -> bool:
    """Whether a pytree of arrays [R, ...] has a NaN in some rows."""
    floats = (x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact))
    return any(np.isnan(np.asarray(x)[rows]).any() for x in floats)
