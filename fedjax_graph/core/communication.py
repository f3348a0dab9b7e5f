"""The ledger: bytes that cross between clients and server.

`up` and `down` mark arrays where they cross. They compute nothing; they leave a name
in the traced program. `bytes_per_round` walks that program and adds up the marked
arrays, times the lengths of the loops around them. So the ledger counts what the
simulation really exchanges, and costs nothing when it runs. `Ledger` is that of a
run, whose rounds may differ from phase to phase.

Floats cross as they are or, under `bits`, as bfloat16 (16) or as integers of 8 or 4
bits and a scale for each row.
"""

import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core

from fedjax_graph.core.errors import InputError

BITS = (32, 16, 8, 4)
_INTEGERS = {8: jnp.int8, 4: jnp.int4}
_UP, _DOWN = "client_to_server", "server_to_client"
_PART = "counted_part_"  # of names of jitted functions


class Bytes(NamedTuple):
    """Counts bytes in each direction, exact Python integers."""

    up: int = 0
    down: int = 0

    def plus(self, other: "Bytes") -> "Bytes":
        """Adds two counts."""
        return Bytes(self.up + other.up, self.down + other.down)

    def times(self, factor: int) -> "Bytes":
        """Multiplies a count by a whole number."""
        factor = operator.index(factor)  # a NumPy integer would overflow
        return Bytes(self.up * factor, self.down * factor)


class Ledger(NamedTuple):
    """Counts what a run exchanges: before its rounds, and in a round of each phase."""

    init: Bytes = Bytes()
    rounds: tuple[tuple[int, Bytes], ...] = ()
    """First round of a phase, from 1 on, and the bytes of each of its rounds."""

    def until(self, num_rounds: int) -> Bytes:
        """Counts the first rounds of a run and what comes before them."""
        last, total = operator.index(num_rounds), self.init
        for first, size in reversed(self.rounds):
            total = total.plus(size.times(max(0, last - first + 1)))
            last = min(last, first - 1)
        return total

    def per_round(self, num_rounds: int) -> Bytes:
        """Divides `until` by its rounds, rounded down."""
        total, num_rounds = self.until(num_rounds), max(1, operator.index(num_rounds))
        return Bytes(total.up // num_rounds, total.down // num_rounds)


def up(tree: Any, copies: Fraction | int = 1, bits: int = 32) -> Any:
    """Marks arrays that the clients send to the server; returns what arrives.

    Args:
      tree: pytree of arrays.
      copies: how many times their bytes count: below 1 where a part is padding, K where
        one array goes to each of K clients.
      bits: other than 32 for rows of floats only, see `pack`.

    Returns:
      The arrays, for fewer bits than 32 rounded, which passes no useful gradient.

    Raises:
      ValueError: for other bits.
    """
    return _cross(tree, f"{_UP}:{copies}", bits)


def down(tree: Any, copies: Fraction | int = 1, bits: int = 32) -> Any:
    """Marks arrays that the server sends to the clients; see `up`."""
    return _cross(tree, f"{_DOWN}:{copies}", bits)


def share(mask: jax.Array) -> Fraction:
    """Which part of the rows of an array crosses, as `copies` of `up` and `down`.

    Args:
      mask: of any shape, 1 for those that do, 0 for padding. Where it is traced, as in
        a program that computes what crosses, all rows count: `bytes_per_round` is
        given a function that has the data in it.
    """
    if isinstance(mask, jax.core.Tracer):
        return Fraction(1)
    return Fraction(int(np.count_nonzero(mask)), max(1, mask.size))


def book(up: int = 0, down: int = 0) -> None:
    """Books bytes that cross beside the arrays that are marked, as keys do."""
    for direction, size in ((_UP, up), (_DOWN, down)):
        checkpoint_name(jnp.zeros((), jnp.uint8), f"{direction}:{size}")


def _cross(tree: Any, name: str, bits: int) -> Any:
    if bits != 32:
        return unpack(_cross(pack(tree, bits), name, 32))
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)


class Packed(NamedTuple):
    """Holds an array on its way."""

    values: jax.Array  # [..., H]
    scale: jax.Array | None = None  # [..., 1], what a step of an integer stands for


def pack(tree: Any, bits: int) -> Any:
    """Turns each array of a pytree into the `Packed` that crosses.

    Args:
      tree: pytree of arrays [..., H]; of any shape and type for 32 bits.
      bits: of each number: 32 as it is, 16 bfloat16, 8 or 4 an integer, the nearest
        where the largest magnitude of a row is the largest integer.

    Raises:
      ValueError: for other bits; `InputError` for fewer than 32 of what is no row of
        floats.
    """
    if bits not in BITS:
        raise ValueError(f"bits: expected one of {BITS}, not {bits}")
    for x in jax.tree.leaves(tree) if bits != 32 else ():
        if not jnp.ndim(x) or not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputError(
                f"an array of shape {jnp.shape(x)} and type {x.dtype} cannot cross in "
                f"{bits} bits, expected rows of floats"
            )

    def pack_one(x):
        if bits == 32:
            return Packed(x)
        if bits == 16:  # compilers may drop a conversion there and back
            return Packed(jax.lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16))
        most = jnp.iinfo(_INTEGERS[bits]).max
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / most
        steps = jnp.round(x / jnp.where(scale > 0, scale, 1))
        return Packed(steps.astype(_INTEGERS[bits]), scale)

    return jax.tree.map(pack_one, tree)


def unpack(packed: Any) -> Any:
    """Restores what arrives of `pack`: floats of fewer bits are float32 again."""

    def unpack_one(x):
        if x.scale is not None:
            return x.values.astype(x.scale.dtype) * x.scale
        is_short = x.values.dtype == jnp.bfloat16
        return x.values.astype(jnp.float32) if is_short else x.values

    return jax.tree.map(unpack_one, packed, is_leaf=lambda x: isinstance(x, Packed))


def bytes_per_round(fn: Callable[..., Any], *args: Any) -> Bytes:
    """Counts the bytes that one call of `fn(*args)` exchanges; nothing is computed.

    Args:
      fn: traceable, for example the `round` of an algorithm.
      *args: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: if an exchange stands in a loop of unknown length.
    """
    up_bytes, down_bytes = _count(jax.make_jaxpr(fn)(*args).jaxpr, (_UP, _DOWN))
    return Bytes(round(up_bytes), round(down_bytes))


def mark(name: str) -> None:
    """Leaves a name in the traced program, for `count_marks`."""
    checkpoint_name(jnp.zeros((), jnp.uint8), f"{name}:1")


def count_marks(name: str, fn: Callable[..., Any], *args: Any) -> int:
    """Counts how often one call of `fn(*args)` meets a mark of a name.

    Args:
      name: of `mark`.
      fn, *args: as of `bytes_per_round`, which raises likewise.
    """
    return round(_count(jax.make_jaxpr(fn)(*args).jaxpr, (name, "")).up)


def counted_in_part(fn: Callable[..., Any], real: Fraction) -> Callable[..., Any]:
    """Makes a function of which the ledger counts a part.

    Args:
      fn: of arrays, in which something may cross.
      real: the part of it that is not computed twice, or padding.
    """

    def run(*args):
        return fn(*args)

    run.__name__ = f"{_PART}{real.numerator}_{real.denominator}"
    return jax.jit(run)


def _count(jaxpr: jex_core.Jaxpr, names: tuple[str, str]) -> Bytes:
    """Sums up what is marked with either of two names, as `up` and as `down`."""
    total = Bytes()
    for equation in jaxpr.eqns:
        total = total.plus(_count_equation(equation, names))
    return total


def _count_equation(equation: jex_core.JaxprEqn, names: tuple[str, str]) -> Bytes:
    kind, params = equation.primitive.name, equation.params
    name, _, copies = params["name"].partition(":") if kind == "name" else ("", "", "")
    if name and name in names:
        (value,) = equation.outvars
        bits = jax.dtypes.itemsize_bits(value.aval.dtype)
        size = Fraction(value.aval.size * bits, 8) * Fraction(copies)
        return Bytes(up=size) if name == names[0] else Bytes(down=size)
    inner = [_count(jaxpr, names) for jaxpr in _inner_jaxprs(params)]
    if kind == "cond":  # what the round exchanges at most
        return Bytes(max(b.up for b in inner), max(b.down for b in inner))
    total = Bytes()
    for part in inner:
        total = total.plus(part)
    if kind == "while" and total != Bytes():
        raise ValueError("an exchange stands in a loop of unknown length")
    if kind == "shard_map":  # what is seen inside is one device's share
        sizes = params["mesh"].shape
        return total.times(
            math.prod(sizes[axis] for axis in params["newly_manual_axes"])
        )
    if kind in ("jit", "pjit") and params["name"].startswith(_PART):
        real = Fraction(*map(int, params["name"].split("_")[-2:]))
        return Bytes(total.up * real, total.down * real)
    return total.times(params["length"]) if kind == "scan" else total


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[jex_core.Jaxpr]:
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, jex_core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, jex_core.Jaxpr):
                yield part
