"""README, the pages of docs and what stands beside them say what is so."""

import importlib
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from absl import flags

import fedjax_graph as fg
from experiments import cli
from experiments.__main__ import MODULES
from experiments.studies import options
from fedjax_graph import algorithms
from fedjax_graph.core import optimizers, plugins
from fedjax_graph.data import catalog
from fedjax_graph.tasks import TASKS
from tests import tables
from tests.experiments import binary

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "BUILD_NOTES.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
COMMAND = re.compile(r"python -m experiments\.(\w+)([^`#\n]*)")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def blocks(page: pathlib.Path) -> list[str]:
    """The Python of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def commands() -> list[tuple[str, str, tuple[str, ...]]]:
    """(page, binary, arguments) of every command that a page names."""
    found = {}
    for page in PAGES:
        text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
        text = re.sub(r"(?<=\S)\n(?=--)", " ", text)  # a command that a line breaks
        for name, rest in COMMAND.findall(text):
            args = tuple(arg for arg in shlex.split(rest) if "..." not in arg)
            found[name, args] = page.name
    return [(page, name, args) for (name, args), page in found.items()]


def test_the_example_that_composes_the_pieces(capsys):
    (code,) = blocks(README)
    assert len(code.splitlines()) < 30
    exec(compile(code, str(README), "exec"), {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    slopes = {name: float(slope) for name, slope, _ in lines}
    assert abs(slopes["bounded"] - 2) < 0.05  # the line is y = 2 x + 1
    assert abs(slopes["weighted_mean"] - 2) > 0.5  # and one client is broken


def test_the_two_commands_stand_there_as_they_are_run():
    for command in (
        "pip install -e . && python -m experiments.cnfgnn",
        "pip install -e '.[test]' && python -m pytest",
    ):
        assert f"\n    {command}\n" in README.read_text()
    assert len(README.read_text().splitlines()) <= 120


RUN = """
import json, sys

for page, codes in json.load(sys.stdin).items():
    for code in codes:
        exec(compile(code, page, "exec"), {"__name__": page})
"""


def test_the_python_of_the_pages_runs(tmp_path):
    """In a process and a folder of its own, as what it registers and writes stays."""
    pages = {str(page): blocks(page) for page in PAGES if page != README}
    assert sum(map(bool, pages.values())) > 3
    result = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(pages),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("name", sorted({name for _, name, _ in commands()}))
def test_the_flags_of_a_command_are_those_of_its_binary(name, monkeypatch):
    """The study is made and its methods are chosen; what it would do is not done."""
    types = []

    def define(study_type, about):
        options.define_flags(study_type)
        types.append(study_type)

    monkeypatch.setattr(cli, "run_study", define)
    monkeypatch.chdir(ROOT)  # flagfiles and plugins are named as a clone has them
    binary.forget_flags()
    importlib.import_module(MODULES[name]).main()
    (study_type,) = types
    with tables.kept():  # of what plugins register
        for _, other, args in commands():
            if other == name:
                flags.FLAGS.unparse_flags()
                flags.FLAGS(["binary", *args])
                check(options.from_flags(study_type))
    binary.forget_flags()


def check(study):
    """Checks what a study checks before it reads data."""
    plugins.load_all(getattr(study, "plugin", None) or ())
    study.in_effect()
    study = study.resolved() if hasattr(study, "resolved") else study
    for step in ("check", "check_methods", "chosen_methods", "parts"):
        if callable(getattr(study, step, None)):
            getattr(study, step)()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_links_are_there(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_a_text(page):
    """Sphinx would take the title of the page; other readers show nothing."""
    assert "[](" not in page.read_text()


def test_the_reference_says_where_public_names_come_from():
    rows = (ROOT / "docs" / "api.md").read_text().splitlines()
    for name in set(fg.__all__) - {"__version__"}:
        place = f"`fedjax_graph.{fg._PLACES[name]}`"
        assert any(f"`{name}`" in row and row.endswith(f"| {place} |") for row in rows)


def test_the_files_that_pages_name_are_there():
    for page in PAGES:
        for path in re.findall(
            r"`((?:fedjax_graph|experiments|examples|tests|algorithms|core|tasks|models)"
            r"/[\w/]+\.(?:py|flags))`",
            page.read_text(),
        ):
            if "my_" not in path:
                found = (ROOT / path).exists() or (
                    ROOT / "fedjax_graph" / path
                ).exists()
                assert found, f"{page.name}: {path}"


def test_what_has_a_name_stands_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    names = {
        *algorithms.method_names(),
        *optimizers.OPTIMIZERS,
        *optimizers.SCHEDULES,
        *catalog.DATASETS,
        *TASKS,
    }
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
