"""Data of which a device holds its clients' rows alone.

A type of data names its leaves that grow with clients, such as readings [K, T], or
pytrees of them:

    class TrafficData(NamedTuple):
        CLIENT_ROWS = ("speed",)

Where several devices share the work, `put` places such a leaf as `ClientRows`, and
copies the others to each device. Who maps over clients gets a client's row, as of an
array (`clients.map_clients`); who computes for all clients at once, on a share of the
windows, has them exchanged (`columns`). Anything else may index the rows as an array,
for which all of them are gathered. On one device everything is an array.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import mesh, trees
from fedjax_graph.core.errors import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ClientRows:
    """Holds [K, ...], cut by clients; within a share of the work a device's own.

    It is indexed, compared, computed with and converted as the array of all rows, which
    gathers them. Within a share every device has to come to that, or to `columns`, as
    often as the others: not under a condition of one client. Functions of trees must
    not reorder the rows: `take` does.
    """

    padded: Any  # [K', ...], K rounded up to what the devices divide by rows of zeros
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # [K, ...]

    __array_priority__ = 100  # as arrays of JAX: NumPy's leave what is computed to them

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

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self.whole(), dtype, copy=copy)

    def __getitem__(self, index) -> jax.Array:
        return self.whole()[index]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.whole())

    def whole(self) -> jax.Array:
        """All rows [K, ...], within a share gathered from all devices.

        Raises:
          InputError: if these are not all clients' rows, or of another mesh.
        """
        rows, axes = self._checked(), _manual_axes()
        if axes:
            rows = jax.lax.all_gather(rows, axes, tiled=True)
        return rows[: len(self)]

    def columns(self, indices: jax.Array) -> jax.Array:
        """Elements of all clients' rows [K, T] at indices of their second axis.

        Within a share each device may ask for others: an all-to-all.

        Args:
          indices: [...] int32.

        Returns:
          [K, ...].

        Raises:
          InputError: as `whole`.
        """
        rows, axes, indices = self._checked(), _manual_axes(), jnp.asarray(indices)
        if not axes:
            return _columns(rows, indices)[: len(self)]
        found = _columns(rows, jax.lax.all_gather(indices, axes))  # [K' / D, D, ...]
        sent = jax.lax.all_to_all(found, axes, 1, 0, tiled=True)
        return sent.reshape(-1, *indices.shape, *self.shape[2:])[: len(self)]

    def _checked(self) -> jax.Array:
        num_rows = mesh.padded_size(len(self)) // mesh.num_parts(_manual_axes())
        if self.padded.shape != (num_rows, *self.shape[1:]):
            raise InputError(
                f"rows of {len(self)} clients: {self.padded.shape} where "
                f"{(num_rows, *self.shape[1:])} is expected; map over them by "
                "clients.map_clients, choose some by client_rows.take, and take the "
                "array of all, rows[:], for the rest"
            )
        return self.padded


def _computed(name: str) -> Callable[..., Any]:
    def compute(self: ClientRows, *others: Any) -> Any:
        return getattr(self.whole(), name)(*others)

    return compute


_UNARY = ("neg", "pos", "abs", "invert")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_LOGICAL = ("and", "or", "xor")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
for _name in (*_UNARY, *_BINARY, *_LOGICAL, *_COMPARED):
    setattr(ClientRows, f"__{_name}__", _computed(f"__{_name}__"))
for _name in (*_BINARY, *_LOGICAL):
    setattr(ClientRows, f"__r{_name}__", _computed(f"__r{_name}__"))


def columns(rows: Any, indices: jax.Array) -> jax.Array:
    """Elements [K, ...] of all clients' rows [K, T] at indices [...].

    Args:
      rows: an array, or `ClientRows`.
      indices: int32, of the second axis.
    """
    return rows.columns(indices) if is_rows(rows) else _columns(rows, indices)


def _columns(rows: jax.Array, indices: jax.Array) -> jax.Array:
    return jax.vmap(lambda one: one[indices])(rows)


def _manual_axes() -> tuple[str, ...]:
    return tuple(axis for axis in mesh.AXES if axis in mesh.manual_axes())


def is_rows(x: Any) -> bool:
    """Tells `ClientRows` from arrays."""
    return isinstance(x, ClientRows)


def counts(tree: Any) -> list[int]:
    """How many rows each leaf of a pytree has, padding of `ClientRows` apart."""
    return [len(x) for x in jax.tree.leaves(tree, is_leaf=is_rows)]


def unwrapped(tree: Any) -> Any:
    """The arrays of a pytree: of `ClientRows` those with padding, [K', ...]."""
    return jax.tree.map(lambda x: x.padded if is_rows(x) else x, tree, is_leaf=is_rows)


def whole(tree: Any) -> Any:
    """A pytree with the array of all rows in place of each `ClientRows`."""
    return jax.tree.map(lambda x: x.whole() if is_rows(x) else x, tree, is_leaf=is_rows)


def take(tree: Any, indices: jax.Array) -> Any:
    """Takes the rows `indices` [C] of a pytree of [K, ...], as `trees.take`."""
    return trees.take(unwrapped(tree), indices)


def first_row(tree: Any) -> Any:
    """The rows of the first client."""
    return jax.tree.map(lambda x: x[0], tree, is_leaf=is_rows)


def on_host(tree: Any) -> Any:
    """The leaves of a pytree as NumPy arrays, of `ClientRows` without padding."""
    return jax.tree.map(np.asarray, tree, is_leaf=is_rows)


def specs(tree: Any, axes: tuple[str, ...] = mesh.AXES) -> Any:
    """How the leaves of a pytree enter a share: rows cut by clients, others whole."""
    return jax.tree.map(
        lambda x: mesh.spec(0 if is_rows(x) else None, axes), tree, is_leaf=is_rows
    )


# --- Placing -------------------------------------------------------------------------


def named(tree: Any) -> list[Any]:
    """The leaves of a pytree that its types of data name as rows of clients.

    Raises:
      InputError: if one of them is no array with rows.
    """
    data = filter(_names_rows, jax.tree.leaves(tree, is_leaf=_names_rows))
    parts = [(name, getattr(one, name)) for one in data for name in one.CLIENT_ROWS]
    found = []
    for name, part in parts:
        leaves = jax.tree.leaves(part, is_leaf=is_rows)
        if not leaves or not all(getattr(x, "shape", ()) for x in leaves):
            raise InputError(f"CLIENT_ROWS: {name} is no array with a row for a client")
        found += leaves
    return found


def _names_rows(x: Any) -> bool:
    return hasattr(x, "CLIENT_ROWS")


def _is_here(x: Any) -> bool:
    if mesh.num_devices() == 1 or len(x.padded) != mesh.padded_size(len(x)):
        return False
    here = mesh.spread_shardings(x.padded, len(x.padded))
    return x.padded.sharding.is_equivalent_to(here, x.padded.ndim)


def _as_arrays(tree: Any) -> Any:
    """With arrays in place of what another mesh has (host call)."""

    def of(x):
        if not is_rows(x) or _is_here(x):
            return x
        return np.asarray(mesh.whole(x.padded))[: len(x)]

    return jax.tree.map(of, tree, is_leaf=is_rows)


def to_device(tree: Any) -> Any:
    """Puts data that were just made on the device (host call).

    Where several devices share the work, rows of clients stay on the host until `put`
    cuts them: one device may not hold all of them.
    """
    rows = set() if mesh.num_devices() == 1 else set(map(id, named(tree)))

    def put_one(x):
        if isinstance(x, jax.Array):  # of several processes maybe on all devices
            return x
        if id(x) not in rows:
            return jax.device_put(x)
        return np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(put_one, tree)


def put(tree: Any) -> Any:
    """Places data on the mesh: rows where their clients live, copies of the rest.

    A leaf that stands several times in the tree is placed once (host call).
    """
    tree = _as_arrays(tree)

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
    tree = _as_arrays(tree)

    def cut(x):
        padded = jax.ShapeDtypeStruct((mesh.padded_size(len(x)), *x.shape[1:]), x.dtype)
        return ClientRows(mesh.abstract_spread(padded, len(padded)), x.shape)

    return _placed(tree, cut, lambda rest: mesh.abstract_spread(rest, 0))


def spread(tree: Any) -> Any:
    """Within a program: places data that it made as `put` does."""

    def cut(x):
        extra = mesh.padded_size(len(x)) - len(x)
        padded = jnp.pad(x, [(0, extra), *[(0, 0)] * (x.ndim - 1)])
        return ClientRows(mesh.cut_clients(padded), x.shape)

    return _placed(tree, cut, mesh.replicated)


def _placed(tree: Any, cut: Callable[[Any], Any], copy: Callable[[Any], Any]) -> Any:
    if mesh.num_devices() == 1:
        return copy(tree)
    rows = {id(x): x for x in named(tree) if not is_rows(x)}
    placed = {key: cut(x) for key, x in rows.items()}
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_rows)
    rest = copy([None if is_rows(x) or id(x) in placed else x for x in leaves])
    return structure.unflatten(
        [
            placed.get(id(x), x) if y is None else y
            for x, y in zip(leaves, rest, strict=True)
        ]
    )
