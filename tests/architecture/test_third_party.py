"""THIRD_PARTY.md lists what uv.lock installs; no floor of a dependency lets a vulnerable version in."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {
    "h11": (0, 16),  # CVE-2025-43859: requests smuggled in chunked bodies
    "pillow": (12, 3),  # CVE-2026-25990, CVE-2026-59205 and others: writes out of bounds, bombs
    "starlette": (1, 3, 1),  # CVE-2025-62727, CVE-2026-48710, CVE-2026-54283: ranges, Host header, limits of forms
    "torch": (2, 11),  # CVE-2025-32434, CVE-2026-24747, CVE-2026-4538: code run by loading files
}
"""The first versions without these, by name."""


def test_the_page_has_the_names_and_versions_of_the_lock():
    command = [sys.executable, ROOT / "scripts/third_party.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"run scripts/third_party.py: {done.stdout}{done.stderr}"


def test_the_check_sees_a_version_that_differs(tmp_path):
    for folder in ("scripts", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
    for name in ("scripts/third_party.py", "uv.lock", "THIRD_PARTY.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    page = tmp_path / "THIRD_PARTY.md"
    page.write_text(re.sub(r"\| pydantic \| [^|]+ \|", "| pydantic | 1.0 |", page.read_text()))
    command = [sys.executable, tmp_path / "scripts/third_party.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert done.stdout.startswith("pydantic: 1.0 in THIRD_PARTY.md")


@pytest.mark.parametrize("project", sorted(ROOT.glob("packages/*/pyproject.toml")), ids=lambda path: path.parent.name)
def test_no_floor_lets_a_vulnerable_version_in(project):
    table = tomllib.loads(project.read_text())["project"]
    wanted = [*table["dependencies"], *(one for extra in table["optional-dependencies"].values() for one in extra)]
    for one in wanted:
        name, _, bounds = re.split(r"[\[;]", one)[0].partition(">=")
        if name in FLOORS:
            assert tuple(map(int, bounds.partition(",")[0].split("."))) >= FLOORS[name], f"{one}: see FLOORS"
