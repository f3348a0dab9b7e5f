"""The binaries under one name."""

import importlib
import subprocess
import sys

import pytest

from experiments import __main__ as binaries
from tests.experiments import binary


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


def test_ctrl_c_while_a_binary_is_imported_is_one_line():
    lines = (
        "import importlib, sys",
        "from experiments import __main__ as binaries",
        "def fail(*args): raise KeyboardInterrupt",
        "importlib.import_module = fail",
        "sys.argv = ['fedjax-graph', 'sfl']",
        "sys.exit(binaries.main())",
    )
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT])
def test_help_that_nobody_reads_ends_in_one_line(stderr):
    binary.assert_unread_is_said(["-m", "experiments", "--help"], stderr)
