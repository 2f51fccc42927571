"""Short files, short functions, and none of the calls that the house does without."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("packages/*/src/**/*.py"))
FILE_LINES, FUNCTION_LINES = 500, 60
BANNED_CALLS = {
    "hasattr": "ask for the type, or catch AttributeError",
    "eval": "parse it",
    "exec": "call a function",
    "torch.load": "use safetensors",
}
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


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
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    yield f"line {node.lineno}: {name} has {lines} lines, at most {FUNCTION_LINES}"
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


def test_the_sources_are_found():
    assert len(FILES) > 20


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.parts[-3:]))
def test_shape(file):
    text = file.read_text(encoding="utf-8")
    found = list(offences(ast.parse(text)))
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        found.append(f"{lines} lines, at most {FILE_LINES}")
    assert found == []


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
    ],
)
def test_each_offence_is_seen(source):
    assert len(list(offences(ast.parse(source)))) == 1


def test_putting_a_model_into_evaluation_mode_is_none():
    assert list(offences(ast.parse("model.eval()"))) == []
