"""Settings of single methods on the command line: fields of their configs."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from experiments.studies.base import Study
from experiments.studies.options import MOST, option
from experiments.studies.trust import TRUST_FIELDS, TrustStudy
from fedjax_graph import algorithms
from fedjax_graph.core import configs
from fedjax_graph.core.errors import InputError, meant

OF_THE_STUDY = (
    *("task", "participation", "clients_per_chunk", "server_optimizer"),
    "encryption",
)
"""Fields that have flags of their own, as `TRUST_FIELDS` have, or that no study of
methods has."""


class Setting(NamedTuple):
    """Holds a setting of a method, as it was given."""

    text: str  # all of it
    method: str
    fields: list[str]  # more than one where nested
    value: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodSettings(TrustStudy):
    """A study of methods, each with settings of its own."""

    subject: ClassVar[str] = Study.subject

    method_settings: tuple[str, ...] | None = option(
        None,
        "Fields of the configs of methods that run, comma-separated, such as "
        "fed_prox.proximal_weight=0.001; docs/methods.md has a table.",
    )

    def flagged_fields(self, registered: str) -> Collection[str]:
        """The fields of a registered method's config that the study's flags give.

        Nested ones are written with a dot, as in structure.target.
        """
        del registered
        return ()

    def own_fields(self, registered: str) -> list[str]:
        """The fields of a registered method's config that no other flag gives."""
        taken = {*OF_THE_STUDY, *TRUST_FIELDS, *self.flagged_fields(registered)}
        fields = algorithms.get_method(registered).fields
        return [name for name in fields if name not in taken]

    def settings_of(
        self, method: str, registered: str, values: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What `method_settings` says of a method, by field, in dicts where nested.

        Args:
          method: its name here.
          registered: the name under which `algorithms` has it.
          values: of its config's fields, what other flags say; nested ones are kept
            but for what is given of them.

        Raises:
          InputError: naming the setting that cannot be read.
        """
        found: dict[str, Any] = {}
        own, flagged = self.own_fields(registered), self.flagged_fields(registered)
        config_type = algorithms.get_method(registered).config_type
        for given in self._given_settings():
            if given.method != method:
                continue
            first = given.fields[0]
            if ".".join(given.fields) in flagged:
                raise InputError(
                    f"--method_settings={given.text}: this field has a flag of its own"
                )
            if first not in own:
                raise InputError(
                    f"--method_settings={given.text}: {first!r} is no setting of "
                    f"{method}{meant(first, own)}; known: {', '.join(own) or None}"
                )
            if dataclasses.is_dataclass(before := (values or {}).get(first)):
                found.setdefault(first, configs.as_dict(before))
            try:
                configs.put(config_type, given.fields, given.value, found, largest=MOST)
            except InputError as error:
                raise InputError(f"--method_settings={given.text}: {error}") from error
        return found

    def settings_made_with(
        self, method: str, registered: str, saved: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """The `method_settings` that a saved config needs beside the other flags.

        Args:
          method: its name here.
          registered: the name under which `algorithms` has it.
          saved: its config's fields, as JSON has them.

        Returns:
          Those that are given, and of the saved fields those that differ from the
          config's defaults and are not given.
        """
        fields = algorithms.get_method(registered).fields
        given = self.method_settings or ()
        paths = {text.partition("=")[0] for text in given}
        found = [
            f"{method}.{path}={configs.as_text(value)}"
            for name in self.own_fields(registered)
            for path, value in configs.changed(name, fields[name].default, saved)
        ]
        return (*(x for x in found if x.partition("=")[0] not in paths), *given)

    def check_settings(
        self, methods: Collection[str], registered: Callable[[str], str] = str
    ) -> None:
        """Checks that every setting can be read and is of a method that runs.

        Raises:
          InputError: naming the first that is not.
        """
        for text, name, *_ in self._given_settings():
            if name not in methods:
                raise InputError(
                    f"--method_settings={text}: {name} is none of the methods that run"
                    f"{meant(name, list(methods))}: {', '.join(methods)}"
                )
        for method in methods:
            self.settings_of(method, registered(method))

    def _given_settings(self) -> list[Setting]:
        """Takes `method_settings` apart.

        Raises:
          InputError: naming the first that is no setting, or that is given twice.
        """
        found: dict[str, Setting] = {}
        for text in self.method_settings or ():
            path, equals, value = text.partition("=")
            method, *fields = path.split(".")
            if path in found:
                raise InputError(f"--method_settings={text}: {path} is given twice")
            if not (equals and any(fields)):
                raise InputError(
                    f"--method_settings={text}: expected METHOD.FIELD=VALUE, as "
                    "fed_prox.proximal_weight=0.001"
                )
            found[path] = Setting(text, method, fields, value)
        return list(found.values())
