"""Work spread over the devices of a mesh: an axis is cut into equal shares.

The caller sets the mesh, and everything below takes it from there:

    with jax.set_mesh(fg.make_mesh()):
        result = fg.run("cnfgnn", algorithm, splits, config)

A mesh has two named axes. Clients, windows and codes are shared out along both; the
server's graph network cuts its minibatch along `clients` and its edges along `edges`.
XLA's partitioner is the engine (`jax.shard_map`). Where no mesh is set, or it has one
device, each function here is the plain call.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_graph.core.errors import InputError

AXES = CLIENTS, EDGES = ("clients", "edges")
_NO_MESH = Mesh(np.empty((), object), ())
_WAIT_FLAG = "xla_cpu_collective_call_terminate_timeout_seconds"


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cpu_cores(num_cores: int) -> None:
    """Makes CPU cores devices; only before JAX has been used.

    Args:
      num_cores: how many.
    """
    if num_cores > 1:
        _let_devices_wait()
    if jax.config.jax_num_cpu_devices != num_cores:
        jax.config.update("jax_num_cpu_devices", num_cores)


def all_devices() -> list[Any]:
    """The devices of JAX, of all processes."""
    return jax.devices()


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


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """A context in which one CPU device computes, whatever else there is."""
    with restored(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        jax.set_mesh(_NO_MESH)
        yield


def _num_parts(axes: Sequence[str]) -> int:
    mesh = _checked()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes)


def edge_parts() -> int:
    """Into how many parts `split_edges` cuts; 1 where each device has a share."""
    return 1 if EDGES in _current().manual_axes else _num_parts((EDGES,))


def padded_size(size: int, axes: Sequence[str] = AXES) -> int:
    """The next multiple of the number of devices along some axes of the mesh."""
    return share_size(size, axes) * _num_parts(axes)


def share_size(size: int, axes: Sequence[str] = AXES) -> int:
    """The part of `size` rows that falls to each device, rounded up."""
    return -(-size // _num_parts(axes))


# --- Placing -------------------------------------------------------------------------


def put_replicated(tree: Any) -> Any:
    """Copies of a pytree on every device of the mesh (host call).

    A leaf that stands several times in the tree is copied once.
    """
    mesh = jax.sharding.get_mesh()
    target = None if mesh.size < 2 else NamedSharding(mesh, PartitionSpec())
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
    if jax.sharding.get_mesh().size < 2:
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


def whole(tree: Any) -> Any:
    """Gives each process all of a pytree of which several may have parts (host call).

    Such leaves become NumPy arrays, one after another; all processes have to call it.
    """

    def get(x):
        is_whole = x.is_fully_addressable or x.is_fully_replicated
        return x if is_whole else multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(get, tree)


def put_on_first(tree: Any) -> Any:
    """Moves a pytree to one device, the first in use (host call)."""
    return jax.device_put(tree, _devices()[0])


def _constrain(tree: Any, spec: PartitionSpec) -> Any:
    if num_devices() == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec), tree)


def replicated(tree: Any) -> Any:
    """Within a program: the same values on every device."""
    return _constrain(tree, PartitionSpec())


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
    cut = (i for i, size in enumerate(sizes, axis) if size % _num_parts(AXES) == 0)
    return _spec(next(cut, None))


def cut_clients(tree: Any) -> Any:
    """Within a program: rows [K', ...] cut by clients, K' a multiple of the devices."""
    return _constrain(tree, _spec(0))


def split_edges(tree: Any) -> Any:
    """Within a program: rows [E, ...] cut along the mesh's axis `edges`."""
    if edge_parts() == 1:
        return tree
    spec = PartitionSpec(EDGES)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec), tree)


def varying(tree: Any) -> Any:
    """Marks constants that each share will change, such as the carry of a scan."""
    axes = set(_current().manual_axes)
    if not axes:
        return tree

    def mark(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(mark, tree)


def _spec(axis: int | None, axes: Sequence[str] = AXES) -> PartitionSpec:
    if axis is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, tuple(axes))


# --- Sharing work --------------------------------------------------------------------


def concat_parts(fn: Callable[..., Any], out_axis: int = 0) -> Callable[..., Any]:
    """`fn` on each device's share of the leading axis, results concatenated.

    Args:
      fn: (*rows, *shared) -> results; pytrees with a leading axis, whose rows it
        treats apart, and what is the same for all. It may close over no tracer.
      out_axis: the axis of its results that follows the rows.

    Returns:
      (*rows, shared=()) -> results. Where the devices do not divide the rows, the last
      row is computed again as padding and dropped (`out_axis` = 0) or left
      (otherwise). A leaf may have the rows of padding already.
    """

    def parts(*rows, shared=()):
        if num_devices() == 1:
            return fn(*rows, *shared)
        spread = jax.shard_map(
            lambda rows, shared: fn(*rows, *varying(shared)),
            in_specs=(_spec(0), _spec(None)),
            out_specs=_spec(out_axis),
        )
        size = min(x.shape[0] for x in jax.tree.leaves(rows))
        if size % num_devices() == 0:
            return spread(rows, shared)
        indices = jnp.minimum(jnp.arange(padded_size(size)), size - 1)
        results = spread(
            jax.tree.map(lambda x: x[indices] if len(x) == size else x, rows), shared
        )
        if out_axis:
            return results
        return jax.tree.map(lambda x: x[:size], results)

    return parts


def map_columns(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`fn` on each device's share of the columns of a matrix.

    Rows that were shared out change places with columns on the way, an all-to-all.

    Args:
      fn: (matrix [C, N], *shared) -> [R, N], each column from that column alone. It may
        close over no tracer.
    """

    def mapped(matrix, *shared):
        if num_devices() == 1:
            return fn(matrix, *shared)
        spread = jax.shard_map(
            lambda matrix, shared: fn(matrix, *varying(shared)),
            in_specs=(_spec(1), _spec(None)),
            out_specs=_spec(1),
        )
        return _by_rows(spread(_with_columns(matrix), shared)[:, : matrix.shape[1]])

    return mapped


def sum_columns(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Sum of what `fn` makes of each device's share of the columns of a matrix.

    Args:
      fn: (matrix [C, N], *shared) -> a sum over columns, to which zeros add nothing. It
        may close over no tracer.
    """

    def total(matrix, *shared):
        in_axes = (1, *[None] * len(shared))
        matrix = matrix if num_devices() == 1 else _with_columns(matrix)
        return sum_parts(fn, in_axes)(matrix, *shared)

    return total


def _with_columns(matrix: jax.Array) -> jax.Array:
    """A matrix with columns of zeros, so that the devices divide them."""
    extra = padded_size(matrix.shape[1]) - matrix.shape[1]
    return jnp.pad(_by_rows(matrix), ((0, 0), (0, extra)))


def _by_rows(matrix: jax.Array) -> jax.Array:
    """Cut by rows where the devices divide them.

    Else XLA carries the cut of columns through a reshape into axes that it may not
    divide, and copies all of them to every device.
    """
    is_cut = len(matrix) % _num_parts(AXES) == 0
    return cut_clients(matrix) if is_cut else matrix


def to_clients(values: jax.Array) -> jax.Array:
    """Within `concat_parts`: moves windows to where their clients are, an all-to-all.

    Args:
      values: [K, B, ...] of the device's windows.

    Returns:
      [K' / D, D, B, ...], the windows of all D devices for the device's clients; K' is
      K rounded up by rows of zeros. [K, 1, B, ...] on one device.
    """
    if not _current().manual_axes:
        return values[:, None]
    extra = padded_size(len(values)) - len(values)
    values = jnp.pad(values, ((0, extra), *[(0, 0)] * (values.ndim - 1)))
    values = values.reshape(_num_parts(AXES), -1, *values.shape[1:])
    return jax.lax.all_to_all(values, AXES, split_axis=0, concat_axis=1)


def take_windows(share: jax.Array, indices: jax.Array) -> jax.Array:
    """Within `sum_parts`: the windows of a minibatch, out of all devices' shares.

    Each device adds the rows that it has, and zeros for the others: one reduce-scatter.

    Args:
      share: [S / D, N], rows of windows of which each of D devices along `clients` has
        a share.
      indices: [B] of all windows; D divides B.

    Returns:
      [B / D, N], the device's share of the minibatch.
    """
    if CLIENTS not in _current().manual_axes:
        return share[indices]
    first = jax.lax.axis_index(CLIENTS) * len(share)
    places = indices - first
    is_here = (places >= 0) & (places < len(share))
    rows = jnp.where(is_here[:, None], share[jnp.where(is_here, places, 0)], 0)
    sent = _as_whole_bytes(rows).reshape(_num_parts((CLIENTS,)), -1, rows.shape[1])
    sum_ = jax.lax.psum_scatter(sent, CLIENTS)
    if rows.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(sum_, rows.dtype)
    return sum_.astype(rows.dtype)


def _as_whole_bytes(rows: jax.Array) -> jax.Array:
    """What collectives of all backends add: short floats as their bits, beside 0."""
    if rows.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(rows, jnp.uint16)
    return rows.astype(jnp.int8) if rows.dtype == jnp.int4 else rows


def sum_parts(
    fn: Callable[..., Any],
    in_axes: Sequence[int | None],
    axes: Sequence[str] = AXES,
) -> Callable[..., Any]:
    """`fn` on each device's share of its arguments, results summed.

    Args:
      fn: function whose results are sums over the shared axis; no closed-over tracers.
      in_axes: for each argument the axis that is shared, or None. Its size must be a
        multiple of the devices along `axes`: see `padded_size`.
      axes: of the mesh, along which the arguments are shared out. What `fn` does is
        left to XLA to cut along the others: see `split_edges`.
    """

    def total(*args):
        if num_devices() == 1:
            return fn(*args)

        def share(*args):
            return jax.lax.psum(fn(*varying(args)), tuple(axes))

        return jax.shard_map(
            share,
            in_specs=tuple(_spec(axis, axes) for axis in in_axes),
            out_specs=_spec(None),
            axis_names=set(axes),
        )(*args)

    return total
