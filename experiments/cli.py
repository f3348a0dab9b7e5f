"""What every binary does with its command line and with errors of its main function."""

import contextlib
import io
import logging as python_logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from absl import app, flags, logging

import fedjax_graph
from experiments import usage
from experiments.studies import options
from fedjax_graph.core import exits, plugins, processes, termination
from fedjax_graph.core.errors import InputError, is_disk_full, one_line
from fedjax_graph.driver import memory

BOM = "\ufeff"  # ahead of what some editors save
RESUME = "with --resume it goes on from the last checkpoint"


def run_study(study_type: type, about: str | None) -> None:
    """Runs the study that the command line says; ends the process.

    Args:
      study_type: whose options are the flags.
      about: docstring of the binary, for `--help`.
    """
    options.define_flags(study_type)

    def main() -> None:
        study = options.from_flags(study_type)
        if flags.FLAGS["help"].value:
            plugins.load_all(getattr(study, "plugin", None) or ())
            print(usage.text(study, about or ""))
        elif flags.FLAGS["version"].value:
            print(f"fedjax_graph {fedjax_graph.__version__}")
        else:
            study.run()

    run(main)


def run(main: Callable[[], Any]) -> None:
    """Runs a binary; a bad flag or an `InputError` becomes one line and status 2.

    So does running out of memory or of space on the disk, and a file that the system
    does not let one read or write. SIGTERM ends in one line and status 143, after the
    round that runs is saved; Ctrl-C at once, with status 130; output that nobody reads
    any more, as of `| head`, with status 141.
    """

    def parse(argv: list[str]) -> list[str]:
        _take_help()
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            _fail(error)
        except UnicodeDecodeError as error:
            _fail(f"--flagfile: expected UTF-8 ({error.reason}); save it so")

    def guarded(argv: list[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.ERROR)  # orbax reports every save
        try:
            if len(argv) > 1:
                mark = "; it begins with a mark of byte order: save it without"
                raise InputError(
                    f"unexpected argument {argv[1]!r}; flags start with --"
                    f"{mark * argv[1].startswith(BOM)}"
                )
            with termination.on_sigterm():
                main()
            if sys.stdout:  # None where it was closed from the start
                sys.stdout.flush()
        except BrokenPipeError:
            exits.say_unread(_how_to_resume())
            _leave(exits.CLOSED)
        except InputError as error:
            _fail(error)
        except termination.Terminated as error:
            _fail(f"{error}{_how_to_resume()}", termination.STATUS, at_once=True)
        except KeyboardInterrupt:
            said = f"interrupted{_how_to_resume()}"
            _fail(said, exits.INTERRUPTED, at_once=True)
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            if is_disk_full(error):
                said = f"the disk is full ({_first_line(error)}); make room"
                _fail(f"{said}{_how_to_resume()}", at_once=True)
            if isinstance(error, OSError):
                if error.filename is None or not error.strerror:
                    raise
                _fail(f"{one_line(str(error.filename))}: {error.strerror}")
            # JAX's are either of the others.
            reason = _first_line(error) or "of the host"
            if processes.is_loss(error):
                _fail(f"the processes no longer work together ({reason}); {RESUME}")
            if not is_out_of_memory(error):
                raise
            _fail(
                f"out of memory: {reason}; take fewer clients at a time with "
                "--clients_per_chunk, or smaller sizes"
            )

    def alone_or_at_once(argv: list[str]) -> None:
        """Of several processes, one that fails does not wait for the others to end."""
        try:
            guarded(argv)
        except BaseException as error:
            if processes.count() == 1 or isinstance(error, SystemExit):
                raise
            traceback.print_exc()
            _leave(1)

    memory.keep_freed()
    _hush_event_loops()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # as of ± where it is no letter
    app.run(alone_or_at_once, flags_parser=parse)


def _take_help() -> None:
    """Makes --help a flag like others; absl's ends the process while it is parsed."""
    for name in ("help", "version"):
        flags.DEFINE_bool(name, False, usage.COMMON[f"--{name}"], allow_override=True)


def _hush_event_loops() -> None:
    """Keeps to itself what reads in flight say when a broken checkpoint ends orbax's.

    They report through asyncio's logger and, from threads, `sys.unraisablehook`; those
    that had not begun are coroutines that nobody awaited. An error of a thread that
    writes, which orbax logs too, is raised where the thread is waited for as well.
    """
    python_logging.getLogger("asyncio").setLevel(python_logging.CRITICAL)
    never = "coroutine .* was never awaited"
    warnings.filterwarnings("ignore", message=never, category=RuntimeWarning)
    logging.get_absl_logger().addFilter(
        lambda record: not (record.exc_info and is_disk_full(record.exc_info[1]))
    )
    report_thread = threading.excepthook

    def thread_hook(ended):
        if not is_disk_full(ended.exc_value):
            report_thread(ended)

    threading.excepthook = thread_hook

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is that of a host or a device without memory left."""
    words = ("RESOURCE_EXHAUSTED", "Out of memory")  # the latter behind INTERNAL
    return isinstance(error, MemoryError) or any(x in str(error) for x in words)


def _how_to_resume() -> str:
    return f"; {RESUME}" if "resume" in flags.FLAGS else ""


def _first_line(error: Exception) -> str:
    return one_line(str(error).partition("\n")[0].rstrip("."))


def _fail(error: Exception | str, status: int = 2, at_once: bool = False) -> NoReturn:
    print(f"error: {with_flags(' '.join(str(error).split()))}", file=sys.stderr)
    _leave(status, at_once)


def _leave(status: int, at_once: bool = False) -> NoReturn:
    """Ends the process; in an orderly way where nothing would be waited for.

    That is other processes, and, `at_once`, threads: orbax's, whose writing failed and
    which wait for each other for minutes, and XLA's, which cannot end as they compile.
    """
    if at_once or processes.count() > 1:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError):  # maybe to the disk that is full
                stream.flush()
        os._exit(status)
    sys.exit(status)


def with_flags(message: str) -> str:
    """A library's message with its arguments as flags: `num_cpu_devices=1` with dashes.

    An argument is told by an underscore in its name or a `=` behind it, so that words
    of plain English stay; `workdir` is none of those. What a user typed stays as it is:
    a message that begins with its flag, what follows a comma, an optimizer's fields.
    """
    if message.startswith("--"):
        return message

    def dashed(match: re.Match[str]) -> str:
        name, rest = match.groups()
        is_argument = "_" in name or rest == "=" or name == "workdir"
        return f"--{name}{rest}" if is_argument and name in flags.FLAGS else match[0]

    return re.sub(
        r"(?<![\w./=',-])(?<!optimizer )([a-z_]+)(=|(?![\w/.]))", dashed, message
    )
