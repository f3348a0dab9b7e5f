"""Passes stderr on, but for what XLA's log says where a line of our own says it better.

When a process of several is lost, XLA's client ends the others with a log, a stack
trace and SIGABRT, and nothing in them may run any more. So this runs beside a process,
fed by its stderr: it holds back what follows the first line of such a log, and tells in
one line how to go on. Of a compilation that takes two minutes XLA says in a dozen lines
that one may file a bug; there the same script leaves those out.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator

LAST_WORDS = re.compile(rb"[EF]\d{4} [\d:.]+ +\d+ (coordination|client\.h|preemption)")
ABORTED = re.compile(rb"F\d{4} [\d:.]+ +\d+ ")
SECONDS = 5  # within which the last words follow each other
ENDED = (
    b"error: another process of the run has ended, and so do the rest; its own output "
    b"says why; with --resume all go on from the last checkpoint\n"
)
ALARM, RULER = b"slow_operation_alarm.cc", b"*****"
ALARM_SECONDS = 60  # of a compilation, until its alarm is waited for; it comes at 120


def pipe_stderr(what: str) -> int:
    """Sends what goes to stderr from now on through this script, beside the process.

    Args:
      what: `losses`, which `report` deals with, or `alarms`.

    Returns:
      The number of the script's process, which ends when nothing feeds it any more.
    """
    read, write = os.pipe()  # which no other child inherits
    command = [sys.executable, "-S", "-E", __file__, what]
    actions = [(os.POSIX_SPAWN_DUP2, read, 0)]
    process = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
    sys.stderr.flush()
    os.dup2(write, 2)
    os.close(read)
    os.close(write)
    return process


@contextlib.contextmanager
def without_alarms() -> Iterator[None]:
    """A context for a compilation, whose alarm does not reach stderr.

    Nothing happens in its first minute.
    """
    started: list[tuple[int, int]] = []  # the old stderr, and the script's process

    def start() -> None:
        old = os.dup(2)
        started.append((old, pipe_stderr("alarms")))

    timer = threading.Timer(ALARM_SECONDS, start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for old, process in started:
            sys.stderr.flush()
            os.dup2(old, 2)
            os.close(old)
            os.waitpid(process, 0)


def drop_alarms(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Leaves out of lines each alarm: its head, and what stands between two rulers."""
    is_head = is_inside = False
    for line in lines:
        is_ruler = line.startswith(RULER)
        if is_inside:
            is_inside = not is_ruler
        elif ALARM in line:
            is_head = True
        elif is_head and (is_ruler or not line.strip()):
            is_inside, is_head = is_ruler, not is_ruler
        else:
            is_head = False
            yield line


def report(lines, out) -> None:
    """Copies `lines` to `out`, both of bytes, until a process is lost."""
    held, is_told, since = [], False, 0.0
    for line in lines:
        now = time.monotonic()
        if held and now - since > SECONDS and not any(map(ABORTED.match, held)):
            out.writelines(held)  # the process went on
            held = []
        if held or LAST_WORDS.match(line):
            held, since = [*held, line], now
        else:
            is_told |= line.startswith(b"error: ")
            out.write(line)
            out.flush()
    if any(map(ABORTED.match, held)):
        held = [] if is_told else [ENDED]
    out.writelines(held)
    out.flush()


if __name__ == "__main__":
    for sign in (signal.SIGINT, signal.SIGTERM):  # it ends when what feeds it does
        signal.signal(sign, signal.SIG_IGN)
    if sys.argv[1] == "losses":
        report(sys.stdin.buffer, sys.stderr.buffer)
    else:
        for line in drop_alarms(sys.stdin.buffer):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
