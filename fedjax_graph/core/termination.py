"""An orderly end on SIGTERM: what a scheduler sends a while before it kills.

Inside `deferred`, where rounds are trained, the end waits for the round and its
checkpoint (`is_asked`, `end`); elsewhere it is at once. A second SIGTERM ends at once
everywhere.
"""

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn

from fedjax_graph.core import processes

STATUS = 128 + signal.SIGTERM  # 143, as that of a process which the signal has killed
ENDED = "ended by SIGTERM"

_is_asked = False
_num_deferring = 0


class Terminated(SystemExit):
    """Ends the process with `STATUS`, and says how far it has come."""

    def __init__(self, message: str) -> None:
        super().__init__(STATUS)
        self.message = message

    def __str__(self) -> str:
        return self.message


@contextlib.contextmanager
def on_sigterm() -> Iterator[None]:
    """Makes SIGTERM an orderly end inside the `with` block; for the main thread."""
    global _is_asked
    _is_asked = False
    before = signal.signal(signal.SIGTERM, _ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _is_asked = False


def _ask(number: int, frame: object) -> None:
    del number, frame
    global _is_asked
    was_asked, _is_asked = _is_asked, True
    if was_asked or not _num_deferring:
        raise Terminated(ENDED)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Lets a SIGTERM wait, inside the `with` block, for who asks `is_asked`.

    Raises:
      Terminated: if one has come before, whose exception was lost: Python passes over
        those raised while it collects garbage.
    """
    global _num_deferring
    if _is_asked and not _num_deferring:
        raise Terminated(ENDED)
    _num_deferring += 1
    try:
        yield
    finally:
        _num_deferring -= 1


def is_asked() -> bool:
    """Tells whether a SIGTERM has come, to any of several processes."""
    return any(processes.gather("asked" if _is_asked else ""))


def end(reached: str) -> NoReturn:
    """Ends as a SIGTERM asks to.

    Args:
      reached: what is done and saved, for the message.

    Raises:
      Terminated: always.
    """
    raise Terminated(f"ended by SIGTERM after {reached}, which is saved")
