"""What every binary does with an error of its main function."""

import os
import subprocess
import sys

import pytest

from experiments import cli
from tests.experiments import binary, forks

MAIN = """
import jax.numpy as jnp
from experiments import cli

def main():
    {body}

cli.run(main)
"""


def run(body):
    return forks.run(MAIN.format(body=body), environment=dict(os.environ))


MEMORY = ("out of memory: ", "--clients_per_chunk")
DISK = ("the disk is full (", "make room")
# As where a disk is full, in a thread of orbax's, which logs it.
ORBAX = """
import tempfile, orbax.checkpoint as ocp
from etils.epath import abstract_path
def full(*args):
    raise OSError(28, "No space left on device")
abstract_path.Path.write_text = full
with tempfile.TemporaryDirectory() as folder:
    manager = ocp.CheckpointManager(folder)
    manager.save(1, args=ocp.args.Composite(x=ocp.args.JsonSave({})))
    manager.wait_until_finished()
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("jnp.zeros((10**7, 10**7)).block_until_ready()", MEMORY),
        ("raise MemoryError", MEMORY),
        (
            "raise RuntimeError('INTERNAL: Error dispatching: "
            "Out of memory allocating 1')",
            MEMORY,
        ),
        ("raise OSError(28, 'No space left on device')", DISK),
        (
            "raise ValueError('RESOURCE_EXHAUSTED: a/0: No space left on device [os]')",
            DISK,
        ),
        ("import os; os.write(os.open('/dev/full', os.O_WRONLY), b'a')", DISK),
        (f"exec({ORBAX!r})", DISK),
    ],
)
def test_running_out_of_something_is_one_line_that_says_what_to_do(body, said):
    process = run(body)
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"error: {said[0]}") and said[1] in line


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("open('absent/x.npz', 'wb')", "absent/x.npz: No such file or directory"),
        ("import os; os.listdir('/dev/null')", "/dev/null: Not a directory"),
        ("raise PermissionError(13, 'Permission denied', 'x')", "x: Permission denied"),
        ("import os; os.stat('n' * 300)", f"{'n' * 300}: File name too long"),
    ],
)
def test_a_file_that_the_system_refuses_is_one_line(body, line):
    process = run(body)
    assert (process.returncode, process.stderr) == (2, f"error: {line}\n")


@pytest.mark.parametrize(
    ("sign", "status", "words"),
    [("SIGTERM", 143, "ended by SIGTERM"), ("SIGINT", 130, "interrupted")],
)
def test_a_signal_ends_in_one_line(sign, status, words):
    """Also where the tests run in the background, for which a shell ignores SIGINT."""
    process = run(
        "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"os.kill(os.getpid(), signal.{sign})"
    )
    assert (process.returncode, process.stderr) == (status, f"error: {words}\n")


@pytest.mark.parametrize(("sign", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_waits_for_no_thread(sign, status):
    """As of XLA's, which crash where the interpreter ends while they compile."""
    process = run(
        "import os, signal, sys, threading, time; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "late = lambda: (time.sleep(3), print('late', file=sys.stderr)); "
        "threading.Thread(target=late).start(); "
        f"os.kill(os.getpid(), signal.{sign}); time.sleep(1)"
    )
    assert process.returncode == status
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT])
def test_output_that_nobody_reads_ends_in_one_line(flush, stderr):
    """Whether it is written at once or when the process ends; errors may go there."""
    binary.assert_unread_is_said(
        ["-c", MAIN.format(body=f"print('x', flush={flush})")], stderr
    )


def test_ctrl_c_while_a_binary_is_imported_is_one_line():
    program = "import sys; sys.argv = ['-m']; import experiments; "
    process = subprocess.run(
        [sys.executable, "-c", f"{program} raise KeyboardInterrupt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (130, "error: interrupted\n")


SIGTERM = "os.kill(os.getpid(), signal.SIGTERM)"
DEFERRED = "block = termination.deferred(); block.__enter__()"


@pytest.mark.parametrize(
    ("lines", "said", "end"),
    [
        (  # one waits for what is being saved
            (
                *(DEFERRED, SIGTERM, "print('on')"),
                "termination.is_asked() and termination.end('round 3')",
            ),
            "",
            " after round 3, which is saved",
        ),
        (  # and one that Python loses while it collects garbage for the next rounds
            (
                f"of = {{'__del__': lambda self: {SIGTERM}}}",
                "type('Lost', (), of)()",
                *("print('on')", DEFERRED, "print('rounds')"),
            ),
            "Exception ignored in",
            "",
        ),
    ],
    ids=["waits", "lost"],
)
def test_a_sigterm_ends_in_one_line_and_its_status(lines, said, end):
    program = ("import os, signal", "from fedjax_graph.core import termination", *lines)
    process = run("; ".join(program))
    assert (process.returncode, process.stdout) == (143, "on\n")
    *before, last = process.stderr.splitlines()
    assert last == f"error: ended by SIGTERM{end}"
    assert bool(before) == bool(said) and said in process.stderr


def test_an_error_of_our_own_is_not_hidden():
    process = run("raise RuntimeError('a bug')")
    assert process.returncode == 1 and "RuntimeError: a bug" in process.stderr


def test_a_librarys_arguments_are_named_as_flags():
    body = "from fedjax_graph.core.errors import InputError; raise InputError({!r})"
    message = "/a/data_dir/x: absent; name another workdir, or verbosity=1 or seeds"
    process = run("pass")
    assert process.returncode == 0
    process = run(body.format(message))
    expected = message.replace("verbosity=1", "--verbosity=1")
    assert process.stderr == f"error: {expected}\n"  # this binary has no --workdir


def test_what_a_user_typed_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(cli.flags, "FLAGS", {"learning_rate": None, "schedule": None})
    for message in (
        "--client_optimizer=sgd,learning_rate=-1: optimizer learning_rate=-1.0: no",
        "optimizer 'sgd,learning_rate=x': x is no number",
        "optimizer learning_rate=-1: expected 0 or more",
        "--client_optimizer=sgd,learning_rate=x: learning_rate is 'x'",
    ):
        assert cli.with_flags(message) == message
    assert cli.with_flags("learning_rate=-1: no") == "--learning_rate=-1: no"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"# caf\xe9\n--version\n", "--flagfile: expected UTF-8"),
        (b"\xef\xbb\xbf--version\n", "it begins with a mark of byte order: save it w"),
    ],
)
def test_a_flagfile_of_another_editor_is_one_line(tmp_path, content, words):
    path = tmp_path / "mine.flags"
    path.write_bytes(content)
    process = subprocess.run(
        [sys.executable, "-m", "experiments.tables", f"--flagfile={path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2 and words in process.stderr
    assert process.stderr.count("\n") == 1


def test_a_terminal_of_few_letters_gets_what_it_has(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", MAIN.format(body="print('1 \\xb1 2')")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (process.returncode, process.stdout) == (0, "1 ? 2\n")


def test_reads_that_a_broken_checkpoint_ends_say_nothing():
    """Nor those that had not begun, whose coroutines nobody awaits."""
    code = "async def read(): pass\nread()"
    hushed = f"from experiments import cli\ncli._hush_event_loops()\n{code}"
    said = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", text],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for text in (code, hushed)
    ]
    assert "never awaited" in said[0] and not said[1]
