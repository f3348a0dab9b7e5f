"""Imports point only down, and in no circle; a model knows no method."""

import ast
import pathlib

import pytest

from fedjax_graph import algorithms

ROOT = pathlib.Path(__file__).parents[1]
LAYERS = ("core", "models", "data", "tasks", "algorithms", "driver", "experiments")
FLOORS = {
    ("experiments" if layer == "experiments" else f"fedjax_graph.{layer}"): floor
    for floor, layer in enumerate(LAYERS)
} | {"fedjax_graph.doctor": LAYERS.index("experiments")}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for folder in ("fedjax_graph", "experiments")
    for path in (ROOT / folder).rglob("*.py")
}


def imports(name, tree, modules):
    """Those of `modules` that a module's source imports, wherever it does."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")
            if modules[name].name != "__init__.py":
                package = package[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            named = [f"{base}.{alias.name}" for alias in node.names]
            named = [text if text in modules else base for text in named]
        else:
            continue
        found |= {text for text in named if text in modules}
    return found - {name}


def all_imports(modules):
    return {
        name: imports(name, ast.parse(path.read_text()), modules)
        for name, path in modules.items()
    }


IMPORTS = all_imports(SOURCES)


def floor(name):
    """The floor a module is on; None of the package's face, which shows all of them."""
    for prefix, level in FLOORS.items():
        if name == prefix or name.startswith(f"{prefix}."):
            return level
    return None


def test_every_module_is_on_a_floor():
    assert {name for name in SOURCES if floor(name) is None} == {"fedjax_graph"}
    assert {floor(name) for name in SOURCES} - {None} == set(range(len(LAYERS)))


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"fedjax_graph"}))
def test_imports_point_down(name):
    upward = [
        other
        for other in IMPORTS[name]
        if floor(other) is not None and floor(other) > floor(name)
    ]
    assert not upward


def circle(graph):
    """Modules that import each other in a circle; none if there is no such."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        path.append(name)
        for other in sorted(graph[name]):
            if found := visit(other):
                return found
        path.pop()
        done.add(name)
        return None

    for name in sorted(graph):
        if found := visit(name):
            return found
    return None


def test_there_is_no_circle():
    assert circle(IMPORTS) is None


def test_circles_and_relative_imports_are_seen(tmp_path):
    texts = {
        "fedjax_graph": "",
        "fedjax_graph.a": "def f():\n    from fedjax_graph import b",
        "fedjax_graph.b": "from .c import x",
        "fedjax_graph.c": "import fedjax_graph.a as a",
        "fedjax_graph.d": "from fedjax_graph.c import x",
    }
    modules = {}
    for name, text in texts.items():
        modules[name] = tmp_path / (
            "__init__.py" if name == "fedjax_graph" else f"{name}.py"
        )
        modules[name].write_text(text)
    graph = all_imports(modules)
    assert graph["fedjax_graph.d"] == {"fedjax_graph.c"}
    a, b, c = (f"fedjax_graph.{letter}" for letter in "abc")
    assert circle(graph) == [a, b, c, a]
    assert circle(graph | {c: set()}) is None


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "fedjax_graph" / "models").glob("[!_]*.py")),
    ids=lambda p: p.stem,
)
def test_a_model_names_no_method(path):
    """In its code; a docstring may say which paper a layer is from."""
    tree = ast.parse(path.read_text())
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    words = {word.lower().strip("_") for word in words}
    assert words and not words & set(algorithms.REGISTRY)
