"""Plugins: a user's own files, which register what they bring when they are imported.

`load("my_method.py")` or `load("package.module")`; a package that is installed names
its module under the entry point group `fedjax_graph.plugins`.
"""

import importlib
import importlib.util
import os
import sys
import traceback
import zlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType

from fedjax_graph.core.errors import InputError
from fedjax_graph.core.termination import Terminated

GROUP = "fedjax_graph.plugins"
FAILURES = (Exception, SystemExit)  # of a plugin, which has no say in when to exit


def load(name: str) -> ModuleType:
    """Imports a plugin, once; a second call returns the same module.

    Args:
      name: the path of a `.py` file, or the dotted name of a module.

    Raises:
      InputError: one line that names the plugin, and what went wrong in it.
    """
    if not isinstance(name, str):
        raise InputError(f"plugin {name!r}: expected the name of a .py file or module")
    if name.endswith(".py"):
        return _load_file(Path(name))
    if "/" in name or os.sep in name:
        raise InputError(f"plugin {name}: no Python file; did you mean {name}.py?")
    try:
        return importlib.import_module(name)
    except FAILURES as error:
        raise _broken(name, error) from error


def load_all(names: Iterable[str] = ()) -> None:
    """Imports the plugins of installed packages, then those named.

    Raises:
      InputError: one line that names the plugin, and what went wrong in it.
    """
    for entry_point in metadata.entry_points(group=GROUP):
        try:
            entry_point.load()
        except FAILURES as error:
            raise _broken(entry_point.value, error) from error
    for name in names:
        load(name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"plugin {path}: no such file")
    path = path.resolve()
    # Dataclasses look their module up under its name, so it needs one.
    name = f"{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # as the name ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FAILURES as error:
        del sys.modules[name]
        raise _broken(str(path), error) from error
    return module


def _broken(name: str, error: BaseException) -> InputError:
    """The error in one line, with the last line of the plugin's file that ran.

    Raises:
      Terminated: where the process was told to end meanwhile.
    """
    if isinstance(error, Terminated):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == name]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    place = f", line {lines[-1]}" if lines else ""
    reason = " ".join(str(error).split())
    if not isinstance(error, InputError):
        reason = f"{type(error).__name__}: {reason}"
    return InputError(f"plugin {name}{place}: {reason}")
