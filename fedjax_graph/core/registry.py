"""Tables of names that a user extends: methods, tasks, models, datasets, aggregators.

What the library brings is imported when it is first looked up; what a user registers
stands beside it under a name of its own.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

from fedjax_graph.core.errors import InputError

T = TypeVar("T")
NAME = re.compile(r"(?!\.{1,2}$)[\w.+-]+", re.ASCII)  # names folders and list items too


class Lazy(NamedTuple, Generic[T]):
    """A value of a table that is made when it is first looked up."""

    make: Callable[[], T]


def imported(place: str) -> Any:
    """Imports an attribute of a module.

    Args:
      place: "package.module:attribute".
    """
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Registry(Mapping[str, T]):
    """A table from names to values of one kind, to which users add.

    As of any mapping, `table[name]` raises `KeyError` where there is no such name;
    `look_up` raises the `InputError` that a user can act on.
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, T | Lazy[T]],
        *,
        is_callable: bool = False,
        value_type: type | None = None,
    ) -> None:
        """Starts a table.

        Args:
          kind: what its values are, for messages: "method", "dataset".
          entries: the library's own.
          is_callable: whether its values are functions, or others that are called.
          value_type: whose instances its values are; None: any.
        """
        self.kind = kind
        self._value_type = value_type
        self._is_callable = is_callable
        self._library = frozenset(entries)
        self._entries: dict[str, T | Lazy[T]] = dict(entries)

    def __getitem__(self, name: str) -> T:
        value = self._entries[name]
        if isinstance(value, Lazy):
            value = self._entries[name] = value.make()
        return cast(T, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def is_users(self, name: str) -> bool:
        """Tells whether a name was registered by a user, and is not the library's."""
        return name in self._entries and name not in self._library

    def look_up(self, name: str) -> T:
        """Finds the value of a name.

        Raises:
          InputError: if there is none; it lists those known.
        """
        if not isinstance(name, str) or name not in self._entries:
            raise InputError(f"unknown {self.kind} {name!r}; known: {', '.join(self)}")
        return self[name]

    @overload
    def register(self, name: str, value: T) -> T: ...

    @overload
    def register(self, name: str) -> Callable[[T], T]: ...

    def register(self, name: str, value: T | None = None) -> T | Callable[[T], T]:
        """Adds a value under a new name; without a value, returns a decorator.

        Raises:
          InputError: if the name is taken or no plain word, or the value is no function
            where the table has functions, or of another type than its values.
        """
        check_name(self.kind, name)
        if value is None:
            return lambda value: self.register(name, value)
        if self._is_callable and not callable(value):
            raise InputError(f"{self.kind} {name!r}: {value!r} cannot be called")
        if self._value_type and not isinstance(value, self._value_type):
            expected = self._value_type.__name__
            raise InputError(f"{self.kind} {name!r}: {value!r} is no {expected}")
        if name in self._entries:
            raise InputError(f"{self.kind} {name!r} is taken; choose another name")
        self._entries[name] = value
        return value

    def registering(self) -> Callable[..., Any]:
        """Returns `register` as a plain function that a module can export.

        Sphinx writes signatures into functions, of which bound methods share one.
        """

        def register(name: str, value: Any = None) -> Any:
            return self.register(name, value)

        return register


def check_name(kind: str, name: object) -> None:
    """Checks a name that is to be registered: it becomes a folder of a run.

    Args:
      kind: what is named, for messages.
      name: letters, digits and "_.+-" pass.

    Raises:
      InputError: naming it.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"{kind} name {name!r}: expected letters, digits and _ . + - alone"
        )
