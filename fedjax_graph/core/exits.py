"""How a process ends that is interrupted, or whose output nobody reads any more.

It imports nothing heavy, so that it holds while everything else is imported.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

INTERRUPTED = 128 + signal.SIGINT  # 130, as of a process that the signal has killed
CLOSED = 128 + signal.SIGPIPE  # 141, likewise


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Ends the process in one line where the `with` block is cut off."""
    try:
        yield
        if sys.stdout:  # None where it was closed from the start
            sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`
        say_unread()
        sys.exit(CLOSED)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)


def say_unread(more: str = "") -> None:
    """Says that nobody reads the output, where somebody reads the errors.

    Args:
      more: is said behind it.
    """
    _silence(sys.stdout)
    try:
        print(f"error: nobody reads the output any more{more}", file=sys.stderr)
    except BrokenPipeError:  # both go to one pipe
        _silence(sys.stderr)


def _silence(stream: TextIO | None) -> None:
    """Lets what is still written to a pipe that nobody reads go nowhere."""
    if stream:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
