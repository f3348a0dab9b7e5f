"""Fields of a study that are flags of its binary: defined, checked and read once.

A study is a frozen dataclass whose fields are made by `option`. The same limits hold
for a value from the command line and for one from Python.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from fedjax_graph.core.errors import InputError

StudyType = TypeVar("StudyType")


def option(
    default: Any,
    help: str,
    *,
    lower: float | None = None,
    upper: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A dataclass field that is a flag as well.

    Args:
      default: the field's and the flag's; None where it depends on other settings.
      help: what `--help` says.
      lower: smallest number that is allowed.
      upper: largest one.
      choices: the values that are allowed, of a text or of each item of a list.
    """
    limits = {"lower": lower, "upper": upper, "choices": choices}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def is_option(field: dataclasses.Field) -> bool:
    """Whether a field was made by `option`."""
    return "help" in field.metadata


def options_of(study_type: type) -> dict[str, dataclasses.Field]:
    """The options of a study type by name, in the order of their definition."""
    fields = dataclasses.fields(study_type)
    return {field.name: field for field in fields if is_option(field)}


def defaults_of(study_type: type) -> dict[str, Any]:
    """Values of the flags where none is given, as `results.json` records them."""
    fields = options_of(study_type).values()
    return {field.name: recorded(field.default) for field in fields}


def recorded(value: Any) -> Any:
    """An option's value as JSON has it: tuples are lists."""
    return list(value) if isinstance(value, tuple) else value


def kind_of(study_type: type, name: str) -> type:
    """The type of an option without `| None`: bool, int, float, str or tuple."""
    hint = typing.get_type_hints(study_type)[name]
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.get_origin(hint) or hint


def check(study: Any) -> None:
    """Checks every option of a study against its type and limits.

    Raises:
      InputError: naming the first flag that does not hold.
    """
    for name, field in options_of(type(study)).items():
        value = getattr(study, name)
        if value is None and field.default is None:
            continue
        reason = _objection(kind_of(type(study), name), value, field.metadata)
        if reason:
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise InputError(f"--{name}={shown}: {reason}")


def _objection(kind: type, value: Any, limits: Mapping[str, Any]) -> str | None:
    """Why a value is not allowed, or None."""
    choices = limits["choices"]
    if kind is tuple:
        if not isinstance(value, tuple) or not all(isinstance(x, str) for x in value):
            return "expected a tuple of texts"
        if len(set(value)) < len(value) or not value:
            return "name at least one, and each only once"
        if choices and not set(value) <= set(choices):
            return f"name one or more of {', '.join(choices)}, each only once"
        return None
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not is_number or math.isnan(value):
            return f"expected a {'whole ' if kind is int else ''}number"
        lower, upper = limits["lower"], limits["upper"]
        if lower is not None and value < lower:
            return f"expected {lower} or more"
        if upper is not None and value > upper:
            return f"expected {upper} or less"
        return None
    if not isinstance(value, kind):
        return f"expected a {kind.__name__}"
    if choices and value not in choices:
        return f"expected one of {', '.join(choices)}"
    return None


# --- Flags ---------------------------------------------------------------------------


def define_flags(study_type: type) -> None:
    """Defines a flag for each option of a study type, once in a process."""
    for name, field in options_of(study_type).items():
        if name in flags.FLAGS:
            flags.FLAGS[name].help = field.metadata["help"]
            flags.FLAGS.set_default(name, _plain(field.default))
            continue
        _define(kind_of(study_type, name), name, field)


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def _define(kind: type, name: str, field: dataclasses.Field) -> None:
    limits, default = field.metadata, _plain(field.default)
    text = limits["help"]
    if kind is bool:
        flags.DEFINE_bool(name, default, text)
    elif kind is tuple:
        flags.DEFINE_list(name, default, text)
    elif kind is int:
        flags.DEFINE_integer(name, default, text, limits["lower"], limits["upper"])
    elif kind is float:
        flags.DEFINE_float(name, default, text, limits["lower"], limits["upper"])
    elif limits["choices"]:
        flags.DEFINE_enum(name, default, list(limits["choices"]), text)
    else:
        flags.DEFINE_string(name, default, text)


def from_flags(study_type: type[StudyType]) -> StudyType:
    """The study that the parsed flags say.

    Raises:
      InputError: as `check`.
    """
    values, given = {}, set()
    for name in options_of(study_type):
        flag = flags.FLAGS[name]
        value = flag.value
        values[name] = tuple(value) if isinstance(value, list) else value
        if flag.present:
            given.add(name)
    return study_type(**values, given=frozenset(given))
