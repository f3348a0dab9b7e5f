"""A folder for the output of one run at a time.

The lock is the kernel's, on a file that says who holds it: it ends with the process
that took it, however that ends, so that what a dead one left behind is no obstacle.
"""

import contextlib
import datetime
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import TextIO

from fedjax_graph.core import processes
from fedjax_graph.core.errors import InputError

NAME = ".lock"  # of the file, which is there as long as a run is


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other runs out of a folder inside the `with` block.

    Of several processes that run together the first takes the lock for all.

    Args:
      folder: that exists.

    Raises:
      InputError: saying who runs there; in all processes.
    """
    with contextlib.ExitStack() as stack:
        refusal = ""
        if processes.is_first():
            try:
                stack.enter_context(_held(folder / NAME))
            except InputError as error:
                refusal = str(error)
        refusal = processes.gather(refusal)[0]
        if refusal:
            raise InputError(refusal)
        yield


@contextlib.contextmanager
def _held(path: pathlib.Path) -> Iterator[None]:
    file = _taken(path)
    with file:
        try:
            file.truncate(0)
            now = datetime.datetime.now().isoformat(" ", "seconds")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
            file.flush()
            yield
        finally:
            path.unlink(missing_ok=True)  # while nobody else can hold it


def _taken(path: pathlib.Path) -> TextIO:
    """The open file of a lock that is held from now on."""
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
            file.close()
            raise InputError(
                f"workdir={path.parent} is in use by {holder}; wait until that run has "
                "ended, or name another folder"
            ) from None
        except OSError as error:
            print(f"note: {path}: no lock ({error.strerror}); start one run only there")
            return file
        if _is_at(path, file):
            return file
        file.close()  # which the run before has deleted meanwhile


def _is_at(path: pathlib.Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
