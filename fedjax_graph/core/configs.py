"""Configs built from dicts, as JSON or a command line has them, field by field."""

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fedjax_graph.core import checks
from fedjax_graph.core.errors import InputError

T = TypeVar("T")
Kinds = Mapping[Any, Mapping[str, type]]
"""Interface -> kind -> the config type that has it, as of tasks."""


def known_fields(config_type: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Selects those of `values` that are fields of a config type.

    For callers that hold values of several config types in one dict, as binaries do.
    """
    return {key: values[key] for key in values if key in _names(config_type)}


def from_dict(
    config_type: type[T],
    values: Mapping[str, Any],
    kinds: Kinds | None = None,
    what: str = "",
) -> T:
    """Builds a config from values as they stand in JSON or as they are.

    A dict becomes the dataclass that its field's type names, a list a tuple. Where the
    type is an interface of `kinds`, the dict's entry `kind` chooses among those that
    have it.

    Args:
      config_type: a dataclass.
      values: of its fields; those that are left out have their defaults.
      kinds: interfaces that stand for several config types.
      what: is built, for messages; by default the type's name.

    Raises:
      InputError: if a key is no field, or a field without a default is left out.
    """
    what = what or config_type.__name__
    if not isinstance(values, Mapping):
        raise InputError(f"{what}: {values!r} found, expected a dict of fields")
    fields = _names(config_type)
    for key in values:
        if key not in fields:
            raise InputError(f"{what}: no field {key!r}; known: {', '.join(fields)}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(f"{what}: the field {missing[0]!r} has no default: give it")
    hints = typing.get_type_hints(config_type)
    return config_type(
        **{
            key: _convert(hints[key], value, kinds or {}, f"{what}.{key}")
            for key, value in values.items()
        }
    )


def put(
    config_type: type,
    path: Sequence[str],
    text: str,
    values: dict[str, Any],
    largest: float = math.inf,
) -> None:
    """Puts a setting, as a command line has it, into values for `from_dict`.

    Args:
      config_type: a dataclass.
      path: names of a field and, where that is a dataclass, of one of its fields.
      text: "true" and "false" are bools, "none" is None where a field may be that, and
        a tuple's items stand between "x", as in 32x64.
      values: where it goes, in dicts where fields are nested, with the other fields'
        defaults.
      largest: number that is allowed.

    Raises:
      InputError: if there is no such field, the text is no value of its type, or a
        number is too large.
    """
    name, *rest = path
    fields = _names(config_type)
    if name not in fields:
        raise InputError(f"no field {name!r}; known: {', '.join(fields)}")
    hint = typing.get_type_hints(config_type)[name]
    nested = [x for x in _choices(hint) if dataclasses.is_dataclass(x)]
    if nested and isinstance(nested[0], type):
        if not rest:
            inner = ", ".join(f"{name}.{x}" for x in _names(nested[0]))
            raise InputError(f"{name!r} has fields of its own; known: {inner}")
        default = fields[name].default
        first = as_dict(default) if isinstance(default, nested[0]) else {}
        put(nested[0], rest, text, values.setdefault(name, first), largest)
        return
    if rest:
        raise InputError(f"{name!r} has no field {rest[0]!r}")
    value = values[name] = _read(hint, text)
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int | float) and abs(number) > largest:
            raise InputError(f"{text!r} found, expected {largest:g} or less")


def changed(
    name: str, default: Any, saved: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The paths and values of a saved field that are not its default's.

    Args:
      name: of the field.
      default: a value, or a dataclass, of whose fields each is looked at.
      saved: fields as JSON has them; one that is not there has its default.
    """
    if name not in saved:
        return
    value = saved[name]
    if dataclasses.is_dataclass(default) and isinstance(value, Mapping):
        for inner in _names(type(default)):
            for path, one in changed(inner, getattr(default, inner), value):
                yield f"{name}.{path}", one
        return
    as_json = list(default) if isinstance(default, tuple) else default
    if value != as_json:
        yield name, value


def as_text(value: Any) -> str:
    """A value as a command line has it, which `put` reads."""
    if isinstance(value, list | tuple):
        return "x".join(map(as_text, value))
    words = {True: "true", False: "false", None: "none"}
    is_word = value is None or isinstance(value, bool)
    return words[value] if is_word else str(value)


def as_dict(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that it is made from, as they are."""
    return {name: getattr(config, name) for name in _names(type(config))}


def _read(hint: Any, text: str) -> Any:
    """A value of a type from text."""
    words = {"true": True, "false": False}
    for choice in _choices(hint):
        if choice is types.NoneType and text == "none":
            return None
        if choice is bool and text in words:
            return words[text]
        if choice in (int, float):
            with contextlib.suppress(ValueError):
                return choice(text)
        if typing.get_origin(choice) is typing.Literal:
            if text in typing.get_args(choice):
                return text
        elif typing.get_origin(choice) is tuple and text:
            items = _items(choice, text.split("x"))
            if all(item_hint is not Any for item_hint, _ in items):
                return tuple(_read(item_hint, item) for item_hint, item in items)
        elif choice is str:
            return text
    tuples = [x for x in _choices(hint) if typing.get_origin(x) is tuple]
    expected = _as_written(tuples[0]) if tuples else checks.described(hint)
    raise InputError(f"{text!r} found, expected {expected}")


def _as_written(hint: Any) -> str:
    """How a command line has a tuple."""
    args = typing.get_args(hint)
    if args[-1] is Ellipsis:
        return f"{checks.described(args[0])}, or several with an x between"
    return f"{len(args)} values with an x between, each {checks.described(args[0])}"


def _names(config_type: type) -> dict[str, dataclasses.Field[Any]]:
    fields = dataclasses.fields(config_type)
    return {field.name: field for field in fields if field.init}


def _convert(hint: Any, value: Any, kinds: Kinds, what: str) -> Any:
    """A value as its field has it; what is no dict and no list stays as it is."""
    nested = [c for c in _choices(hint) if c in kinds or dataclasses.is_dataclass(c)]
    if nested and isinstance(value, Mapping):
        if nested[0] in kinds:
            return _of_kind(kinds[nested[0]], value, kinds, what)
        return from_dict(nested[0], value, kinds, what)
    if nested and isinstance(value, str | int | float):
        raise InputError(f"{what}: {value!r} found, expected a dict of fields")
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [
            _convert(item_hint, item, kinds, f"{what}[{i}]")
            for i, (item_hint, item) in enumerate(_items(hint, value))
        ]
        return tuple(items)
    return value


def _of_kind(
    choices: Mapping[str, type], value: Mapping[str, Any], kinds: Kinds, what: str
) -> Any:
    if value.get("kind") not in choices:
        raise InputError(
            f"{what}: unknown kind {value.get('kind')!r}; known: {', '.join(choices)}"
        )
    return from_dict(choices[value["kind"]], value, kinds, what)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _items(hint: Any, values: Any) -> list[tuple[Any, Any]]:
    """The values of a list, each with its type."""
    for choice in _choices(hint):
        args = typing.get_args(choice)
        if typing.get_origin(choice) is tuple and args:
            if args[-1] is Ellipsis:
                return [(args[0], value) for value in values]
            if len(args) == len(values):
                return list(zip(args, values, strict=True))
    return [(Any, value) for value in values]
