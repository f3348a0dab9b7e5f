"""The mesh: which devices share the work, and where arrays lie on them.

The caller sets the mesh, and everything that `core.sharding` spreads takes it from
there:

    with jax.set_mesh(fg.make_mesh()):
        result = fg.run("cnfgnn", algorithm, splits, config)

A mesh has two named axes. Clients, windows and codes are shared out along both; the
server's graph network cuts its minibatch along `clients` and its edges along `edges`.
Where no mesh is set, or it has one device, arrays stay as they are.

This is the only file that asks JAX for devices. A CPU counts as one device unless told
otherwise: `use_cpu_cores` makes each core a device, so that clients, whose own products
are too small to be shared by cores, train side by side.
"""

import contextlib
import importlib.util
import math
import mmap
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_graph.core import processes
from fedjax_graph.core.errors import InputError

AXES = CLIENTS, EDGES = ("clients", "edges")
_NO_MESH = Mesh(np.empty((), object), ())
_THREADS = 4  # for each CPU device
_WAIT_FLAG = "xla_cpu_collective_call_terminate_timeout_seconds"


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cpu_cores(num: int) -> None:
    """Makes CPU cores devices; only before JAX has been used.

    Args:
      num: how many.
    """
    if num > 1:
        _let_devices_wait()
    if num > num_cores() or processes.count() > 1:
        _have_threads(_THREADS * max(num, num_cores()))
    if jax.config.jax_num_cpu_devices != num:
        jax.config.update("jax_num_cpu_devices", num)


def all_devices() -> list[Any]:
    """The devices of JAX, of all processes."""
    return jax.devices()


def _have_threads(num: int) -> None:
    """Gives XLA's CPU client at least so many threads, unless the user says how many.

    It has one for each core or device, and a device that waits for the others in a
    collective holds one: with more devices than cores, or in several processes, rounds
    of CNFGNN came to a stop where nobody was left to bring the others there. Elsewhere
    more threads than cores only get in each other's way: 8 in place of 2 on two cores
    cost CNFGNN's clients a third of their rate or more.
    """
    for name in ("NPROC", "PJRT_NPROC"):  # as XLA has called it, and calls it now
        os.environ.setdefault(name, str(num))


def _let_devices_wait() -> None:
    """Lets CPU devices finish their shares at any distance in time.

    XLA aborts the process when one has waited 40 seconds for another, which a busy
    machine and a long round make happen. An unknown flag aborts as well, so it is set
    only where the library has it.
    """
    if importlib.util.find_spec("libtpu") and jax.config.jax_platforms != "cpu":
        return  # it ends a process at a flag of the CPU
    flags = os.environ.get("XLA_FLAGS", "")
    library = pathlib.Path(jaxlib.__file__).with_name("libjax_common.so")
    if _WAIT_FLAG in flags or not library.exists():
        return
    with (
        open(library, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        is_known = content.find(_WAIT_FLAG.encode()) >= 0
    if is_known:
        os.environ["XLA_FLAGS"] = f"{flags} --{_WAIT_FLAG}={10**6}".strip()


# --- The mesh ------------------------------------------------------------------------


def make_mesh(edge_parts: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes a mesh with the axes `clients` and `edges`.

    Args:
      edge_parts: size of the axis `edges`; it has to divide the devices.
      devices: by default all that JAX has, of all processes.

    Raises:
      InputError: if the devices cannot be arranged so.
    """
    found = list(jax.devices() if devices is None else devices)
    if edge_parts < 1 or len(found) % edge_parts:
        raise InputError(
            f"edge_parts={edge_parts}: expected a divisor of the {len(found)} devices"
        )
    return Mesh(np.array(found).reshape(-1, edge_parts), AXES)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """A context at whose end the mesh that was set before it is set again."""
    before = jax.sharding.get_mesh()
    try:
        yield
    finally:
        jax.set_mesh(before)


def _current() -> AbstractMesh:
    return jax.sharding.get_abstract_mesh()


def manual_axes() -> frozenset[str]:
    """The axes along which this is one device's share of the work."""
    return frozenset(_current().manual_axes)


def _checked() -> AbstractMesh:
    mesh = _current()
    is_ours = mesh.axis_names == AXES and AxisType.Explicit not in mesh.axis_types
    if not (mesh.empty or is_ours):
        raise InputError(
            f"mesh: expected one of fg.make_mesh, with the axes {AXES}, not one with "
            f"{mesh.axis_names} of types {mesh.axis_types}"
        )
    return mesh


def num_devices() -> int:
    """Number of devices that share the work here: 1 within a share, or without a mesh.

    Raises:
      InputError: if the mesh that is set is not as `make_mesh` makes it.
    """
    mesh = _checked()
    return 1 if mesh.empty or mesh.manual_axes else mesh.size


def backend() -> str:
    """The platform that computes: `cpu`, `gpu` or `tpu`.

    That of the mesh's devices, also where they are only described, or else JAX's own.
    """
    device = None if _current().empty else _current().abstract_device
    kind = device.platform if device else jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(kind, kind)


def _devices() -> list[Any]:
    """The devices in use that are this process's own."""
    mesh = jax.sharding.get_mesh()
    return jax.local_devices() if mesh.empty else list(mesh.local_devices)


def device_kind() -> str:
    """The name that JAX has for the devices in use."""
    return _devices()[0].device_kind


def memory_stats() -> dict[str, int]:
    """What the first device in use says of its memory; a CPU says nothing."""
    return _devices()[0].memory_stats() or {}


def on_cpu() -> contextlib.AbstractContextManager[None]:
    """A context in which one CPU device computes, whatever else there is."""
    return _alone_on(jax.local_devices(backend="cpu")[0])


def on_first() -> contextlib.AbstractContextManager[None]:
    """A context in which the first device in use computes, without the mesh."""
    return _alone_on(_devices()[0])


@contextlib.contextmanager
def _alone_on(device: Any) -> Iterator[None]:
    with restored(), jax.default_device(device):
        jax.set_mesh(_NO_MESH)
        yield


def num_parts(axes: Sequence[str]) -> int:
    """Number of devices along some axes of the mesh; 1 without a mesh."""
    mesh = _checked()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes)


def spec(axis: int | None, axes: Sequence[str] = AXES) -> PartitionSpec:
    """How an array is cut at one of its axes along axes of the mesh; None: nowhere."""
    if axis is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, tuple(axes))


def edge_parts() -> int:
    """Into how many parts `split_edges` cuts; 1 where each device has a share."""
    return 1 if EDGES in manual_axes() else num_parts((EDGES,))


def padded_size(size: int, axes: Sequence[str] = AXES) -> int:
    """The next multiple of the number of devices along some axes of the mesh."""
    return share_size(size, axes) * num_parts(axes)


def share_size(size: int, axes: Sequence[str] = AXES) -> int:
    """The part of `size` rows that falls to each device, rounded up."""
    return -(-size // num_parts(axes))


# --- Placing -------------------------------------------------------------------------


def put_replicated(tree: Any) -> Any:
    """Copies of a pytree on every device of the mesh (host call).

    A leaf that stands several times in the tree is copied once.
    """
    mesh = jax.sharding.get_mesh()
    target = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    leaves, structure = jax.tree.flatten(tree)
    numbers: dict[int, int] = {}  # in order of appearance, the same in all processes
    for leaf in leaves:
        numbers.setdefault(id(leaf), len(numbers))
    distinct = {numbers[id(leaf)]: leaf for leaf in leaves}
    if target is None or target.is_fully_addressable:
        placed = jax.device_put(distinct, target)
    else:  # without comparing what the processes have, which copies all of it
        placed = {key: _put_own(leaf, target) for key, leaf in distinct.items()}
    return jax.tree.unflatten(structure, [placed[numbers[id(leaf)]] for leaf in leaves])


def _put_own(leaf: Any, target: NamedSharding) -> jax.Array:
    """A copy on each device of each process, from what that process has."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


def put_spread(tree: Any, num_rows: int, axis: int = 0) -> Any:
    """Shares out a pytree as `spread` does (host call)."""
    if jax.sharding.get_mesh().empty:
        return jax.device_put(tree)

    def put(x, target):
        is_near = target.is_fully_addressable
        return jax.device_put(x, target) if is_near else _put_own(x, target)

    return jax.tree.map(put, tree, spread_shardings(tree, num_rows, axis))


def spread_shardings(tree: Any, num_rows: int, axis: int = 0) -> Any:
    """Says where `spread` puts the leaves of a pytree of arrays or their shapes."""
    mesh = jax.sharding.get_mesh()

    def sharding(x):
        return NamedSharding(mesh, _spread_spec(x, num_rows, axis))

    return jax.tree.map(sharding, tree)


def abstract_spread(tree: Any, num_rows: int, axis: int = 0) -> Any:
    """Shapes and types of a tree, and where `spread` puts it on the mesh."""
    shardings = spread_shardings(tree, num_rows, axis)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def abstract(tree: Any) -> Any:
    """Shapes and types of a tree, as programs on the current mesh see arguments."""
    current = _current()

    def of(x):
        sharding = None if current.empty else NamedSharding(current, PartitionSpec())
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type
        )

    return jax.tree.map(of, tree)


def whole(tree: Any) -> Any:
    """Gathers a pytree spread over several processes, all of it to each (host call).

    Such leaves become NumPy arrays, one after another; all processes have to call it.
    """

    def get(x):
        is_whole = x.is_fully_addressable or x.is_fully_replicated
        return x if is_whole else multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(get, tree)


def own_parts(x: Any) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """The parts of an array that are this process's to look at (host call).

    All processes together have each element once: of copies one counts, and what is no
    `jax.Array` is the first process's.

    Args:
      x: an array of JAX's or NumPy's.

    Returns:
      Where each part begins along the axes, and its elements.
    """
    if isinstance(x, jax.Array):
        own = [shard for shard in x.addressable_shards if shard.replica_id == 0]
        return [
            (tuple(cut.start or 0 for cut in shard.index), np.asarray(shard.data))
            for shard in own
        ]
    return [((0,) * np.ndim(x), np.asarray(x))] if processes.is_first() else []


def put_on_first(tree: Any) -> Any:
    """Moves a pytree to one device, the first in use (host call)."""
    return jax.device_put(tree, _devices()[0])


def _constrain(tree: Any, cut: PartitionSpec) -> Any:
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, cut), tree)


def replicated(tree: Any) -> Any:
    """Within a program: the same values on every device."""
    return tree if num_devices() == 1 else _constrain(tree, PartitionSpec())


def spread(tree: Any, num_rows: int, axis: int = 0) -> Any:
    """Within a program: leaves with a row for each client are shared out.

    A leaf with `num_rows` at `axis`, two or more, is cut there, or if the devices do
    not divide them along the first of its later axes that they divide; others are on
    every device.
    """
    if num_devices() == 1:
        return tree

    def constrain(x):
        return _constrain(x, _spread_spec(x, num_rows, axis))

    return jax.tree.map(constrain, tree)


def _spread_spec(x: Any, num_rows: int, axis: int) -> PartitionSpec:
    sizes = x.shape[axis:]
    is_of_clients = len(sizes) > 0 and sizes[0] == num_rows and num_rows > 1
    if not is_of_clients or 0 in sizes:  # XLA would not keep a cut of nothing
        return PartitionSpec()
    cut = (i for i, size in enumerate(sizes, axis) if size % num_parts(AXES) == 0)
    return spec(next(cut, None))


def cut_clients(tree: Any) -> Any:
    """Within a program: rows [K', ...] cut by clients, K' a multiple of the devices."""
    return tree if num_devices() == 1 else _constrain(tree, spec(0))


def split_edges(tree: Any) -> Any:
    """Within a program: rows [E, ...] cut along the mesh's axis `edges`."""
    return tree if edge_parts() == 1 else _constrain(tree, PartitionSpec(EDGES))


def varying(tree: Any) -> Any:
    """Marks constants that each share will change, such as the carry of a scan."""
    axes = manual_axes()
    if not axes:
        return tree

    def mark(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(mark, tree)
