"""What is shipped, and what it needs."""

import ast
import importlib
import os
import pathlib
import re
import sys
import tomllib
import warnings
from importlib import metadata

import pytest

import fedjax_graph
from fedjax_graph.driver import pretrained

OWN = {"experiments", "fedjax_graph"}
ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Distributions whose modules have another name.
MODULES = {"absl-py": "absl", "orbax-checkpoint": "orbax"}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements):
    return {normal(re.match(r"[\w.-]+", text)[0]) for text in requirements}


CORE = names(PROJECT["project"]["dependencies"])
EXTRAS = set().union(*map(names, PROJECT["project"]["optional-dependencies"].values()))


def imported(folder):
    """Top-level modules imported anywhere in a folder's sources."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return {normal(name) for name in found - set(sys.stdlib_module_names) - OWN}


def test_the_wheel_holds_the_library_and_the_binaries():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old releases use what Python deprecates
        setuptools = pytest.importorskip("setuptools")
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    packages = set(setuptools.find_packages(str(ROOT), **find))
    modules = [p for top in OWN for p in (ROOT / top).rglob("*.py")]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in modules}
    assert packages == folders  # each has its __init__.py
    assert {package.split(".")[0] for package in packages} == OWN


def test_the_wheel_holds_what_is_no_module():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    shipped = {top: set() for top in OWN}
    for top, patterns in data.items():
        for pattern in patterns:
            shipped[top] |= set((ROOT / top).glob(pattern))
    library = ROOT / "fedjax_graph"
    models = {library / "pretrained" / f"{name}.npz" for name in pretrained.names()}
    assert shipped["fedjax_graph"] == {library / "py.typed", *models}
    others = [(ROOT / "experiments").rglob(f"*.{kind}") for kind in ("flags", "html")]
    assert shipped["experiments"] == set().union(*others)
    assert all(path.is_file() for paths in shipped.values() for path in paths)


def test_the_version_stands_once():
    assert PROJECT["project"]["dynamic"] == ["version"]
    place = PROJECT["tool"]["setuptools"]["dynamic"]["version"]
    assert place == {"attr": "fedjax_graph.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", fedjax_graph.__version__)


def test_the_version_and_the_licence_are_those_of_the_citation():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {fedjax_graph.__version__}\n" in text
    assert f"\nlicense: {PROJECT['project']['license']}\n" in text


def test_the_console_script_and_the_workflows_name_what_is_there():
    (place,) = PROJECT["project"]["scripts"].values()
    module, _, function = place.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    for name, script in (("ci", "run"), ("nightly", "nightly")):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
        assert f"- run: .ci/{script}\n" in text
        assert os.access(ROOT / ".ci" / script, os.X_OK)


def test_core_dependencies_are_those_imported():
    used = imported("fedjax_graph") | imported("experiments")
    modules = {normal(MODULES.get(name, name)) for name in CORE}
    assert modules <= used
    assert used - modules <= EXTRAS


def test_the_library_does_not_import_the_binaries():
    sources = (ROOT / "fedjax_graph").rglob("*.py")
    assert not [path for path in sources if "import experiments" in path.read_text()]
    assert not [path for path in sources if "from experiments" in path.read_text()]


def test_installed_versions_satisfy_the_floors():
    packaging = pytest.importorskip("packaging.requirements")
    for text in PROJECT["project"]["dependencies"]:
        requirement = packaging.Requirement(text)
        if requirement.marker and not requirement.marker.evaluate():
            continue  # of another Python
        version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), text
