"""The client axis: map, chunk, sample, pad; one key for each client.

Write for one client, then `map_clients`. Randomness belongs to identities: a client's
key is `fold_in(round_key, client_id)`, so sampling, padding, chunking or reordering
clients never changes another client's draw.
"""

import contextvars
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_graph.core import arrays, client_rows, communication, mesh, sharding, trees
from fedjax_graph.core.errors import InputError

_Result = TypeVar("_Result")
_eval_clients_per_chunk: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "_eval_clients_per_chunk", default=None
)


class Cohort(NamedTuple):
    """Holds the clients of a round."""

    indices: jax.Array  # [C] int32, ascending indices among the K clients
    weights: jax.Array  # [C] float32, examples; 0: padding, dropped out or left out


def map_axis(
    fn: Callable[..., Any], rows_per_chunk: int | None = None, in_place: bool = False
) -> Callable[..., Any]:
    """Maps a function of one row over the leading axis of its arguments.

    Args:
      fn: function of pytrees that belong to one row.
      rows_per_chunk: how many rows run side by side. None: all (`vmap`). 1: one after
        another. In between: `vmap` inside `lax.map`, where the last of chunks that do
        not divide the rows takes some of the one before again, which the ledger leaves
        out. The results differ by rounding alone. One row is never mapped: under `vmap`
        its `lax.cond` would take all branches.
      in_place: whether rows one after another are written over those of arguments: a
        result of a tuple over what stands at the same place in the arguments, if its
        shape and type are the same. Other results are arrays of their own, which are
        filled with zeros first. Who differentiates through it pays for it.

    Raises:
      InputError: if that is no count, or, when called, leaves differ in rows.
    """
    if rows_per_chunk is not None:
        arrays.check_count("rows_per_chunk", rows_per_chunk)

    def mapped(*args):
        shapes = {jnp.shape(x) for x in jax.tree.leaves(args)}
        num_rows, *others = {shape[:1] for shape in shapes}
        if others or not num_rows:
            raise InputError(
                f"leaves of shapes {', '.join(map(str, sorted(shapes)))}: expected "
                "as many rows of each"
            )
        (num_rows,) = num_rows
        if num_rows == 1:
            result = fn(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), result)
        if rows_per_chunk is None or rows_per_chunk >= num_rows:
            return jax.vmap(fn)(*args)
        if num_rows % rows_per_chunk:
            return _map_overlapping(jax.vmap(fn), args, num_rows, rows_per_chunk)
        if rows_per_chunk == 1 and in_place:
            return _map_in_place(fn, args)
        batch_size = None if rows_per_chunk == 1 else rows_per_chunk
        return jax.lax.map(lambda one: fn(*one), args, batch_size=batch_size)

    return mapped


def _map_overlapping(fn: Callable[..., Any], args: Any, num_rows: int, size: int):
    """Maps `fn` over chunks that do not divide the rows: the last one begins earlier.

    What it computes again is dropped. A shorter last chunk would be a second program,
    and would have all rows copied.
    """
    starts = jnp.minimum(jnp.arange(0, num_rows, size), num_rows - size)

    def chunks(*args):
        def chunk(start):
            slice_ = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size)
            return fn(*jax.tree.map(lambda x: slice_(x, start), args))

        return jax.lax.map(chunk, starts)

    real = Fraction(num_rows, len(starts) * size)
    results = communication.counted_in_part(chunks, real)(*args)

    def join(x):
        x = x.reshape(-1, *x.shape[2:])
        rest = num_rows % size
        return jnp.concatenate([x[: num_rows - rest], x[-rest:]])

    return jax.tree.map(join, results)


def _map_in_place(fn: Callable[..., Any], args: Any) -> Any:
    """Maps `fn` over rows one after another, see `map_axis`."""
    call = jax.jit(fn, inline=True)  # is traced once, for its shapes and to be mapped
    rows = jax.eval_shape(lambda args: call(*jax.tree.map(lambda x: x[0], args)), args)
    own, results = trees.by_path(args), trees.by_path(rows)

    def is_replaced(path):
        new, old = results.get(path), own[path]
        return new is not None and (new.shape, new.dtype) == (old.shape[1:], old.dtype)

    held = {path: mesh.varying(own[path]) for path in own if is_replaced(path)}
    read = {path: x for path, x in own.items() if path not in held}
    num_rows = len(next(iter(own.values())))

    def take(held, index):
        at = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        return jax.tree.map(lambda x: at(x, index), held)

    def none(held, index):
        del index
        return mesh.varying(
            jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), held)
        )

    def step(held, numbered):
        index, read = numbered
        # a branch, though one that is always taken: XLA would fuse what reads a row
        # with what comes after it is written, and copy all rows to keep them apart
        row = jax.lax.cond(index < num_rows, take, none, held, index)
        row = map((read | row).get, own)
        new = call(*jax.tree.unflatten(jax.tree.structure(args), row))
        new = trees.by_path(mesh.varying(new))
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
        return {path: put(x, new.pop(path), index) for path, x in held.items()}, new

    held, stacked = jax.lax.scan(step, held, (jnp.arange(num_rows), read))
    found = map((held | stacked).get, results)
    return jax.tree.unflatten(jax.tree.structure(rows), found)


def map_clients(
    fn: Callable[..., Any], clients_per_chunk: int | None = None, in_place: bool = False
) -> Callable[..., Any]:
    """Maps a function of one client over a leading client axis of its arguments.

    The clients are shared out to the devices, and mapped there with `map_axis`.

    Args:
      fn: (*own, *shared) -> results, of pytrees that belong to one client and pytrees
        that are the same for all.
      clients_per_chunk: how many clients run side by side on a device.
      in_place: see `map_axis`.

    Returns:
      (*own [K, ...], shared=()) -> results [K, ...].
    """

    def local(own, *shared):
        one = lambda *own: fn(*own, *shared)  # noqa: E731
        return map_axis(one, clients_per_chunk, in_place)(*own)

    def mapped(*own, shared=()):
        return sharding.concat_parts(local)(own, shared=shared)

    return mapped


def map_rows(
    fn: Callable[..., Any], clients_per_chunk: int | None = None
) -> Callable[..., Any]:
    """Maps like `map_clients`, where a leaf of one row is the same for all clients.

    Args:
      fn: (*own, *shared) -> results, as for `map_clients`.
      clients_per_chunk: likewise.

    Returns:
      (*own [1 or K, ...], shared=()) -> results [K, ...], where K is the most rows
      that a leaf has.

    Raises:
      InputError: by the function, if a leaf has another number of rows.
    """

    def mapped(*args, shared=()):
        leaves, structure = jax.tree.flatten(args, is_leaf=client_rows.is_rows)
        num_rows = max(x.shape[0] for x in leaves)
        for x in leaves:
            if x.shape[0] not in (1, num_rows):
                raise InputError(
                    f"a leaf of shape {x.shape}: expected 1 or {num_rows} rows"
                )
        own = [x if x.shape[0] == num_rows else None for x in leaves]
        common = [None if x.shape[0] == num_rows else x[0] for x in leaves]

        def one(own, common, *shared):
            parts = [c if o is None else o for o, c in zip(own, common, strict=True)]
            return fn(*jax.tree.unflatten(structure, parts), *shared)

        return map_clients(one, clients_per_chunk)(own, shared=(common, *shared))

    return mapped


def auto_clients_per_chunk(backend: str | None = None) -> int | None:
    """Returns 1 on a CPU, where one at a time measured fastest; else None, for all."""
    return 1 if (backend or mesh.backend()) == "cpu" else None


def with_eval_chunk(
    fn: Callable[..., _Result], clients_per_chunk: int | None
) -> Callable[..., _Result]:
    """Wraps `fn` so that `eval_clients_per_chunk` returns a number while it runs.

    Methods by name, from the table of `algorithms`, have their functions wrapped so; a
    factory that is imported and called evaluates as the backend has it.

    Args:
      fn: traced or called as before.
      clients_per_chunk: of the method's config; None leaves it to the backend.
    """
    if clients_per_chunk is None:
        return fn

    @functools.wraps(fn)
    def run(*args, **named):
        token = _eval_clients_per_chunk.set(clients_per_chunk)
        try:
            return fn(*args, **named)
        finally:
            _eval_clients_per_chunk.reset(token)

    return run


def eval_clients_per_chunk() -> int | None:
    """Returns how many clients are evaluated side by side on a device."""
    return _eval_clients_per_chunk.get() or auto_clients_per_chunk()


def parse_clients_per_chunk(text: str, backend: str | None = None) -> int | None:
    """Reads `auto`, `all` or a positive count.

    Args:
      text: one of them.
      backend: what `auto` is for; by default the one in use.

    Raises:
      InputError: on anything else.
    """
    if text == "auto":
        return auto_clients_per_chunk(backend)
    if text == "all":
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise InputError(
        f"clients_per_chunk={text}: expected auto, all or a positive number"
    )


def client_keys(key: jax.Array, client_ids: jax.Array) -> jax.Array:
    """Derives one key for each client, [C], from its identity.

    Raises:
      InputError: if the identities are no row of whole numbers.
    """
    arrays.check_shape("client_ids", client_ids, (None,))
    arrays.check_indices("client_ids", client_ids, 2**31)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, client_ids)


def count(data: Any) -> int:
    """Counts the clients of some data, padding included; 0 where they have no ids."""
    ids = getattr(data, "client_ids", None)
    return 0 if ids is None else ids.shape[-1]


def check_clients(data: Any, what: str) -> None:
    """Checks who the clients of some data are, as far as the data say (host call).

    Args:
      data: to train on, maybe with `client_ids` [K] and `client_weights` [..., K], a
        row for each draw.
      what: they are, for messages.

    Raises:
      InputError: if an id is no whole number of 31 bits, or stands twice, so that two
        clients would draw the same, a weight is negative or not finite, or all of them
        are 0.
    """
    ids = getattr(data, "client_ids", None)
    weights = getattr(data, "client_weights", None)
    if ids is None or weights is None:
        return
    ids, weights = np.asarray(ids), np.asarray(weights)
    if weights.shape[-1:] != ids.shape:
        raise InputError(
            f"{what}: client_ids of shape {ids.shape} and client_weights of shape "
            f"{weights.shape}, expected a weight for each id"
        )
    arrays.check_weights(f"{what}: client_weights", weights)
    real = ids[(weights.reshape(-1, ids.size) > 0).any(axis=0)]
    arrays.check_indices(f"{what}: client_ids", real, 2**31)
    if len(np.unique(real)) < real.size:
        raise InputError(f"{what}: client_ids: two clients with a weight have one id")
    if not (weights > 0).any(axis=-1).all():
        raise InputError(
            f"{what}: all client_weights are 0, expected a client with something to "
            "train on"
        )


def check_order(data: Any, other: Any, what: str) -> None:
    """Checks that clients stand in the same order in other data (host call).

    A model and a client belong together by their places. Other clients are no mistake:
    one model may be for all.

    Args:
      data, other: maybe with `client_ids` [K].
      what: the other data are, for messages.

    Raises:
      InputError: if the same clients stand in another order.
    """
    found = [getattr(x, "client_ids", None) for x in (data, other)]
    if found[0] is None or found[1] is None:
        return
    ids, others = map(np.asarray, found)
    is_same_set = np.array_equal(np.sort(ids), np.sort(others))
    if is_same_set and not np.array_equal(ids, others):
        raise InputError(f"{what}: client_ids stand in another order than in `train`")


def cohort_size(num_clients: int, participation: float) -> int:
    """Counts the clients that take part in a round, at least one."""
    return max(1, round(participation * num_clients))


def draw_indices(key: jax.Array, num_clients: int, size: int) -> np.ndarray:
    """Samples a cohort without replacement (host call), [size] int64, ascending.

    In time that does not grow with the clients, unlike `sample_cohort`: the draw is of
    places, and belongs to no identity.

    Raises:
      InputError: if the size is not 1 to the number of clients.
    """
    arrays.check_count("number of clients", num_clients)
    arrays.check_count("size of the cohort", size)
    if size > num_clients:
        raise InputError(f"size={size}: expected at most {num_clients}, the clients")
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return np.sort(random.choice(num_clients, size, replace=False, shuffle=False))


def sample_cohort(
    key: jax.Array, client_ids: jax.Array, weights: jax.Array, participation: float
) -> Cohort:
    """Samples the clients of a round without replacement.

    Each client draws a number from its own key and the smallest win. How many is a
    share of the real clients: padding takes part in nothing. If everybody takes part
    nothing is drawn.

    Args:
      key: of the round.
      client_ids: [K] identities.
      weights: [K], 0 = padding.
      participation: share of the real clients that take part.

    Raises:
      InputError: if there are no clients, ids or weights are not [K], known weights are
        negative or not finite, or the share is not above 0 and at most 1.
    """
    num_clients = client_ids.shape[0]
    arrays.check_count("number of clients", num_clients)
    arrays.check_shape("client_ids", client_ids, (num_clients,))
    arrays.check_shape("client_weights", weights, (num_clients,))
    arrays.check_weights("client_weights", weights)
    if not 0 < participation <= 1:
        raise InputError(
            f"participation={participation}: expected a number above 0, 1 or less"
        )
    sizes = [cohort_size(n, participation) for n in range(num_clients + 1)]
    if sizes[-1] == num_clients:
        return Cohort(jnp.arange(num_clients), weights)
    draws = jax.vmap(jax.random.uniform)(client_keys(key, client_ids))
    draws = jnp.where(weights > 0, draws, jnp.inf)
    indices = jnp.argsort(draws)[: sizes[-1]]
    is_wanted = jnp.arange(sizes[-1]) < jnp.array(sizes)[jnp.sum(weights > 0)]
    ascending = jnp.argsort(indices)
    kept = jnp.where(is_wanted, weights[indices], 0)
    return Cohort(indices[ascending], kept[ascending])
