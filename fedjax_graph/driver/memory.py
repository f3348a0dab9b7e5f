"""Whether what is going to run fits in memory, told before it is tried.

XLA says of a compiled program how much it will allocate, and of data one knows; both
are compared with what is free. Linux ends a process that takes more than there is
without a word, and often only after minutes.
"""

import ctypes
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax

from fedjax_graph.core import client_rows, mesh, processes
from fedjax_graph.core.client_rows import ClientRows
from fedjax_graph.core.errors import InputError

GIB = 2**30
CGROUP = pathlib.Path("/sys/fs/cgroup")
OF_FILES = ("active_file", "inactive_file")  # pages that are given back
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # parameters of glibc's `mallopt`
ADVICE = (
    "clients at a time with clients_per_chunk, smaller minibatches or a smaller part "
    "of the data, or free memory; check_memory=False tries all the same"
)


def keep_freed(most: int = GIB) -> bool:
    """Has the process keep memory that it frees, for what it allocates next.

    A program's buffers are allocated in each call, and freed after it. By default
    glibc returns them to the system, which has to clear all of their pages for the next
    call; of rounds over wide features on a CPU that is a quarter of the time. The
    checks below give back what is kept before they look at what is free.

    Args:
      most: bytes of a block that is kept, and of what is kept at the end of the heap.

    Returns:
      Whether the C library is one that can be told so.
    """
    mallopt = _of_libc("mallopt")
    return mallopt is not None and all(
        mallopt(parameter, most) for parameter in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)
    )


def _give_back() -> None:
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def free_bytes(meminfo: pathlib.Path = pathlib.Path("/proc/meminfo")) -> int | None:
    """What a process may still allocate on the host; None where nobody says."""
    try:
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = 1024 * sum(
            int(lines[key].split()[0]) for key in ("MemAvailable", "SwapFree")
        )
    except (OSError, KeyError, ValueError):
        return None
    return min(free, *_group_bytes(free))


def _group_bytes(free: int, folder: pathlib.Path = CGROUP) -> tuple[int]:
    """What the limit of a container leaves, or else what is free."""
    try:
        most = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
        files = sum(int(x.split()[1]) for x in stat if x.split()[0] in OF_FILES)
    except (OSError, ValueError, IndexError):
        return (free,)
    return (most - used + files,)


def needed_bytes(compiled: Any) -> int:
    """What a device allocates for a program beside its arguments; 0 if it is unsaid."""
    found = compiled.memory_analysis()
    if found is None:
        return 0
    sizes = found.temp_size_in_bytes, found.output_size_in_bytes
    return max(sum(sizes) - found.alias_size_in_bytes, 0)


def check_program(what: str, compiled: Any) -> None:
    """Checks that a compiled program, such as a round, fits in what is free.

    Args:
      what: it computes, of which method.
      compiled: the program; its arguments are in memory already.

    Raises:
      InputError: if it does not.
    """
    needed, (free, place) = needed_bytes(compiled), _free()
    if mesh.backend() == "cpu":
        needed *= _own_devices()
    _check(f"{what} needs", needed, free, place)


def check_copies(what: str, tree: Any) -> None:
    """Checks that some data fit in what is free once `client_rows.put` places them.

    An array that stands several times in the tree is placed once, and what is on the
    one device already is not copied.

    Raises:
      InputError: if it does not.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ClientRows))
    distinct = {id(x): x for x in leaves if hasattr(x, "nbytes")}
    rows = set(map(id, client_rows.named(tree)))
    is_cpu = mesh.backend() == "cpu"
    devices = _own_devices() if is_cpu else 1  # whose memory is looked at

    def needed(x):
        if mesh.num_devices() == 1:
            return 0 if is_cpu or isinstance(x, jax.Array) else x.nbytes
        if id(x) in rows:
            return devices * mesh.share_size(len(x)) * x[:1].nbytes
        return (devices - is_cpu) * x.nbytes  # on a CPU one copy is here

    size, (free, place) = sum(map(needed, distinct.values())), _free()
    _check(f"copies of {what} for the devices need", size, free, place)


def _own_devices() -> int:
    """The devices in use that share this host's memory."""
    return mesh.num_devices() // processes.count()


def _free() -> tuple[int | None, str]:
    """What is free where the programs run, and where that is."""
    if mesh.backend() == "cpu":
        _give_back()
        return free_bytes(), "of memory is free"
    stats = mesh.memory_stats()
    if "bytes_limit" not in stats:
        return None, ""
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return free, "of the device's memory is free"


def _check(what: str, needed: int, free: int | None, place: str) -> None:
    if free is not None and needed > free:
        shares = mesh.backend() == "cpu" and _own_devices() > 1
        fewer = "fewer devices with num_cpu_devices, fewer" if shares else "fewer"
        raise InputError(
            f"{what} {needed / GIB:.1f} GiB, and {max(free, 0) / GIB:.1f} GiB {place}; "
            f"take {fewer} {ADVICE}"
        )
