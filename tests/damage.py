"""What happens to files on a disk."""

import pathlib

from fedjax_graph.driver.checkpoint import DIGESTS


def halve(path: pathlib.Path) -> None:
    """Cuts off the second half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path: pathlib.Path, bit: int) -> None:
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flip_in_digest(checkpoint: pathlib.Path) -> None:
    """Flips a bit of a state's digest: the same as one of its arrays.

    Where orbax meets damage itself, its other reads complain from threads, later on.
    """
    path = checkpoint / DIGESTS / "metadata"
    assert path.read_bytes().startswith(b'{"state": "')
    flip(path, 8 * len('{"state": "'))
