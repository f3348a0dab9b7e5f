"""Work spread over the devices of a mesh: an axis is cut into equal shares.

XLA's partitioner is the engine (`jax.shard_map`); which devices there are, and where
arrays lie, is `core.mesh`'s. Where no mesh is set, or it has one device, each function
here is the plain call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_graph.core import client_rows, mesh
from fedjax_graph.core.mesh import AXES, CLIENTS, varying


def concat_parts(fn: Callable[..., Any], out_axis: int = 0) -> Callable[..., Any]:
    """`fn` on each device's share of the leading axis, results concatenated.

    Args:
      fn: (*rows, *shared) -> results; pytrees with a leading axis, whose rows it
        treats apart, and what is the same for all, of whose `ClientRows` it gets the
        device's own. It may close over no tracer.
      out_axis: the axis of its results that follows the rows.

    Returns:
      (*rows, shared=()) -> results. Where the devices do not divide the rows, the last
      row is computed again as padding and dropped (`out_axis` = 0) or left
      (otherwise). A leaf that is already padded to `mesh.padded_size` rows is taken
      as it is.
    """

    def parts(*rows, shared=()):
        if mesh.num_devices() == 1:
            return fn(*rows, *shared)
        size = min(client_rows.counts(rows))
        rows = client_rows.unwrapped(rows)
        spread = jax.shard_map(
            lambda rows, shared: fn(*rows, *varying(shared)),
            in_specs=(mesh.spec(0), client_rows.specs(shared)),
            out_specs=mesh.spec(out_axis),
        )
        if size % mesh.num_devices() == 0:
            return spread(rows, shared)
        indices = jnp.minimum(jnp.arange(mesh.padded_size(size)), size - 1)
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
        if mesh.num_devices() == 1:
            return fn(matrix, *shared)
        spread = jax.shard_map(
            lambda matrix, shared: fn(matrix, *varying(shared)),
            in_specs=(mesh.spec(1), mesh.spec(None)),
            out_specs=mesh.spec(1),
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
        matrix = matrix if mesh.num_devices() == 1 else _with_columns(matrix)
        return sum_parts(fn, in_axes)(matrix, *shared)

    return total


def _with_columns(matrix: jax.Array) -> jax.Array:
    """A matrix with columns of zeros, so that the devices divide them."""
    extra = mesh.padded_size(matrix.shape[1]) - matrix.shape[1]
    return jnp.pad(_by_rows(matrix), ((0, 0), (0, extra)))


def _by_rows(matrix: jax.Array) -> jax.Array:
    """Cut by rows where the devices divide them.

    Else XLA carries the cut of columns through a reshape into axes that it may not
    divide, and copies all of them to every device.
    """
    is_cut = len(matrix) % mesh.num_parts(AXES) == 0
    return mesh.cut_clients(matrix) if is_cut else matrix


def to_clients(values: jax.Array) -> jax.Array:
    """Within `concat_parts`: moves windows to where their clients are, an all-to-all.

    Args:
      values: [K, B, ...] of the device's windows.

    Returns:
      [K' / D, D, B, ...], the windows of all D devices for the device's clients; K' is
      K rounded up by rows of zeros. [K, 1, B, ...] on one device.
    """
    if not mesh.manual_axes():
        return values[:, None]
    extra = mesh.padded_size(len(values)) - len(values)
    values = jnp.pad(values, ((0, extra), *[(0, 0)] * (values.ndim - 1)))
    values = values.reshape(mesh.num_parts(AXES), -1, *values.shape[1:])
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
    if CLIENTS not in mesh.manual_axes():
        return share[indices]
    first = jax.lax.axis_index(CLIENTS) * len(share)
    places = indices - first
    is_here = (places >= 0) & (places < len(share))
    rows = jnp.where(is_here[:, None], share[jnp.where(is_here, places, 0)], 0)
    sent = _as_whole_bytes(rows).reshape(mesh.num_parts((CLIENTS,)), -1, rows.shape[1])
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
        multiple of the devices along `axes`: see `padded_size`. What is not shared is
        as in `concat_parts`.
      axes: of the mesh, along which the arguments are shared out. What `fn` does is
        left to XLA to cut along the others: see `split_edges`.
    """

    def total(*args):
        if mesh.num_devices() == 1 or mesh.num_parts(axes) == 1:
            return fn(*args)

        args = [
            arg if axis is None else client_rows.unwrapped(arg)
            for arg, axis in zip(args, in_axes, strict=True)
        ]

        def share(*args):
            return jax.lax.psum(fn(*varying(args)), tuple(axes))

        return jax.shard_map(
            share,
            in_specs=tuple(
                client_rows.specs(arg, axes) if axis is None else mesh.spec(axis, axes)
                for arg, axis in zip(args, in_axes, strict=True)
            ),
            out_specs=mesh.spec(None),
            axis_names=set(axes),
        )(*args)

    return total
