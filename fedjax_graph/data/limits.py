"""How large what a file holds may be: known from its header, before it is read."""

import contextlib
import contextvars
import gzip
import io
import itertools
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from typing import IO, Any, BinaryIO, TextIO

import numpy as np

from fedjax_graph.core.errors import InputError

GIB = 2**30
DEFAULT_GIB = 2.0  # all published datasets are smaller, one file for one
TEXT_SHARE = 4  # what is text may be as much smaller, as its parts take more room
_CHUNK = 1 << 20
_MOST_LISTED = 1 << 20  # bytes in which an archive lists its members: some 10,000
_MOST_BLANK = 10_000  # lines of a text
_NUMBER_BYTES = 64  # of text, more than a number needs
_MOST_NESTED = 50  # containers in JSON
_SKIPPED = re.compile(rb"\n(?=[\r\n#])")  # ends the line before one that is blank
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


def check_plain(path: str | os.PathLike) -> None:
    """Checks that a path that is there leads to a file, or a folder, with an end.

    Raises:
      InputError: if it leads to a device, a pipe or a socket.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # whoever opens it says more
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise InputError(
            "a device, a pipe or a socket; expected a plain file: write what it gives "
            "to one first"
        )


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


def filled_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a text that are not blank.

    Raises:
      InputError: if too many are.
    """
    num_blank = 0
    for line in lines:
        if line.strip():
            yield line
            continue
        num_blank += 1
        if num_blank > _MOST_BLANK:
            raise InputError(f"more than {_MOST_BLANK} blank lines; take them out")


def parse_json(text: str) -> Any:
    """Parses JSON that is not nested deeper than what recursion can follow.

    Raises:
      InputError: if it is.
      ValueError: if it is no JSON.
    """
    deep = InputError(f"JSON nested more than {_MOST_NESTED} deep")
    try:
        found = json.loads(text)
    except RecursionError:
        raise deep from None
    level = [found]
    for _ in range(_MOST_NESTED):
        parts = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for x in itertools.chain(*parts) if isinstance(x, dict | list)]
        if not level:
            return found
    raise deep


class _Listed(io.FileIO):
    """Keeps `zipfile` from reading a list of members that is out of all proportion."""

    def read(self, size: int | None = -1) -> bytes:
        """Reads so many bytes."""
        if size is not None and size > _MOST_LISTED:
            raise InputError(
                f"lists its members in {size} bytes, expected at most {_MOST_LISTED}: "
                "some 10,000 arrays"
            )
        return super().read(size)


@contextlib.contextmanager
def open_zip(path: str | os.PathLike) -> Iterator[zipfile.ZipFile]:
    """Opens an archive, if it has not too many members.

    Raises:
      InputError: if it has.
    """
    with _Listed(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


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
        if not dtype.itemsize:
            raise InputError(f"member {member.filename!r} of type {dtype}, of no bytes")
        wanted = math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and held != wanted:
            raise InputError(
                f"member {member.filename!r} of shape {shape} and type {dtype} has "
                f"{held} bytes, expected {wanted}"
            )
        largest = (max(size, 1) for size in shape)  # what is made for one axis counts
        check_shape(f"member {member.filename!r}", largest, dtype.itemsize)


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


def check_table(path: str | os.PathLike, itemsize: int, skipped: int = 0) -> None:
    """Checks the array that a csv table, as it is or as .gz, would make.

    Counts its lines, and the columns of the first one behind its header, in one pass
    that keeps nothing. Lines that are blank or begin with `#` are none of the table's,
    and there may be few of them.

    Args:
      path: the file.
      itemsize: bytes of a number.
      skipped: lines of its header.

    Raises:
      InputError: if it is too large, or mostly something else than numbers.
    """
    is_packed = str(path).endswith(".gz")
    with gzip.open(path) if is_packed else open(path, "rb") as file:
        first = _first_line(file, skipped)
        num_columns = first.partition(b"#")[0].count(b",") + 1
        num_lines, num_bytes, line_bytes, last = 1, len(first), 0, first[-1:]
        while chunk := file.read(_CHUNK):
            num_skipped = sum(1 for _ in _SKIPPED.finditer(last + chunk))
            num_lines += chunk.count(b"\n") - num_skipped
            num_bytes += len(chunk)
            _, end, rest = chunk.rpartition(b"\n")
            line_bytes, last = len(rest) + (0 if end else line_bytes), chunk[-1:]
            rows = max(num_lines, 1)  # one less inside a comment
            check_shape("its table", (rows, num_columns), itemsize)
            check_bytes("its text", num_bytes // TEXT_SHARE)
            check_bytes("a line", line_bytes, TEXT_SHARE**2)
            if num_bytes > _CHUNK + _NUMBER_BYTES * rows * num_columns:
                raise InputError(
                    f"{num_bytes} bytes of text with {rows} rows; take out blank "
                    "lines, comments and spaces"
                )


def _first_line(file: BinaryIO | gzip.GzipFile, skipped: int) -> bytes:
    """The first line behind a header that is neither blank nor a comment."""
    number = num_bytes = 0
    while line := file.readline(most_bytes() // TEXT_SHARE**2 + 1):
        check_bytes("a line", len(line), TEXT_SHARE**2)
        if number >= skipped and line.strip() and not line.startswith(b"#"):
            return line
        if num_bytes > _CHUNK:
            raise InputError("more than 1 MiB of blank lines and comments; take it out")
        number += 1
        num_bytes += len(line)
    return b""


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
