"""What does not fit in memory is refused before it runs."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_graph.core import client_rows, mesh
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import memory

MEMINFO = "MemTotal: 100 kB\nMemAvailable:  40 kB\nSwapFree:   2 kB\n"


def program(temp, output, alias):
    analysis = types.SimpleNamespace(
        temp_size_in_bytes=temp, output_size_in_bytes=output, alias_size_in_bytes=alias
    )
    return types.SimpleNamespace(memory_analysis=lambda: analysis)


def test_what_is_free_is_what_linux_says(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text(MEMINFO)
    assert memory.free_bytes(path) == 42 * 1024
    path.write_text("MemTotal: 100 kB\n")
    assert memory.free_bytes(path) is None
    assert memory.free_bytes(tmp_path / "absent") is None


KEPT = """
import ctypes, resource
from fedjax_graph.driver import memory

libc, size = ctypes.CDLL(None), 100 * 2**20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def pages_cleared():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

memory.keep_freed()
first = pages_cleared()
again = pages_cleared()
memory._give_back()
print(first, again, pages_cleared())
"""


@pytest.mark.skipif(
    not memory.keep_freed(), reason="the C library has no mallopt, as glibc has"
)
def test_what_is_freed_is_kept_until_it_is_given_back():
    command = [sys.executable, "-c", KEPT]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, again, after = map(int, said.split())
    assert again < min(first, after) / 10


def test_the_limit_of_a_container_counts(tmp_path):
    for name, text in (
        ("memory.max", "1000"),
        ("memory.current", "700"),
        (
            "memory.stat",
            "anon 600\nactive_file 40\ninactive_file 50\nfile 90\n"
            "workingset_refault_file 100000\nworkingset_activate_file 5000\n",
        ),
    ):
        (tmp_path / name).write_text(text)
    assert memory._group_bytes(10**6, tmp_path) == (390,)
    (tmp_path / "memory.max").write_text("max")
    assert memory._group_bytes(10**6, tmp_path) == (10**6,)


def test_a_program_needs_its_temporaries_and_new_outputs():
    assert memory.needed_bytes(program(100, 30, 20)) == 110
    assert memory.needed_bytes(types.SimpleNamespace(memory_analysis=lambda: None)) == 0
    x = jnp.ones((256, 256))
    compiled = jax.jit(lambda x: jnp.sin(x @ x) @ x).lower(x).compile()
    assert 256 * 256 * 4 <= memory.needed_bytes(compiled) <= 256 * 256 * 16


@pytest.mark.parametrize(
    ("backend", "limit", "used", "needed", "words"),
    [
        ("cpu", 0, 0, 2, None),
        ("cpu", 0, 0, 4, "needs 4.0 GiB, and 3.0 GiB of memory is free; take fewer"),
        ("gpu", 10, 6, 4, None),
        ("gpu", 10, 6, 5, "needs 5.0 GiB, and 4.0 GiB of the device's memory is free"),
        ("gpu", None, 0, 100, None),
    ],
)
def test_a_round_that_does_not_fit_is_one_line(
    monkeypatch, backend, limit, used, needed, words
):
    stats = {"bytes_limit": limit, "bytes_in_use": used}
    stats = {k: x * memory.GIB for k, x in stats.items()} if limit else {}
    monkeypatch.setattr(mesh, "backend", lambda: backend)
    monkeypatch.setattr(mesh, "memory_stats", lambda: stats)
    monkeypatch.setattr(memory, "free_bytes", lambda: 3 * memory.GIB)
    compiled = program(needed * memory.GIB, 0, 0)
    if words is None:
        memory.check_program("sfl: a round", compiled)
        return
    with pytest.raises(InputError) as refusal:
        memory.check_program("sfl: a round", compiled)
    assert f"sfl: a round {words}" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_copies_for_the_cores_count(monkeypatch):
    data = {"x": np.zeros(3 * 2**18, np.float32), "n": 3}
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**22)
    memory.check_copies("the data", data)  # nothing is copied for one device
    monkeypatch.setattr(mesh, "num_devices", lambda: 3)
    words = "copies of the data for the devices need .* take fewer devices with num_cpu"
    with pytest.raises(InputError, match=words):
        memory.check_copies("the data", data)


def test_splits_that_share_arrays_are_copied_once(monkeypatch):
    shared = np.zeros(3 * 2**18, np.float32)
    splits = {
        name: {"speed": shared, "starts": np.zeros(i)} for i, name in enumerate("abc")
    }
    monkeypatch.setattr(mesh, "num_devices", lambda: 2)
    monkeypatch.setattr(memory, "free_bytes", lambda: shared.nbytes + 24)
    memory.check_copies("the data", splits)
    monkeypatch.setattr(memory, "free_bytes", lambda: shared.nbytes + 23)
    with pytest.raises(InputError, match="copies of the data"):
        memory.check_copies("the data", splits)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_one_accelerator_has_the_data_already(monkeypatch, num_devices):
    stats = {"bytes_limit": 2**20, "bytes_in_use": 0}
    monkeypatch.setattr(mesh, "backend", lambda: "gpu")
    monkeypatch.setattr(mesh, "memory_stats", lambda: stats)
    monkeypatch.setattr(mesh, "num_devices", lambda: num_devices)
    data = np.zeros(2**20)
    if num_devices == 1:
        memory.check_copies("the data", jnp.asarray(data))
    with pytest.raises(InputError, match="device's memory is free; take fewer clients"):
        memory.check_copies("the data", data)


def test_rows_of_clients_are_counted_once_and_padded(train, monkeypatch):
    """Five clients in eight places of four devices; of the rest a copy is here."""
    found = []
    monkeypatch.setattr(memory, "_check", lambda _, size, *rest: found.append(size))
    rest = sum(x.nbytes for x in jax.tree.leaves(train)) - train.speed.nbytes
    memory.check_copies("the data", train)
    with jax.set_mesh(mesh.make_mesh(devices=jax.devices()[:4])):
        memory.check_copies("the data", {"train": train, "test": train})
        memory.check_copies("the data", client_rows.put(train))
    assert found == [0, 8 * train.speed.nbytes / 5 + 3 * rest, 3 * rest]
