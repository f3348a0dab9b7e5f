"""Lines of XLA's log that do not reach stderr."""

import subprocess
import sys

import pytest

from fedjax_graph.core import reporter

HEAD = b"E1122 21:39:33.468398   11193 slow_operation_alarm.cc:73] \n"
END = HEAD[:-2] + b"The operation took 2m9.305s\n"
RULER = b"********************************\n"
TEXT = b"[Compiling module jit_round] Very slow compile? If you want to file a bug\n"
ALARM = [HEAD, RULER, TEXT, RULER, END, b"\n", RULER, TEXT, RULER]


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ([b"a\n", *ALARM, b"b\n"], [b"a\n", b"b\n"]),
        ([RULER, TEXT], [RULER, TEXT]),  # of somebody else
        ([HEAD, b"an error\n", RULER], [b"an error\n", RULER]),
        ([b"a\n", HEAD, RULER, TEXT], [b"a\n"]),
    ],
)
def test_an_alarm_is_left_out(lines, kept):
    assert list(reporter.drop_alarms(lines)) == kept


PROGRAM = """
import os, time
from fedjax_graph.core import reporter
reporter.ALARM_SECONDS = 0
with reporter.without_alarms():
    time.sleep(0.3)
    os.write(2, {alarm!r} + b"what the compiler says\\n")
os.write(2, b"later\\n")
"""


def test_what_the_compiler_says_else_passes():
    program = PROGRAM.format(alarm=b"".join(ALARM))
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True
    )
    assert process.stderr == b"what the compiler says\nlater\n"
