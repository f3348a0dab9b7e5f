"""Several processes that run one program together, each with devices of its own.

Hosts of a TPU pod slice need a process each, and so do those of a cluster; the GPUs of
a machine may have one process or one each. All of them run the same command on the same
files, `join` first, and meet in every collective; the mesh is of the devices of all.
The first process alone writes; to save a checkpoint orbax lets all of them meet.
"""

import functools
import itertools
import pathlib
import re
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src import distributed  # which says who this is before there are devices

from fedjax_graph.core import reporter
from fedjax_graph.core.errors import InputError

SILENT_SECONDS = 20  # after which a process counts as lost
START_SECONDS = 120  # that a process waits for the others to join
MEETING_SECONDS = 1800  # and to come to a place in the program
LOSS = re.compile(
    "Gloo|NCCL|Connection (closed|reset)|coordination service|UNAVAILABLE|DEADLINE_EXC"
)
_meetings = itertools.count()

F = TypeVar("F", bound=Callable[..., Any])


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Makes this process one of several; before JAX has been used for anything else.

    What is None is found by `jax.distributed.initialize`, as under Slurm and Open MPI
    and on a TPU pod slice. From then on a process that is lost ends the others within
    a minute, with one line on stderr and a status that is not 0.

    Args:
      coordinator: address and port of the first process, such as `10.0.0.1:1234`.
      num_processes: how many there are.
      process_id: which one this is, from 0.

    Raises:
      InputError: if the arguments make no sense, or the others do not come.
    """
    if jax.distributed.is_initialized():
        return
    _check(coordinator, num_processes, process_id)
    reporter.pipe_stderr("losses")
    # Which only notes a SIGTERM, that should end the process.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=SILENT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"coordinator={coordinator}, num_processes={num_processes}, "
            f"process_id={process_id}: the processes did not come together ({reason})"
        ) from error


def _check(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise InputError(
                f"coordinator={coordinator}: expected an address and a port, such as "
                "10.0.0.1:1234"
            )
    if num_processes is not None and num_processes < 1:
        raise InputError(f"num_processes={num_processes}: expected at least 1")
    if process_id is not None and not 0 <= process_id < (num_processes or 2**31):
        raise InputError(
            f"process_id={process_id}: expected 0 to num_processes - 1, with "
            f"num_processes={num_processes}"
        )


def count() -> int:
    """The number of processes: 1 unless they were joined."""
    return distributed.global_state.num_processes


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return distributed.global_state.process_id == 0


def is_loss(error: BaseException) -> bool:
    """Whether an error is that of a collective whose other processes are lost."""
    return count() > 1 and LOSS.search(str(error)) is not None


def by_first(write: F) -> F:
    """Decorates what writes or prints: the other processes leave it out."""

    @functools.wraps(write)
    def wrapped(*args, **kwargs):
        return write(*args, **kwargs) if is_first() else None

    return wrapped  # pyright: ignore[reportReturnType]


def gather(text: str = "") -> list[str]:
    """Waits until all processes are here; gives what each of them says, in order."""
    client = distributed.global_state.client
    if count() == 1 or client is None:
        return [text]
    number = next(_meetings)
    place = f"meeting {number}"
    own = distributed.global_state.process_id
    client.key_value_set(f"{place}/{own:08}", f"{text}.")  # which is not empty
    client.wait_at_barrier(place, 1000 * MEETING_SECONDS)
    if is_first():  # all have read what was said before, or they would not be here
        client.key_value_delete(f"meeting {number - 1}/")
    return [said[:-1] for _, said in sorted(client.key_value_dir_get(f"{place}/"))]


def any_says(flag: bool) -> bool:
    """Whether a flag is set in one of the processes, all of which ask."""
    return any(gather("yes" if flag else ""))


def agree(what: str, text: str) -> None:
    """Checks that all processes have the same.

    Raises:
      InputError: in all of them, naming what differs.
    """
    texts = gather(text)
    for i, other in enumerate(texts):
        if other != texts[0]:
            raise InputError(
                f"{what} of process {i} is not that of process 0: all of them need the "
                "same flags and files"
            )


def check_shared(folder: pathlib.Path) -> None:
    """Checks that a folder is one that all processes see.

    Raises:
      InputError: in all of them.
    """
    if count() == 1:
        return
    trace = folder / f".seen-by-all-{gather(secrets.token_hex(8))[0]}"
    if is_first():
        trace.touch()
    gather()
    is_seen = gather(str(trace.exists()))
    if is_first():
        trace.unlink(missing_ok=True)
    if "False" in is_seen:
        raise InputError(
            f"workdir={folder}: process {is_seen.index('False')} does not see what "
            "process 0 writes there; name a folder that all hosts share"
        )
