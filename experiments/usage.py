"""What `--help` of a binary says: its flags by subject, with values and defaults."""

import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from experiments.studies import options
from experiments.studies.options import Options
from fedjax_graph.core.optimizers import OptimizerConfig

RANKS = {  # others: 2
    "Data": 0,
    "Methods and rounds": 1,
    "Privacy and misbehaving clients": 3,
    "Output": 4,
    "Machine": 5,
}
VALUES = {int: "=N", float: "=X", str: "=TEXT", tuple: "=A,B,..."}
MOST_COLUMNS = 88
INDENT = 22  # of what is said of a flag
COMMON = {
    "--flagfile=FILE": "Takes flags from a file, one on a line.",
    "--help": "Prints this, with the defaults of the other flags beside it: "
    "`--help --dataset=NAME` those of that dataset.",
    "--version": "Prints the version.",
    "--helpfull": "Prints the flags of all libraries as well.",
}


def text(study: Options, about: str, columns: int | None = None) -> str:
    """The help of a binary.

    Args:
      study: what the flags that stand beside `--help` say.
      about: docstring of the binary: a sentence, and commands.
      columns: of the terminal; by default of the one that there is.
    """
    columns = columns or shutil.get_terminal_size((MOST_COLUMNS, 0)).columns
    width = max(40, min(columns or MOST_COLUMNS, MOST_COLUMNS))
    defaults = _defaults(study)
    sections: dict[str, list[str]] = {}
    for name in options.options_of(type(study)):
        if name in study.refused:
            continue
        subject = options.subject_of(type(study), name)
        said = _said(study, name, defaults[name])
        entry = _entry(f"--{_with_value(type(study), name)}", said, width)
        sections.setdefault(subject, []).append(entry)
        if name == "methods":
            sections[subject] += _methods(study.known_methods(), width)
    names = sorted(sections, key=lambda subject: RANKS.get(subject, 2))
    blocks = ["\n".join([name, *sections[name]]) for name in names]
    common = [_entry(flag, said, width) for flag, said in COMMON.items()]
    said = f"{study.duration} Defaults stand in [brackets].".strip()
    parts = [about.strip(), textwrap.fill(said, width), *blocks]
    return "\n\n".join([*parts, "\n".join(["Help", *common])])


def _defaults(study: Options) -> dict[str, str]:
    """What each option is where it is not given, in words."""
    own = {name: getattr(study, name) for name in options.options_of(type(study))}
    return {name: _shown(value) for name, value in (own | study.in_effect()).items()}


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, OptimizerConfig):
        return value.name
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)


def _with_value(study_type: type, name: str) -> str:
    kind = options.kind_of(study_type, name)
    return f"[no]{name}" if kind is bool else f"{name}{VALUES[kind]}"


def _said(study: Options, name: str, default: str) -> str:
    metadata = options.options_of(type(study))[name].metadata
    said, choices = metadata["help"], metadata["choices"]
    if choices:
        is_list = options.kind_of(type(study), name) is tuple
        some = "One or more" if is_list else "One"
        said += f" {some} of: {', '.join(choices)}."
    return f"{said} [{default}]"


def _entry(flag: str, said: str, width: int) -> str:
    """A flag and what is said of it, beside it or, of a long one, below."""
    head, indent = f"  {flag}", " " * INDENT
    lines = textwrap.wrap(
        said,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    if len(head) + 2 > INDENT:
        return "\n".join([head, *lines])
    return "\n".join([head.ljust(INDENT) + lines[0][INDENT:], *lines[1:]])


def _methods(known: Mapping[str, str], width: int) -> list[str]:
    """The values of `--methods` with their titles."""
    if not known:
        return []
    longest = max(map(len, known))
    rows = [f"{name.ljust(longest)}  {title}" for name, title in known.items()]
    return [f"{' ' * INDENT}{row}"[:width] for row in rows]
