"""A tiny sensor network for all tests, and what keeps its programs quick to compile."""

import functools
import gc
import os
import pathlib
import tempfile
import threading

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir

from fedjax_graph.data.traffic import windows
from fedjax_graph.data.traffic.network import TrafficDataset

# Compiles in less than half of the time; unknown to jax 0.12, which would not start.
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
CONTEXTS_LAST = 200  # programs, whose constants and types MLIR's context keeps
COLLECT_AFTER = 100_000  # new objects; tracing makes many, and few of them are rubbish
MOST_MAPPINGS = 30_000  # of memory; Linux allows a process some 65,000
LONGEST = (  # files, which start first, so that no worker is left with one at the end
    "test_conformance",
    "test_graphfl",
    "test_sfl",
    "test_examples",
    "test_benchmark",
    "test_cnfgnn",
    "test_fl_agcns_search",
    "test_cnfgnn_study",
)
NUM_SENSORS, NUM_STEPS = 5, 60  # 37 windows: 26 to train, 4 to validate, 7 to test


def pytest_configure(config):
    """Lets a worker's tests, and the binaries they start, compile quickly, and once.

    Programs are kept in a folder of the run, or in `JAX_COMPILATION_CACHE_DIR` where
    that is set. Each worker of xdist has its own in there: JAX writes a program in
    place, so another process might read a part of it.
    """
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        temporary = tempfile.TemporaryDirectory(prefix="programs-")
        config.add_cleanup(temporary.cleanup)
        folder = temporary.name
    folder = os.path.join(folder, os.environ.get("PYTEST_XDIST_WORKER", ""))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of the processes started
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # a program's lines of source
    share_contexts()
    gc.set_threshold(COLLECT_AFTER, 50, 100)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_num_cpu_devices", 8)  # for meshes; without one, the first
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ < (0, 11) and QUICK not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {QUICK}"


def share_contexts():
    """Lets programs that are lowered one after another share a context of MLIR.

    JAX makes one for each, which takes most of the time of lowering a small program.
    """
    make, kept = mlir.make_ir_context, threading.local()

    def make_or_share():
        if getattr(kept, "uses", 0) % CONTEXTS_LAST == 0:
            kept.uses, kept.context = 0, make()
        kept.uses += 1
        return kept.context

    mlir.make_ir_context = make_or_share


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def forget_programs_if_many():
    """A process may map only so many programs, and XLA aborts beyond."""
    mappings = pathlib.Path("/proc/self/maps")
    if not mappings.exists() or mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def few_programs(quick_compiles):
    yield
    forget_programs_if_many()


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder with the real datasets; tests that need it are skipped without."""
    folder = os.environ.get("FEDJAX_GRAPH_DATA")
    if not folder or not pathlib.Path(folder).is_dir():
        pytest.skip("real data: FEDJAX_GRAPH_DATA names no folder")
    return pathlib.Path(folder)


@pytest.fixture(scope="session")
def network() -> TrafficDataset:
    """Five sensors: 0 <-> 1 -> 2 <- 3 with self edges, and 4 without any edge.

    The series starts on a Sunday at 22:00, so it crosses the end of day and week.
    About a tenth of the readings is missing (0).
    """
    rng = np.random.default_rng(7)
    level = 50 + 8 * np.sin(np.arange(NUM_STEPS)[:, None] / 5 + np.arange(NUM_SENSORS))
    speed = level + rng.normal(0, 4, level.shape)
    speed[rng.random(level.shape) < 0.1] = 0
    adjacency = np.diag([1.0, 1, 1, 1, 0])
    for sender, receiver, weight in [
        (0, 1, 0.7),
        (1, 0, 0.4),
        (1, 2, 0.9),
        (3, 2, 0.2),
    ]:
        adjacency[sender, receiver] = weight
    return TrafficDataset(
        name="tiny",
        speed=speed.astype(np.float32),
        timestamps=np.datetime64("2012-03-04T22:00", "ns")
        + windows.FIVE_MINUTES * np.arange(NUM_STEPS),
        sensor_ids=np.arange(NUM_SENSORS),
        adjacency=adjacency.astype(np.float32),
    )


@pytest.fixture(scope="session")
def splits(network) -> dict[str, windows.TrafficData]:
    return windows.make_splits(network)


@pytest.fixture(scope="session")
def train(splits) -> windows.TrafficData:
    """The training split, with clients of unequal weight."""
    weights = np.array([26, 13, 20, 5, 9], np.float32)
    return splits["train"]._replace(client_weights=weights)


@pytest.fixture(scope="session")
def reference() -> dict[str, np.ndarray]:
    """Golden numbers of independent implementations (torch, NumPy)."""
    with np.load(pathlib.Path(__file__).parent / "data" / "reference.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="session")
def quick_jit():
    """`jax.jit` for tiny programs, which spend their time in the compiler.

    Not for ResNet9, whose gradient XLA's CPU compiler then gets wrong.
    """
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    return functools.partial(jax.jit, compiler_options=options)


@pytest.fixture(scope="session")
def draw_params():
    """Weights from NumPy for `init(key)`, large enough for effects to be seen."""

    def draw(init, seed=0):
        rng = np.random.default_rng(seed)
        return jax.tree.map(
            lambda x: rng.uniform(-0.6, 0.6, x.shape).astype(x.dtype),
            jax.eval_shape(init, jax.random.key(0)),
        )

    return draw


@pytest.fixture(scope="module")
def quick_compiles(request):
    """Little optimization, but for modules that say `FULL_OPTIMIZATION`."""
    if getattr(request.module, "FULL_OPTIMIZATION", False):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def rolled_scans(quick_compiles):
    """Leaves scans rolled, which compiles several times faster and computes the same.

    The tests of the models run them unrolled, as users do.
    """
    scan = jax.lax.scan

    @functools.wraps(scan)
    def rolled(*args, unroll=1, **kwargs):
        del unroll
        return scan(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "scan", rolled)
        yield
