"""Fields of a study that are flags of its binary: defined, checked and read once.

A study is a frozen dataclass whose fields are made by `option`. The same limits hold
for a value from the command line and for one from Python.
"""

import abc
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from absl import flags

from fedjax_graph.core.errors import InputError
from fedjax_graph.core.optimizers import OptimizerConfig

StudyType = TypeVar("StudyType")
MOST = 10**6  # of a size: where a product of two overflows, XLA aborts the process


def option(
    default: Any,
    help: str,
    *,
    lower: float | None = None,
    upper: float | None = None,
    choices: Sequence[str] | None = None,
    is_repeated: bool = False,
) -> Any:
    """A dataclass field that is a flag as well.

    Args:
      default: the field's and the flag's; None where it depends on other settings.
      help: what `--help` says.
      lower: smallest number that is allowed.
      upper: largest one.
      choices: the values that are allowed, of a text or of each item of a list.
      is_repeated: whether a list of whole numbers has a flag for each number; lists
        are joined by commas otherwise.
    """
    limits = {"lower": lower, "upper": upper, "choices": choices}
    metadata = {"help": help, "is_repeated": is_repeated, **limits}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(abc.ABC):
    """A frozen record of options, which a command line or Python fills."""

    subject: ClassVar[str] = "Options"
    """Above the options of this class in `--help`."""
    duration: ClassVar[str] = ""
    """Of a run without flags, in a sentence of `--help`."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Options that a study has from its kin and does not take, and why; `--help` leaves
    them out."""

    given: frozenset[str] = frozenset()
    """Names of the flags that stood on the command line."""

    def __post_init__(self) -> None:
        """Checks every option.

        Raises:
          InputError: naming the flag.
        """
        known = options_of(type(self))
        if not (isinstance(self.given, frozenset) and self.given <= set(known)):
            raise InputError(
                f"given={self.given!r}: expected a frozenset of names of options"
            )
        check(self)

    @abc.abstractmethod
    def run(self) -> Any:
        """Does all that the binary does.

        Raises:
          InputError: one line, where a setting or a file does not fit.
        """

    def is_given(self, name: str) -> bool:
        """Whether an option was given, or is not what it is by default."""
        default = options_of(type(self))[name].default
        return name in self.given or getattr(self, name) != default

    def check_refused(self) -> None:
        """Checks that no option is given that the study does not take.

        Raises:
          InputError: if one is, with the reason.
        """
        for name, reason in self.refused.items():
            if self.is_given(name):
                raise InputError(f"--{name}: {reason}")

    def record(self) -> dict[str, Any]:
        """The options by name, JSON-able."""
        names = options_of(type(self))
        return {name: recorded(getattr(self, name)) for name in names}

    def in_effect(self) -> dict[str, Any]:
        """What options stand for that were not given, by name, for `--help`.

        Of those alone whose own value does not say it; None: the option is off.

        Raises:
          InputError: if another option, on which that depends, makes no sense.
        """
        return {}

    def known_methods(self) -> dict[str, str]:
        """Titles of what `methods` may name; of what has no such option, nothing."""
        return {}


def is_option(field: dataclasses.Field) -> bool:
    """Whether a field was made by `option`."""
    return "help" in field.metadata


def options_of(study_type: type) -> dict[str, dataclasses.Field]:
    """The options of a study type by name, in the order of their definition."""
    fields = dataclasses.fields(study_type)
    return {field.name: field for field in fields if is_option(field)}


def subject_of(study_type: type, name: str) -> str:
    """The subject of the class that defined an option first."""
    classes = [x for x in study_type.__mro__ if name in inspect.get_annotations(x)]
    return classes[-1].subject


def defaults_of(study_type: type) -> dict[str, Any]:
    """Values of the flags where none is given, as `results.json` records them."""
    fields = options_of(study_type).values()
    return {field.name: recorded(field.default) for field in fields}


def recorded(value: Any) -> Any:
    """An option's value as JSON has it: tuples are lists, configs are dicts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value


def flag(name: str, value: Any) -> str:
    """An option as on a command line."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    if isinstance(value, OptimizerConfig):
        fields = dataclasses.asdict(value)
        chosen = fields.pop("name")
        own = [f"{key}={str(x).lower()}" for key, x in fields.items()]
        value = ",".join([chosen, *own])
    return f"--{name}={value}"


def kind_of(study_type: type, name: str) -> type:
    """The type of an option on the command line: bool, int, float, str or tuple."""
    parts = _parts(study_type, name)
    return typing.get_origin(parts[0]) or parts[0]


def _parts(study_type: type, name: str) -> list[Any]:
    """The types of an option without `None`; the command line's first, then configs."""
    hint = typing.get_type_hints(study_type)[name]
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return [part for part in parts if part is not type(None)]


def item_of(study_type: type, name: str) -> type:
    """The type of the items of an option that is a tuple: str or int."""
    return typing.get_args(_parts(study_type, name)[0])[0]


def check(study: Any) -> None:
    """Checks every option of a study against its type and limits.

    Raises:
      InputError: naming the first flag that does not hold.
    """
    for name, field in options_of(type(study)).items():
        value = getattr(study, name)
        if value is None and field.default is None:
            continue
        kind, *configs = kind_of(type(study), name), *_parts(type(study), name)[1:]
        if isinstance(value, tuple(configs)):
            continue
        if kind is tuple:
            item = item_of(type(study), name)
            reason = _objection_to_list(item, value, field.metadata)
        else:
            reason = _objection(kind, value, field.metadata)
        if reason:
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise InputError(f"--{name}={shown}: {reason}")


def _objection_to_list(item: type, value: Any, limits: Mapping[str, Any]) -> str | None:
    """Why a list is not allowed, or None; names stand in it once, numbers as often."""
    if not isinstance(value, tuple):
        return "expected a tuple"
    if item is not str:
        if not value:
            return "give at least one number"
        found = ((x, _objection(item, x, limits)) for x in value)
        return next((f"{x!r}: {reason}" for x, reason in found if reason), None)
    if not all(isinstance(x, str) for x in value):
        return "expected a tuple of texts"
    choices, is_set = limits["choices"], len(set(value)) == len(value) > 0
    if choices and not (is_set and set(value) <= set(choices)):
        return f"name one or more of {', '.join(choices)}, each only once"
    return None if is_set else "name at least one, and each only once"


def _objection(kind: type, value: Any, limits: Mapping[str, Any]) -> str | None:
    """Why a value is not allowed, or None."""
    choices = limits["choices"]
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not is_number or math.isnan(value):
            return f"expected a {'whole ' if kind is int else ''}number"
        lower, upper = limits["lower"], limits["upper"]
        if upper is None and kind is int:
            upper = MOST
        if lower is not None and value < lower:
            return f"expected {lower} or more"
        if upper is not None and value > upper:
            return f"expected {upper} or less"
        return None
    if not isinstance(value, kind):
        return f"expected a {kind.__name__}"
    if choices and value not in choices:
        return f"expected one of {', '.join(choices)}"
    if kind is str and not value:
        return "expected a text that is not empty; leave the flag out for its default"
    if kind is str and any("\ud800" <= x <= "\udfff" for x in value):
        return "expected text in UTF-8"  # others make no names of files for Orbax
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
    elif kind is tuple and limits["is_repeated"]:
        flags.DEFINE_multi_integer(name, default, text, limits["lower"])
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
        if isinstance(value, list):
            value = tuple(_item(name, item_of(study_type, name), x) for x in value)
        values[name] = value
        if flag.present:
            given.add(name)
    return study_type(**values, given=frozenset(given))


def _item(name: str, item: type, text: Any) -> Any:
    """An item of a list on the command line, as a number where it is to be one."""
    try:
        return item(text)
    except ValueError as error:
        raise InputError(
            f"--{name}: {text!r} is not a {'whole ' if item is int else ''}number"
        ) from error
