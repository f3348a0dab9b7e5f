"""How large what a file holds may be: known from its header, before it is read."""

import contextlib
import contextvars
import gzip
import math
import os
import zipfile
from collections.abc import Iterable, Iterator
from typing import IO, Any, BinaryIO, TextIO

import numpy as np

from fedjax_graph.core.errors import InputError

GIB = 2**30
DEFAULT_GIB = 2.0  # all published datasets are smaller, one file for one
TEXT_SHARE = 4  # what is text may be as much smaller, as its parts take more room
_CHUNK = 1 << 20
_most_gib = contextvars.ContextVar("_most_gib", default=DEFAULT_GIB)


@contextlib.contextmanager
def at_most(gib: float) -> Iterator[None]:
    """Lets a file hold so many GiB, once unpacked, inside the `with` block.

    Raises:
      InputError: if that is no positive number.
    """
    if not 0 < gib < math.inf:
        raise InputError(f"max_file_gib={gib}: expected a number above 0")
    token = _most_gib.set(gib)
    try:
        yield
    finally:
        _most_gib.reset(token)


def most_bytes() -> int:
    """The bytes that a file may hold."""
    return int(_most_gib.get() * GIB)


def check_bytes(what: str, num_bytes: int, share: int = 1) -> None:
    """Checks the size of what is about to be read or made.

    Args:
      what: it is, for the message.
      num_bytes: its size.
      share: how much smaller than the limit it has to be.

    Raises:
      InputError: if it is too large.
    """
    if num_bytes * share > most_bytes():
        of_it = f" ({1 / share:g} of it)" if share > 1 else ""
        raise InputError(
            f"{what}: {num_bytes / GIB:.3g} GiB, more than max_file_gib="
            f"{_most_gib.get():g} allows{of_it}; raise that if you trust the file"
        )


def check_shape(what: str, shape: Iterable[int], itemsize: int) -> None:
    """Checks the size of an array by its shape; see `check_bytes`."""
    check_bytes(what, math.prod(map(int, shape)) * itemsize)


def check_file(path: str | os.PathLike, share: int = 1) -> None:
    """Checks the size of a file that is read whole; see `check_bytes`."""
    check_bytes("its size", os.path.getsize(path), share)


def open_text(path: str | os.PathLike, share: int = TEXT_SHARE) -> TextIO:
    """Opens a text in UTF-8, if it is not too large; a mark of byte order is left out.

    Args:
      path: the file.
      share: how much smaller it has to be than an array may be: how much more room its
        parts take in memory.

    Raises:
      InputError: if it is.
    """
    check_file(path, share)
    return open(path, encoding="utf-8-sig")


def check_npz(archive: zipfile.ZipFile) -> None:
    """Checks the arrays of a .npz file by their headers; nothing else is unpacked.

    Raises:
      InputError: if they are too large together, or one is none, or not what the
        archive says.
    """
    members = archive.infolist()
    check_bytes("its arrays", sum(member.file_size for member in members))
    for member in members:
        if not member.filename.endswith(".npy"):
            raise InputError(
                f"member {member.filename!r}, expected arrays alone (.npy)"
            )
        with archive.open(member) as file:
            shape, dtype = _npy_header(file)
            held = member.file_size - file.tell()
        wanted = math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and held != wanted:
            raise InputError(
                f"member {member.filename!r} of shape {shape} and type {dtype} has "
                f"{held} bytes, expected {wanted}"
            )


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise InputError(f"an array in version {version} of the format")
    shape, _, dtype = readers[version](file)
    return shape, dtype


def check_table(path: str | os.PathLike, itemsize: int) -> None:
    """Checks the array that a csv table, as it is or as .gz, would make.

    Counts its lines, and the columns of the first one, in one pass that keeps nothing.

    Raises:
      InputError: if it is too large.
    """
    is_packed = str(path).endswith(".gz")
    num_lines, num_columns, num_bytes, line_bytes = 1, 0, 0, 0
    with gzip.open(path) if is_packed else open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            if num_lines == 1:
                num_columns += chunk.partition(b"\n")[0].count(b",")
            num_lines += chunk.count(b"\n")
            num_bytes += len(chunk)
            _, end, rest = chunk.rpartition(b"\n")
            line_bytes = len(rest) + (0 if end else line_bytes)
            check_shape("its table", (num_lines, num_columns + 1), itemsize)
            check_bytes("its text", num_bytes // TEXT_SHARE)
            check_bytes("a line", line_bytes, TEXT_SHARE**2)


@contextlib.contextmanager
def unpacked(path: str | os.PathLike) -> Iterator[Any]:
    """Opens a file, packed by gzip or not, to be read so far and no further."""
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield _Limited(gzip.GzipFile(fileobj=file) if is_packed else file)


class _Limited:
    """Keeps `tarfile` from skipping, or taking for a header, what has no end."""

    def __init__(self, file: BinaryIO | gzip.GzipFile) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        """Reads so many bytes."""
        check_bytes("its content", self._file.tell() + size)
        return self._file.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Goes to a place from the beginning, or from here."""
        here = self._file.tell() if whence == os.SEEK_CUR else 0
        check_bytes("its content", here + offset)
        return self._file.seek(here + offset)

    def tell(self) -> int:
        """The place to read from."""
        return self._file.tell()
