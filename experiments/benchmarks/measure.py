"""Honest timing: compiled programs, measured in turn, medians of several."""

import collections
import pathlib
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.settings import BenchmarkSettings
from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError

Measure = Callable[[], dict[str, float]]
NUM_ROUNDS = 5  # over which compilations are counted
COMPILED = "/jax/core/compile/backend_compile_duration"  # event of a compilation


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    """Seconds that a call takes until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def compiled(fn: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], float]:
    """A program compiled and run once, and the seconds that compiling took."""
    start = time.perf_counter()  # a new function, as JAX keeps programs of known ones
    program = jax.jit(lambda *args: fn(*args)).lower(*args).compile()
    elapsed = time.perf_counter() - start
    jax.block_until_ready(program(*args))
    return program, elapsed


def num_compilations(
    round_: Callable[..., Any], state: Any, data: Any, key: jax.Array
) -> int:
    """Programs compiled for some rounds that follow each other."""
    keys = [jax.random.fold_in(key, i) for i in range(NUM_ROUNDS)]
    program, events = jax.jit(round_), []

    def listen(event, *args, **settings):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    for key in keys:
        state, metrics = program(state, data, key)
    jax.block_until_ready((state, metrics))
    jax.monitoring.unregister_event_duration_listener(listen)
    return events.count(COMPILED)


def matmul_rate(settings: BenchmarkSettings) -> float:
    """Measured rate of large matrix products at --precision, one a device, FLOP/s."""
    size = 4096 if mesh.backend() == "cpu" else 16384
    size = 64 if settings.is_tiny else size
    x = jnp.ones((size, size))
    return 2 * size**3 / _seconds_on_each(jnp.matmul, x, x)


def copy_rate(settings: BenchmarkSettings) -> float:
    """Measured rate of copying large arrays, one a device, bytes read and written/s."""
    x = jnp.ones(2**10 if settings.is_tiny else 2**27)  # 512 MiB
    return 2 * x.nbytes / _seconds_on_each(lambda x: x + 1, x)


def _seconds_on_each(fn: Callable[..., Any], *args: Any) -> float:
    """Least seconds of a call, which each device computes whole, over their number.

    Raises:
      InputError: if the arguments do not lie on every device.
    """
    program, _ = compiled(fn, *args)
    num_devices = len(program(*args).sharding.device_set)
    if num_devices != mesh.num_devices():
        raise InputError(f"computed by {num_devices} of {mesh.num_devices()} devices")
    return min(seconds(program, *args) for _ in range(3)) / num_devices


def peer_output(settings: BenchmarkSettings, arguments: list[str]) -> str:
    """Runs the script that measures a peer, and returns what it prints.

    Raises:
      InputError: if it fails.
    """
    command = [settings.peer_python, str(settings.peer_script), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"--peer_python={settings.peer_python}: {error}") from error
    if done.returncode or not done.stdout.strip():
        reason = (done.stderr.strip() or "no output").splitlines()[-1]
        raise InputError(f"the peer {settings.peer_script} failed: {reason}")
    return done.stdout


def in_turn(
    settings: BenchmarkSettings, measures: dict[str, Measure]
) -> dict[str, float]:
    """Medians over --repeats rounds, in each of which everything is measured once.

    The order is another one each time, as what comes first may warm the cache for what
    follows.
    """
    samples = {name: collections.defaultdict(list) for name in measures}
    for number in range(settings.repeats):
        for name in random.Random(number).sample(list(measures), len(measures)):
            for key, value in measures[name]().items():
                samples[name][key].append(value)
    return {
        key: statistics.median(values)
        for found in samples.values()
        for key, values in found.items()
    }


def resident_bytes() -> int:
    """Bytes of this process in memory now; the most so far where Linux is not there.

    Without pages of files, which Linux takes back when others need the memory.
    """
    status = pathlib.Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return 1024 * int(found[1]) if found else peak_memory_bytes()


def peak_memory_bytes() -> int:
    """The most bytes in use so far, of the accelerator if there is one, else of this
    process."""
    stats = mesh.memory_stats()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there
    return int(stats.get("peak_bytes_in_use", most * unit))
