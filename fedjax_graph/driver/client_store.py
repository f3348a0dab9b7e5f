"""Many clients: the host keeps their states and data, a device has a cohort of them.

A round reads and writes what the clients of its cohort keep, and no other's. So
`ClientStore` holds a row for each client in a NumPy array or in a file, and for a round
gathers those of the cohort, runs the method's own compiled round on them, and writes
them back. Memory on the device and time are a cohort's, however many clients there are.

    store = ClientStore(algorithm, data, jax.random.key(0), folder="clients")
    for number in range(store.num_rounds, 100):
        key = jax.random.fold_in(jax.random.key(1), number)
        indices = clients.draw_indices(key, store.num_clients, 1000)
        metrics = store.round(indices, key)

A client's draws follow its identity (`clients.client_keys`), so they are those of a
round that has all clients on the device and samples the same cohort.
"""

import functools
import io
import os
import pathlib
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_graph.core import arrays, client_rows, clients, mesh, trees
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm, Metrics, State
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.graphs import Graph
from fedjax_graph.driver.writers import write_atomically

CLIENTS_AT_ONCE = 1000  # whose first states are made together
TABLE, LAST_ROUND = "clients.npy", "last_round.npz"


class ClientStore:
    """Runs rounds of a method on cohorts of many clients, in one process."""

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        data: Data,
        key: jax.Array,
        folder: str | os.PathLike[str] | None = None,
        *,
        resume: bool = False,
    ) -> None:
        """Makes everybody's first state, or takes up those in a folder.

        Args:
          algorithm: one of `participation` 1, as all of the cohort that `round` is
            given take part.
          data: to train on, with `client_ids` [K]. Arrays with K rows belong to the
            clients, and stay where they are, which may be a `np.memmap`; the others
            and a graph are shared by all, and put on the device once.
          key: of the first state.
          folder: for the states, the clients' in a `.npy` file with a field for each
            array; they are those after the last round, whenever the process is killed.
            None: in memory.
          resume: whether to go on from what is in the folder, if there is anything.

        Raises:
          InputError: if a round of the method samples by itself or needs more than the
            cohort's rows, or its clients exchange data before; two clients have one id;
            an array with K rows may be shared by all, as the task does not read it for
            the clients; or the folder holds a store of states with other arrays (a
            method with the same ones cannot be told from this one), of other clients,
            or one that is not to be resumed.
        """
        clients.check_clients(data, "data")
        if algorithm.participation != 1:
            raise InputError(
                f"algorithm: participation={algorithm.participation}: expected 1, as a "
                "round is given its cohort"
            )
        if algorithm.exchange:
            raise InputError(
                "algorithm: its clients exchange data before the first round; give the "
                "store what `prepared` makes of the data, and the algorithm without "
                "`exchange`"
            )
        if algorithm.reads_all_clients:
            raise InputError(
                "algorithm: its rounds read what clients outside of the cohort keep; "
                "run it with all clients' states on the device"
            )
        data = client_rows.on_host(data)
        self._is_own = _own_rows(data, algorithm.client_data)
        self._data = jax.tree.map(
            lambda x, is_own: x if is_own else mesh.put_replicated(x),
            data,
            self._is_own,
        )
        self._folder = None if folder is None else pathlib.Path(folder)
        self._program = jax.jit(algorithm.round)
        self._state, self._is_row = _layout(algorithm.init, self._rows)
        self.num_rounds = 0
        self._last_written: tuple[int, int] | None = None
        if self._folder is None or not (self._folder / LAST_ROUND).exists():
            self._make(jax.jit(algorithm.init), key)
        elif resume:
            self._resume(self._folder)
        else:
            raise InputError(
                f"{self._folder}: holds a store; resume it or name a new folder"
            )

    @property
    def num_clients(self) -> int:
        """K."""
        return len(self._data.client_ids)

    def gather(self, indices: np.ndarray) -> tuple[State, Data]:
        """Puts state and data of some clients on the device, as a method takes them.

        Args:
          indices: [C], different ones among the K clients.

        Raises:
          InputError: if they are not.
        """
        return mesh.put_replicated(self._cohort(indices))

    def round(self, indices: np.ndarray, key: jax.Array) -> Metrics:
        """Runs a round on a cohort; compiles once for each size of a cohort.

        Args:
          indices: see `gather`.
          key: of the round.

        Returns:
          The round's metrics, in NumPy.

        Raises:
          InputError: see `gather`, or if another process has written to the folder.
        """
        cohort = self._cohort(indices)
        if mesh.num_devices() > 1:  # else the call itself is the cheapest way there
            cohort = mesh.put_replicated(cohort)
        state, metrics = jax.device_get(self._program(*cohort, key))
        self._log(self.num_rounds + 1, indices, state)
        self._write(indices, state)
        self.num_rounds += 1
        return metrics

    def _cohort(self, indices: np.ndarray) -> tuple[State, Data]:
        """State and data of a cohort on the host; see `gather`."""
        arrays.check_shape("indices", indices, (None,))
        arrays.check_indices("indices", indices, self.num_clients)
        if not np.diff(np.sort(indices)).all():
            raise InputError("indices: a client stands twice in the cohort")
        state = jax.tree.map(
            lambda x, is_row: x[indices] if is_row else x, self._state, self._is_row
        )
        return state, self._rows(indices)

    def _rows(self, indices: np.ndarray) -> Data:
        """The data of some clients, and what is shared by all."""
        return jax.tree.map(
            lambda x, is_own: x[indices] if is_own else x, self._data, self._is_own
        )

    def _write(self, indices: np.ndarray, state: State) -> None:
        """Takes over the state of a cohort, [C, ...] where clients have rows."""

        def put(x, new, is_row):
            if not is_row:
                return new
            x[indices] = new
            return x

        self._state = jax.tree.map(put, self._state, state, self._is_row)

    def _map_rows(self, fn: Callable[[str, Any], Any]) -> State:
        """The state, with `fn(name, x)` in place of x with a row for each client."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x, is_row: fn(_name(path), x) if is_row else x,
            self._state,
            self._is_row,
        )

    def _make(self, init: Callable[..., State], key: jax.Array) -> None:
        """First states, made for some clients at a time."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._place(self._new_table)
        size = min(CLIENTS_AT_ONCE, self.num_clients)
        for start in range(0, self.num_clients, size):
            indices = np.arange(size) + min(start, self.num_clients - size)
            self._write(indices, jax.device_get(init(key, self._rows(indices))))
            if not any(jax.tree.leaves(self._is_row)):
                break
        self._log(0, np.arange(0), self._map_rows(lambda name, x: x[:0]))

    def _place(self, make: Callable[[np.dtype], np.ndarray]) -> None:
        """Keeps the clients' rows in a table.

        All that a client has lies together: in a file that is a page to find and to
        write, where an array of its own for each leaf would make it one for each.

        Args:
          make: type of a client's record -> [K] of them; not called if there are none.
        """
        fields: dict[str, Any] = {}
        self._map_rows(fields.__setitem__)
        if fields:
            types = [(name, x.dtype, x.shape[1:]) for name, x in fields.items()]
            table = make(np.dtype(types, align=True))
            self._state = self._map_rows(lambda name, _: table[name])

    def _new_table(self, record: np.dtype) -> np.ndarray:
        if self._folder is None:
            return np.empty(self.num_clients, record)
        path, shape = self._folder / TABLE, (self.num_clients,)
        return np.lib.format.open_memmap(path, "w+", record, shape)

    # --- What a kill leaves -----------------------------------------------------------

    def _log(self, number: int, indices: np.ndarray, state: State) -> None:
        """Writes what a round changes to a file, whole, before the states change.

        Opening the store changes them again.
        """
        if self._folder is None:
            return
        path = self._folder / LAST_ROUND
        if _version(path) != self._last_written:
            raise InputError(
                f"{self._folder}: another store has written to it since this one was "
                "opened; only one may be in use"
            )
        content, leaves = io.BytesIO(), jax.tree.leaves_with_path(state)
        np.savez(
            content,
            indices=indices,
            num_rounds=number,
            client_ids=self._checksum,
            **{_name(place): x for place, x in leaves},
        )
        write_atomically(path, content.getvalue())
        self._last_written = _version(path)

    @functools.cached_property
    def _checksum(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self._data.client_ids))

    def _resume(self, folder: pathlib.Path) -> None:
        def open_table(record):
            shape = (self.num_clients,)
            whole = np.load(folder / TABLE, mmap_mode="r")  # r+ would fill up with 0
            _fitting(whole, shape, record)
            return _fitting(np.load(folder / TABLE, mmap_mode="r+"), shape, record)

        try:
            log = dict(np.load(io.BytesIO((folder / LAST_ROUND).read_bytes())))
            num_rounds, indices = int(log["num_rounds"]), log["indices"]
            state = jax.tree_util.tree_map_with_path(
                lambda path, like, is_row: _fitting(
                    log[_name(path)],
                    (len(indices), *like.shape[1:]) if is_row else like.shape,
                    like.dtype,
                ),
                self._state,
                self._is_row,
            )
            self._place(open_table)
            is_same = log["client_ids"] == self._checksum
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{folder}: cannot be resumed ({error}): damaged, or of another method "
                "or number of clients; name a new folder"
            ) from error
        if not is_same:
            raise InputError(f"{folder}: is of other client_ids; name a new folder")
        self.num_rounds = num_rounds
        self._last_written = _version(folder / LAST_ROUND)
        self._write(indices, state)


def _own_rows(data: Data, client_data: Callable[[Data], Any] | None) -> Data:
    """Which arrays of some data have a row for each client, as a pytree of bools.

    Args:
      data: of NumPy arrays, with `client_ids` [K].
      client_data: see `FederatedAlgorithm`.

    Raises:
      InputError: if it does not read an array with K rows, which may so be shared.
    """
    size = len(data.client_ids)

    def has_rows(x):
        if isinstance(x, Graph):
            return jax.tree.map(lambda _: False, x)
        return np.ndim(x) > 0 and len(x) == size

    found = jax.tree.map(has_rows, data, is_leaf=lambda x: isinstance(x, Graph))
    known = (data.client_ids, getattr(data, "client_weights", None))
    leaves = jax.tree.leaves_with_path(data)
    read = (
        trees.leaves_read(client_data, data) if client_data else [False] * len(leaves)
    )
    for (path, x), is_own, is_read in zip(
        leaves, jax.tree.leaves(found), read, strict=True
    ):
        if is_own and not is_read and not any(x is other for other in known):
            raise InputError(
                f"{_name(path, 'data')}: has {size} rows, as many as there are "
                "clients, but the method's client_data does not read it, so it may be "
                "shared by all: let client_data read it, give it another shape, or run "
                "the method with all clients on the device"
            )
    return found


def _layout(
    init: Callable[..., State], rows: Callable[[np.ndarray], Data]
) -> tuple[State, State]:
    """The arrays of a state, and which of them have a row for each client.

    Args:
      init: of a method.
      rows: indices -> data of these clients.

    Returns:
      The state of two clients, as `jax.ShapeDtypeStruct`s, and one of bools.

    Raises:
      InputError: if an array has more than a row for each client.
    """
    two, three = (
        jax.eval_shape(init, jax.random.key(0), rows(np.zeros(n, int))) for n in (2, 3)
    )

    def is_row(few, more):
        if few.shape == more.shape:
            return False
        if (few.shape[:1], more.shape) == ((2,), (3, *few.shape[1:])):
            return True
        raise InputError(
            f"algorithm: its state has an array {more.shape} for 3 clients; expected a "
            "row for each, or the same shape for any number of them"
        )

    return two, jax.tree.map(is_row, two, three)


def _version(path: pathlib.Path) -> tuple[int, int] | None:
    """What tells a file from one that has replaced it; None of none."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _name(path: tuple[Any, ...], what: str = "state") -> str:
    return f"{what}.{jax.tree_util.keystr(path, simple=True, separator='.')}"


def _fitting(x: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that was read; a `ValueError` if it has another shape or type.

    NumPy's files keep of types that are not its own, such as bfloat16, the bytes alone.
    """
    stored = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype))
    if x.shape != shape or x.dtype != stored:
        raise ValueError(f"{x.dtype} {x.shape}, expected {dtype} {shape}")
    return x.view(dtype)
