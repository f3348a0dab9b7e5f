"""Sphinx's settings: pages in MyST Markdown, the API reference from docstrings."""

import dataclasses
import importlib.metadata
import os
import re

import sphinx.pycode.parser

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # modules are imported, nothing runs

project = "fedjax_graph"
author = "the fedjax_graph authors"
copyright = author  # noqa: A001, Sphinx's own name
version = release = importlib.metadata.version("fedjax-graph")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
templates_path = ["_templates"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
myst_heading_anchors = 3
default_role = "py:obj"  # `name` in a docstring links to what it names, if documented
suppress_warnings = ["ref.python"]  # a name that two classes have links to neither

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Comments beside fields and constants, such as `# [K, T] float32`, are their reference.
sphinx.pycode.parser.comment_re = re.compile(r"^\s*#:? ?((?!noqa|type:).*)\r?\n?$")

MARKUP = re.compile(r"(``[^`]*``|`[^`]*`)(?=([\w^]?))|[*|]|(?<=\w)_(?!\w)")
BEFORE_LIST = re.compile(r"(?m)^(?! *- )(.*\S.*\n)(?= *- )")
AFTER_LIST = re.compile(r"(?m)^(( *)- .*\n(?:\2 +\S.*\n)*)(?=\2[^\s-])")
ALIAS = re.compile(r"Alias for field number \d+$")


def plain_text(app, what, name, obj, options, lines):
    """Makes docstrings plain text with `names`, as they are written.

    Stars, bars and trailing underscores stand for themselves, a paragraph that is set
    in by four spaces is shown as it is, a list needs no empty line before or after
    it, and what Python itself says of a tuple's fields is left out. A study gets the
    help of its flags.
    """
    del app, name, options
    if what == "class" and dataclasses.is_dataclass(obj):
        lines += ["", *_flags(obj)]
    paragraphs, was_flush, was_shown = [], False, False
    for paragraph in "\n".join(lines).split("\n\n"):
        is_shown = paragraph.startswith("    ") and (was_flush or was_shown)
        if is_shown:
            paragraphs += [paragraph] if was_shown else ["::", paragraph]
        else:
            text = MARKUP.sub(_escaped, paragraph)
            text = BEFORE_LIST.sub(r"\1\n", text)
            paragraphs.append(AFTER_LIST.sub(r"\1\n", text))
        was_flush = not paragraph.rpartition("\n")[2].startswith(" ")
        was_shown = is_shown
    text = "\n\n".join(paragraphs)
    if what in ("attribute", "data"):
        # An empty comment: else napoleon takes what stands before a colon for a type.
        text = "" if ALIAS.match(text) else f"..\n\n{text}"
    lines[:] = text.split("\n")


def _flags(study):
    """The flags that a dataclass defines, as a list of what `--help` says."""
    fields = [x for x in dataclasses.fields(study) if x.name in study.__annotations__]
    helps = {x.name: x.metadata["help"] for x in fields if "help" in x.metadata}
    return [f"- `--{name}`: {text}" for name, text in helps.items()]


def _escaped(match):
    name, following = match[1], match[2]
    if name is None:
        return "\\" + match[0]
    return name + ("\\ " if following else "")  # as in `Field`s


def setup(app):
    """Connects `plain_text` ahead of napoleon, which reads the sections."""
    app.connect("autodoc-process-docstring", plain_text, priority=100)
