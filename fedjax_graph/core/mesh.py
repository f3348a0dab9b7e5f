"""Work spread over devices: an axis of independent parts is cut into equal shares.

XLA's partitioner is the engine (`jax.shard_map` over a mesh of all devices). On one
device each function here is the plain call. A CPU counts as one device unless told
otherwise: `use_cpu_cores` makes each core a device, so that clients, whose own products
are too small to be shared by cores, train side by side.
"""

import mmap
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "devices"
_WAIT_FLAG = "xla_cpu_collective_call_terminate_timeout_seconds"


def use_cpu_cores(num_cores: int | None = None) -> None:
    """Makes each CPU core a device; only before JAX has been used.

    Args:
      num_cores: how many; by default those that this process may use, at most 8, as
        each holds a copy of what is not shared out.
    """
    if num_cores is None:
        has_affinity = hasattr(os, "sched_getaffinity")  # Linux
        usable = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
        num_cores = min(usable or 1, 8)
    if num_cores > 1:
        _let_devices_wait()
    if jax.config.jax_num_cpu_devices != num_cores:
        jax.config.update("jax_num_cpu_devices", num_cores)


def _let_devices_wait() -> None:
    """Lets CPU devices finish their shares at any distance in time.

    XLA aborts the process when one has waited 40 seconds for another, which a busy
    machine and a long round make happen. An unknown flag aborts as well, so it is set
    only where the library has it.
    """
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


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), (AXIS,))


def _spec(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)


def put_replicated(tree: Any) -> Any:
    """Copies of a pytree on every device (host call).

    A leaf that stands several times in the tree is copied once.
    """
    is_single = jax.device_count() == 1
    target = None if is_single else NamedSharding(_mesh(), PartitionSpec())
    leaves, structure = jax.tree.flatten(tree)
    numbers: dict[int, int] = {}  # in order of appearance, the same in all processes
    for leaf in leaves:
        numbers.setdefault(id(leaf), len(numbers))
    distinct = {numbers[id(leaf)]: leaf for leaf in leaves}
    placed = jax.device_put(distinct, target)
    return jax.tree.unflatten(structure, [placed[numbers[id(leaf)]] for leaf in leaves])


def replicated(tree: Any) -> Any:
    """Within a program: the same values on every device."""
    if jax.device_count() == 1:
        return tree
    sharding = NamedSharding(_mesh(), PartitionSpec())
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), tree)


def padded_size(size: int) -> int:
    """The next multiple of the number of devices."""
    return -(-size // jax.device_count()) * jax.device_count()


def concat_parts(fn: Callable[..., Any], out_axis: int = 0) -> Callable[..., Any]:
    """`fn` on each device's share of the leading axis, results concatenated.

    Args:
      fn: (*rows, *shared) -> results; pytrees with a leading axis, whose rows it
        treats apart, and what is the same for all. It may close over no tracer.
      out_axis: the axis of its results that follows the rows.

    Returns:
      (*rows, shared=()) -> results. Where the devices do not divide the rows, the last
      row is computed again as padding and dropped (`out_axis` = 0) or left
      (otherwise).
    """

    def parts(*rows, shared=()):
        if jax.device_count() == 1:
            return fn(*rows, *shared)
        spread = jax.shard_map(
            lambda rows, shared: fn(*rows, *shared),
            mesh=_mesh(),
            in_specs=(_spec(0), _spec(None)),
            out_specs=_spec(out_axis),
            check_vma=False,
        )
        size = jax.tree.leaves(rows)[0].shape[0]
        if size % jax.device_count() == 0:
            return spread(rows, shared)
        indices = jnp.minimum(jnp.arange(padded_size(size)), size - 1)
        results = spread(jax.tree.map(lambda x: x[indices], rows), shared)
        if out_axis:
            return results
        return jax.tree.map(lambda x: x[:size], results)

    return parts


def sum_parts(
    fn: Callable[..., Any], in_axes: Sequence[int | None]
) -> Callable[..., Any]:
    """`fn` on each device's share of its arguments, results summed.

    Args:
      fn: function whose results are sums over the shared axis; no closed-over tracers.
      in_axes: for each argument the axis that is shared, or None. Its size must be a
        multiple of the number of devices: see `padded_size`.
    """
    if jax.device_count() == 1:
        return fn
    return jax.shard_map(
        lambda *args: jax.lax.psum(fn(*args), AXIS),
        mesh=_mesh(),
        in_specs=tuple(map(_spec, in_axes)),
        out_specs=_spec(None),
        check_vma=False,
    )
