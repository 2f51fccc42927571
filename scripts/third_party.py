"""Write THIRD_PARTY.md: distributions that the packages and their extras install, by uv.lock, with their licences.

.venv/bin/python scripts/third_party.py            write it
.venv/bin/python scripts/third_party.py --check    exit code 1 if its names and versions are not those of uv.lock
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "THIRD_PARTY.md"
OURS = ("cosmos-rl-core", "cosmos-rl-transfer", "cosmos-rl-llm", "cosmos-rl-vla", "cosmos-rl-wfm")
ROW = re.compile(r"^\| ([\w.-]+) \| ([^|]+) \|", re.MULTILINE)
HEAD = """# Third-party packages

What `pip install` of the five packages and their extras brings, as `uv.lock` resolves it for all platforms; tools of
development are not among it. Part of this repository are uPlot 1.6.32 (MIT), the charts of the dashboard, in
`cosmos_rl_core/ops/dashboard/static`, and in `docs/site` Noto Sans Math (OFL 1.1) and iframe-worker 1.0.4 (MIT), the
formulas and the search of the site, each with its licence. Made by `scripts/third_party.py`. A licence is
what the package says of itself, where this page was made; "not installed" is what another platform, or an extra that
was not installed there, brings. No legal advice.

"Comes with" is "always" for what one of the packages needs without an extra, otherwise the extras that bring it.

| package | version | licence | comes with |
|---|---|---|---|
"""
WORDS = {
    "Apache License": "Apache License, by its licence file",
    "Permission is hereby granted, free of charge": "MIT License, by its licence file",
    "Redistribution and use in source and binary forms": "BSD License, by its licence file",
}
"""Beginning of a licence file -> name of the licence."""
NOT_STATED = "not stated"


def main() -> int:
    found = locked()
    if "--check" in sys.argv[1:]:
        wanted = {name: versions for name, (versions, _) in found.items()}
        there = dict(ROW.findall(PAGE.read_text(encoding="utf-8"))) if PAGE.exists() else {}
        there.pop("package", None)
        for name in sorted(wanted.keys() | there.keys()):
            if wanted.get(name) != there.get(name):
                print(f"{name}: {there.get(name)} in {PAGE.name}, {wanted.get(name)} in uv.lock")
        return int(wanted != there)
    rows = [
        f"| {name} | {versions} | {licence(name)} | {', '.join(sorted(comes_with))} |\n"
        for name, (versions, comes_with) in found.items()
    ]
    PAGE.write_text(HEAD + "".join(rows), encoding="utf-8")
    return 0


def locked() -> dict[str, tuple[str, set[str]]]:
    """Return name -> (versions, packages or extras that need it) of all that the packages and their extras install."""
    packages: dict[str, list[Mapping[str, Any]]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]:
        packages.setdefault(package["name"], []).append(package)
    reached: dict[str, set[str]] = {}
    for name in OURS:
        (package,) = packages[name]
        _reach(package.get("dependencies", ()), "always", packages, reached)
        for extra, wanted in package.get("optional-dependencies", {}).items():
            _reach(wanted, f"{name}[{extra}]", packages, reached)
    return {
        name: (
            " or ".join(sorted({package["version"] for package in packages[name]}, key=_order)),
            {"always"} if "always" in comes_with else comes_with,
        )
        for name, comes_with in sorted(reached.items())
        if name not in OURS
    }


def _reach(
    wanted: Any, comes_with: str, packages: Mapping[str, list[Mapping[str, Any]]], reached: dict[str, set[str]]
) -> None:
    """Add all direct and indirect dependencies of a list."""
    waiting, seen = list(_names(wanted)), set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        reached.setdefault(name, set()).add(comes_with)
        for package in packages[name]:
            lists = [package.get("dependencies", ())]
            lists += [package.get("optional-dependencies", {}).get(extra, ())] if extra else []
            waiting += [one for dependencies in lists for one in _names(dependencies)]


def _names(dependencies: Any) -> Iterator[tuple[str, str]]:
    for dependency in dependencies:
        yield dependency["name"], ""
        yield from ((dependency["name"], extra) for extra in dependency.get("extra", ()))


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def licence(name: str) -> str:
    """Return the licence named in an installed package's metadata, on one line."""
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return "not installed"
    if expression := found.get("License-Expression"):
        return expression
    classifiers = found.get_all("Classifier") or []
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License ::")]
    named = [text for text in named if text != "OSI Approved"]
    text = (found.get("License") or "").strip()
    if not named and text and "\n" not in text and len(text) <= 80:
        named = [text]
    return " or ".join(named).replace("|", "/") or _by_file(name) or NOT_STATED


def _by_file(name: str) -> str:
    """Return the licence found in the text of an installed package's licence file; "" if unknown."""
    files = [
        file
        for file in metadata.files(name) or ()
        if re.fullmatch(r"[^/]+\.dist-info/(licenses/)?LICENSE.*", str(file))
    ]
    text = " ".join(" ".join(Path(str(file.locate())).read_text(encoding="utf-8").split()) for file in files)
    return next((licence for words, licence in WORDS.items() if words in text), "")


if __name__ == "__main__":
    sys.exit(main())
