"""What CNFGNN's clients and server exchange besides models, window by window."""

from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_graph.core import batching, communication, mesh, sharding
from fedjax_graph.data.traffic.windows import TrafficData


class Hidden(NamedTuple):
    """h_c of windows, which clients have exactly and the server as it arrived.

    Of all windows the arrays are rows [S, K H], a window each: no axis is short.
    """

    at_clients: jax.Array  # [K, B, H]
    packed: communication.Packed | None  # None where it crosses as it is

    @classmethod
    def of(cls, h_c: jax.Array, bits: int, sent: jax.Array | None = None) -> "Hidden":
        """Both, from what clients have, and what they send if it is something else."""
        if sent is None:
            return cls(h_c, None if bits == 32 else communication.pack(h_c, bits))
        return cls(h_c, communication.pack(sent, bits))

    def at_server(self) -> jax.Array:
        """What the server reads, float32."""
        if self.packed is None:
            return self.at_clients
        return communication.unpack(self.packed)

    def sent(self, real: Fraction) -> "Hidden":
        """Marks what crosses; `real` is the part that is not padding."""
        if self.packed is None:
            return self._replace(at_clients=communication.up(self.at_clients, real))
        return self._replace(packed=communication.up(self.packed, real))

    def as_rows(self) -> "Hidden":
        """[K, B, H] as [B, K H]."""
        return jax.tree.map(
            lambda x: jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1), self
        )

    def of_clients(self, num_clients: int) -> "Hidden":
        """[B, K H] as [K, B, H]."""
        return jax.tree.map(
            lambda x: jnp.swapaxes(x.reshape(len(x), num_clients, -1), 0, 1), self
        )


def real_share(data: TrafficData, batch_size: int) -> Fraction:
    """The part of a pass's batches that is not padding, for the ledger."""
    steps = batching.steps_per_epoch(len(data.starts), batch_size)
    padded = mesh.padded_size(batch_size, (mesh.CLIENTS,))
    return Fraction(len(data.starts), steps * padded)


def for_all_windows(
    fn, batch_size: int, data: TrafficData, *params, axis: int, out_axis: int
) -> Any:
    """Fills arrays with what `fn(starts, data, *params)` gives for batches of windows.

    Batches come one after another. S, the windows, is rounded up to whole batches, as
    many for each device. The devices share the batch size, so that each needs less
    memory the more there are.

    Args:
      fn: (starts [B], data, *params) -> pytree of arrays.
      batch_size: of all devices together.
      data: whose windows.
      *params: further arguments of `fn`.
      axis: of each array of `fn`, along which batches are joined.
      out_axis: of each array, along which those of the devices are.
    """
    batch_size = mesh.share_size(batch_size)

    def fill(starts, data, *params):
        def place(buffer, values, index):
            start = index * values.shape[axis]
            return jax.lax.dynamic_update_slice_in_dim(buffer, values, start, axis)

        def step(buffers, one):
            starts, index = one
            values = fn(starts, data, *params)
            return jax.tree.map(lambda b, v: place(b, v, index), buffers, values), None

        def empty(one):
            shape = list(one.shape)
            shape[axis] *= len(starts)
            return jnp.zeros(shape, one.dtype)

        batch = jax.eval_shape(fn, starts[0], data, *params)
        buffers = mesh.varying(jax.tree.map(empty, batch))
        batches = (starts, jnp.arange(len(starts)))
        return jax.lax.scan(step, buffers, batches)[0]

    starts, _ = batching.batches(data.starts, batch_size)
    starts = starts[
        jnp.minimum(jnp.arange(mesh.padded_size(len(starts))), len(starts) - 1)
    ]
    return sharding.concat_parts(fill, out_axis)(starts, shared=(data, *params))


def real_windows(data: TrafficData, batch_size: int) -> Fraction:
    """The part of the S windows of `for_all_windows` that is not padding."""
    batch_size = mesh.share_size(batch_size)
    steps = batching.steps_per_epoch(len(data.starts), batch_size)
    return Fraction(len(data.starts), mesh.padded_size(steps) * batch_size)
