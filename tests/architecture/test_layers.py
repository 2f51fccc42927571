"""Imports go one way: domains, transfer, core; inside core from launch down to types; and nowhere in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_imports_go_round():
    """Of modules, imports for annotations and inside functions included."""
    files = {_module(file): file for file in sorted(ROOT.glob("packages/*/src/**/*.py"))}
    assert len(files) > 300
    graph = {name: set(_imported(file, files)) - {name} for name, file in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[3:]).removesuffix(".__init__")


def _imported(file: Path, files: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of this repository that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from {name if name in files else node.module} & files.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & files.keys()
