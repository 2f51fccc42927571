"""The shape of the source tree: short functions, classes and files, small folders, no crumbs, no banned calls."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("packages/*/src/**/*.py"))
FOLDERS = sorted({file.parent for file in FILES})
FUNCTION_LINES, CLASS_LINES, FILE_LINES, FOLDER_FILES = 60, 250, 500, 15
CRUMB_LINES = 60
"""A file that is shorter and has one importer belongs into that importer."""
SEAMS = {
    "cosmos_rl_core.cli.init",  # a command
}
"""Short files with one importer that stand for themselves."""
BANNED_CALLS = {
    "hasattr": "ask for the type, or catch AttributeError",
    "eval": "parse it",
    "exec": "call a function",
    "torch.load": "use safetensors",
}
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNPICKLES = "cosmos_rl_core.storage.unpickle"
"""The program of a child process with limits, which may unpickle; no module imports it (decision 0015)."""


def dotted(node: ast.expr) -> str:
    """`torch.load` for the expression torch.load; "" for anything that is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def offences(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if lines_of(node) > FUNCTION_LINES:
                yield f"line {node.lineno}: {name} has {lines_of(node)} lines, at most {FUNCTION_LINES}"
            case ast.ClassDef(name=name) if lines_of(node) > CLASS_LINES:
                yield f"line {node.lineno}: {name} has {lines_of(node)} lines, at most {CLASS_LINES}"
            case ast.Call(func=func) if dotted(func) in BANNED_CALLS:
                yield f"line {node.lineno}: {dotted(func)}: {BANNED_CALLS[dotted(func)]}"
            case ast.Call(func=ast.Attribute(attr=attr)) if attr.endswith(("_object", "_object_list")):
                yield f"line {node.lineno}: {attr} pickles"
            case ast.Import(names=names):
                yield from (f"line {node.lineno}: imports {a.name}" for a in names if a.name in BANNED_MODULES)
            case ast.ImportFrom(module=module) if module in BANNED_MODULES:
                yield f"line {node.lineno}: imports {module}"
            case ast.ExceptHandler(type=None):
                yield f"line {node.lineno}: bare except"


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts[3:]  # behind packages/NAME/src
    return ".".join(parts).removesuffix(".__init__")


@cache
def importers() -> dict[str, set[str]]:
    """Modules of the packages -> the modules of the packages that import them."""
    modules, found = {module_of(file) for file in FILES}, defaultdict(set)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (f"{node.module}.{alias.name}" for alias in node.names):
                    found[name if name in modules else node.module].add(module_of(file))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name].add(module_of(file))
    return found


def test_the_sources_are_found():
    assert len(FILES) > 20
    assert len(importers()["cosmos_rl_core.types"]) > 20


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.parts[-3:]))
def test_shape(file):
    text = file.read_text(encoding="utf-8")
    breaches = list(offences(ast.parse(text)))
    if module_of(file) == UNPICKLES:
        breaches = [offence for offence in breaches if not offence.endswith("imports pickle")]
        assert importers()[UNPICKLES] == set()
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        breaches.append(f"{lines} lines, at most {FILE_LINES}")
    assert breaches == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: "/".join(folder.parts[-3:]))
def test_a_folder_can_be_surveyed_and_says_what_it_holds(folder):
    files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
    assert len(files) <= FOLDER_FILES
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_no_file_is_a_crumb():
    """Not counted: entry points of a package, and rows of a table, which their folder's `__init__` imports."""
    entries = "".join(file.read_text(encoding="utf-8") for file in ROOT.glob("packages/*/pyproject.toml"))
    crumbs = []
    for file in FILES:
        name, lines = module_of(file), len(file.read_text(encoding="utf-8").splitlines())
        by = importers()[name]
        apart = name in SEAMS or f"{name}:" in entries or by == {name.rpartition(".")[0]}
        if lines < CRUMB_LINES and len(by) == 1 and file.name != "__init__.py" and not apart:
            crumbs.append(f"{name}, {lines} lines, is imported by {next(iter(by))} alone")
    assert crumbs == []


def test_seams_are_still_needed():
    assert all(len(importers()[name]) == 1 for name in SEAMS)
    assert len(SEAMS) <= 10


@pytest.mark.parametrize(
    "source",
    [
        "hasattr(x, 'y')",
        "eval('1')",
        "torch.load(path)",
        "import pickle",
        "from pickle import loads",
        "dist.all_gather_object(a, b)",
        "try:\n    f()\nexcept:\n    pass",
        "def f():\n" + "    x = 1\n" * FUNCTION_LINES,
        "class A:\n" + "    x = 1\n" * CLASS_LINES,
    ],
)
def test_each_offence_is_seen(source):
    assert len(list(offences(ast.parse(source)))) == 1


def test_putting_a_model_into_evaluation_mode_is_none():
    assert list(offences(ast.parse("model.eval()"))) == []
