"""docs/map.md names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOP = re.compile(r"`(core|transfer|llm|vla|wfm)/([\w/]+\.py):([\w.]+)`")


def names_of(file):
    """Functions and classes of a file, methods as Class.method."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (f"{node.name}.{method.name}" for method in inner)


def test_every_hop_exists():
    hops = HOP.findall((ROOT / "docs" / "map.md").read_text(encoding="utf-8"))
    assert len(hops) > 50
    missing = []
    for package, path, name in hops:
        file = ROOT / "packages" / f"cosmos-rl-{package}" / "src" / f"cosmos_rl_{package}" / path
        if not file.exists() or name not in names_of(file):
            missing.append(f"{package}/{path}:{name}")
    assert missing == []
