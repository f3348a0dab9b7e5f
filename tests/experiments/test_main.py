"""The binaries under one name."""

import importlib
import subprocess
import sys

import pytest

from experiments import __main__ as binaries


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fedjax-graph", *arguments])
    return binaries.main()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("help",)])
def test_help_lists_all_of_them(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 0
    out = capsys.readouterr().out
    assert all(f"fedjax-graph {name} " in out for name in binaries.MODULES)


def test_each_of_them_is_there():
    for module in binaries.MODULES.values():
        assert callable(importlib.import_module(module).main)


def test_flags_go_to_the_binary(monkeypatch, capsys):
    given = []
    module = importlib.import_module("experiments.sfl")
    monkeypatch.setattr(module, "main", lambda: given.extend(sys.argv))
    assert run(monkeypatch, "sfl", "--methods=sfl", "--resume") is None
    assert given == ["fedjax-graph sfl", "--methods=sfl", "--resume"]
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("fedjax_graph 0.")


def test_what_is_no_binary_is_one_line(monkeypatch, capsys):
    assert run(monkeypatch, "cnfgn") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: 'cnfgn' is no command (is cnfgnn meant?); known: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("cut", ["import", "pipe"])
def test_what_cuts_it_off_ends_in_one_line(cut):
    """Ctrl-C while a binary is imported, and output that nobody reads."""
    body = {
        "import": "importlib.import_module = raising(KeyboardInterrupt)",
        "pipe": "print = raising(BrokenPipeError)",
    }[cut]
    lines = (
        "import importlib, sys",
        "from experiments import __main__ as binaries",
        "def raising(kind):",
        "    def fail(*args, **settings): raise kind",
        "    return fail",
        f"binaries.{body}" if cut == "pipe" else body,
        f"sys.argv = ['fedjax-graph', {'--help' if cut == 'pipe' else 'sfl'!r}]",
        "sys.exit(binaries.main())",
    )
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    status, said = {
        "import": (130, "interrupted"),
        "pipe": (141, "nobody reads the output any more"),
    }[cut]
    assert (process.returncode, process.stderr) == (status, f"error: {said}\n")
