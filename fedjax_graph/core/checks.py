"""Checks of configs: types as annotated, limits as declared beside a field."""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_graph.core.errors import InputError

_NUMBERS = {int: numbers.Integral, float: numbers.Real, bool: bool}
_WORDS = {int: "a whole number", float: "a finite number", str: "text"}
_IS_WITHIN: dict[str, Callable[[Any, Any], bool]] = {
    "{} or more": lambda x, limit: x >= limit,
    "above {}": lambda x, limit: x > limit,
    "{} or less": lambda x, limit: x <= limit,
    "below {}": lambda x, limit: x < limit,
}


def limits(
    *,
    lower: float | None = None,
    above: float | None = None,
    upper: float | None = None,
    below: float | None = None,
    choices: Container[Any] | None = None,
    is_filled: bool = False,
) -> dict[str, Any]:
    """The metadata of a dataclass's field that `check` reads.

    Args:
      lower, above, upper, below: limits of its number, or of each one in its tuple;
        `above` and `below` are no values themselves.
      choices: names, as of a table, of which the field has one.
      is_filled: whether its tuple has at least one element.
    """
    bounds = dict(zip(_IS_WITHIN, (lower, above, upper, below), strict=True))
    bounds = {word: limit for word, limit in bounds.items() if limit is not None}
    return {"bounds": bounds, "choices": choices, "is_filled": is_filled}


def limited(default: Any, **declared: Any) -> Any:
    """A dataclass's field with a default and `limits`."""
    return dataclasses.field(default=default, metadata=limits(**declared))


class Checked:
    """Checks a dataclass that inherits it; see `check`."""

    def __post_init__(self) -> None:
        """Checks types and limits; raises `InputError`."""
        check(self)


def check(config: Any, what: str = "", skipped: Container[str] = ()) -> None:
    """Checks a dataclass's values; scalars of NumPy and JAX become Python's.

    Args:
      config: its annotations say the types, its fields' metadata the `limits`.
      what: it is, for messages; by default its type's name.
      skipped: names of fields that are not checked.

    Raises:
      InputError: one line with the field, its value and what was expected.
    """
    hints = typing.get_type_hints(type(config))
    what = what or type(config).__name__
    for field in dataclasses.fields(config):
        if field.name in skipped:
            continue
        hint, value = hints[field.name], _plain(getattr(config, field.name))
        object.__setattr__(config, field.name, value)
        declared = {**limits(), **field.metadata}
        bounds, choices = declared["bounds"], declared["choices"]
        is_filled = declared["is_filled"]
        is_right = fits(value, hint) and _is_within(value, bounds)
        if not is_right or (is_filled and not value):
            words = [described(hint), *(w.format(x) for w, x in bounds.items())]
            expected = ", ".join(words) + ", at least one" * is_filled
            raise InputError(f"{what} {field.name}={value!r}: expected {expected}")
        if choices is not None and value not in choices:
            known = ", ".join(typing.cast(Any, choices))
            raise InputError(f"{what} {field.name} {value!r}: unknown; known: {known}")


def _plain(value: Any) -> Any:
    """A Python scalar for a concrete one of NumPy or JAX, also in a tuple."""
    if type(value) is tuple:
        return tuple(map(_plain, value))
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
    is_concrete = is_array and not isinstance(value, jax.core.Tracer)
    return value.item() if is_concrete and value.ndim == 0 else value


def fits(value: Any, hint: Any) -> bool:
    """Tells whether a value has an annotation's type; a bool is no number."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, choice) for choice in args)
    if origin is typing.Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin is tuple and isinstance(value, tuple):
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(value) == len(hints) and all(map(fits, value, hints))
    if origin is Sequence:
        is_sequence = isinstance(value, list | tuple)
        return is_sequence and all(fits(item, args[0]) for item in value)
    if hint is Any:
        return True
    if hint in _NUMBERS:
        is_number = isinstance(value, _NUMBERS[hint])
        is_finite = hint is not float or (is_number and math.isfinite(value))
        return is_number and is_finite and isinstance(value, bool) == (hint is bool)
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if name[0] != "_")
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def _is_within(value: Any, bounds: dict[str, float]) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_within(item, bounds) for item in value)
    return value is None or all(_IS_WITHIN[w](value, x) for w, x in bounds.items())


def described(hint: Any) -> str:
    """Puts an annotation into words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(described, args))
    if origin is typing.Literal:
        return " or ".join(map(repr, args))
    if origin is tuple and args[-1:] == (Ellipsis,):
        return f"a tuple, each {described(args[0])}"
    if origin is Sequence:
        return f"a sequence, each {described(args[0])}"
    if hint is type(None):
        return "None"
    name = getattr(hint, "__name__", str(hint))
    return _WORDS.get(hint, f"a{'n' * (name[0] in 'AEIOU')} {name}")
