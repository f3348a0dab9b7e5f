"""Data of which a device holds its clients' rows alone.

A type of data names its leaves that grow with clients, such as readings [K, T]:

    class TrafficData(NamedTuple):
        CLIENT_ROWS = ("speed",)

Where several devices share the work, `put` places such a leaf as `ClientRows`, and
copies the others to each device. Who maps over clients gets a client's row, as of an
array (`clients.map_clients`); who computes for all clients at once, on a share of the
windows, has them exchanged (`at`). Anything else may index the rows as an array, for
which all of them are gathered. On one device everything is an array.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_graph.core import mesh
from fedjax_graph.core.errors import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientRows:
    """Holds [K, ...], cut by clients; within a share of the work a device's own."""

    padded: Any  # [K', ...], K rounded up to what the devices divide by rows of zeros
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # [K, ...]

    @property
    def ndim(self) -> int:
        """Number of axes, that of clients included."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Type of the elements."""
        return self.padded.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __jax_array__(self) -> jax.Array:
        return self.whole()

    def __getitem__(self, index) -> jax.Array:
        return self.whole()[index]

    def whole(self) -> jax.Array:
        """All rows [K, ...], within a share gathered from all devices.

        Raises:
          InputError: if an axis has been mapped over: these are some client's own.
        """
        if self.padded.ndim != self.ndim:
            raise InputError(
                f"rows of clients {self.shape}: mapped over by something else than "
                "clients.map_clients; take the array of all, rows[:]"
            )
        rows, axes = self.padded, _manual_axes()
        if axes:
            rows = jax.lax.all_gather(rows, axes, tiled=True)
        return rows[: len(self)]

    def at(self, indices: jax.Array) -> jax.Array:
        """Elements of all clients' rows, whose second axis is the last.

        Within a share each device asks for its own: an all-to-all.

        Args:
          indices: [...] int32, on each device another share of them.

        Returns:
          [K, ...].
        """
        axes = _manual_axes()
        if not axes:
            return _at(self.padded, indices)[: len(self)]
        wanted = jax.lax.all_gather(indices, axes)  # [D, ...]
        sent = jax.lax.all_to_all(_at(self.padded, wanted), axes, 1, 0, tiled=True)
        return sent.reshape(-1, *indices.shape)[: len(self)]


def at(rows: Any, indices: jax.Array) -> jax.Array:
    """Elements [K, ...] of all clients' rows [K, T] at indices [...].

    Args:
      rows: an array, or `ClientRows`.
      indices: int32.
    """
    return rows.at(indices) if _is_rows(rows) else _at(rows, indices)


def _at(rows: jax.Array, indices: jax.Array) -> jax.Array:
    return jax.vmap(lambda one: one[indices])(rows)


def _manual_axes() -> tuple[str, ...]:
    return tuple(axis for axis in mesh.AXES if axis in mesh.manual_axes())


def _is_rows(x: Any) -> bool:
    return isinstance(x, ClientRows)


def unwrapped(tree: Any) -> Any:
    """The arrays of a pytree: of `ClientRows` those with padding, [K', ...]."""
    return jax.tree.map(
        lambda x: x.padded if _is_rows(x) else x, tree, is_leaf=_is_rows
    )


def specs(tree: Any, axes: tuple[str, ...] = mesh.AXES) -> Any:
    """How the leaves of a pytree enter a share: rows cut by clients, others whole."""
    return jax.tree.map(
        lambda x: mesh.spec(0 if _is_rows(x) else None, axes), tree, is_leaf=_is_rows
    )


# --- Placing -------------------------------------------------------------------------


def named(tree: Any) -> list[Any]:
    """The leaves of a pytree that its types of data name as rows of clients."""
    return [getattr(data, name) for data in _data_in(tree) for name in data.CLIENT_ROWS]


def _data_in(tree: Any) -> list[Any]:
    return list(filter(_names_rows, jax.tree.leaves(tree, is_leaf=_names_rows)))


def _names_rows(x: Any) -> bool:
    return hasattr(x, "CLIENT_ROWS")


def put(tree: Any) -> Any:
    """Places data on the mesh: rows where their clients live, copies of the rest.

    A leaf that stands several times in the tree is placed once (host call).
    """

    def cut(x):
        extra = np.zeros((mesh.padded_size(len(x)) - len(x), *x.shape[1:]), x.dtype)
        padded = np.concatenate([x, extra]) if len(extra) else x
        return ClientRows(mesh.put_spread(padded, len(padded)), x.shape)

    return _placed(tree, cut, mesh.put_replicated)


def abstract(tree: Any) -> Any:
    """Shapes and types of data, and where `put` would place them.

    Args:
      tree: data, or their shapes.
    """

    def cut(x):
        padded = jax.ShapeDtypeStruct((mesh.padded_size(len(x)), *x.shape[1:]), x.dtype)
        return ClientRows(mesh.abstract_spread(padded, len(padded)), x.shape)

    return _placed(tree, cut, lambda rest: mesh.abstract_spread(rest, 0))


def _placed(tree: Any, cut: Callable[[Any], Any], copy: Callable[[Any], Any]) -> Any:
    if mesh.num_devices() == 1:
        return copy(tree)
    rows = {id(x): x for x in named(tree) if not _is_rows(x)}
    placed = {key: cut(x) for key, x in rows.items()}
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_rows)
    rest = copy([None if _is_rows(x) or id(x) in placed else x for x in leaves])
    return structure.unflatten(
        [
            placed.get(id(x), x) if y is None else y
            for x, y in zip(leaves, rest, strict=True)
        ]
    )
