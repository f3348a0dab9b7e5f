"""Passes stderr on, and makes one line of what XLA says when a process is lost.

XLA's client ends its process then, with a log, a stack trace and SIGABRT, and nothing
in that process may run any more. So this runs beside it, fed by its stderr: it holds
back what follows the first line of such a log, and tells in one line how to go on.
"""

import re
import signal
import sys
import time

LAST_WORDS = re.compile(rb"[EF]\d{4} [\d:.]+ +\d+ (coordination|client\.h|preemption)")
ABORTED = re.compile(rb"F\d{4} [\d:.]+ +\d+ ")
SECONDS = 5  # within which the last words follow each other
ENDED = (
    b"error: another process of the run has ended, and so do the rest; its own output "
    b"says why; with --resume all go on from the last checkpoint\n"
)


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
    report(sys.stdin.buffer, sys.stderr.buffer)
