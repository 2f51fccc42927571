"""All packages carry one version and pin one another to it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

PROJECTS = {
    project["name"]: project
    for manifest in sorted((Path(__file__).parents[2] / "packages").glob("*/pyproject.toml"))
    for project in [tomllib.loads(manifest.read_text())["project"]]
}


def test_there_is_one_version():
    assert len({project["version"] for project in PROJECTS.values()}) == 1


@pytest.mark.parametrize("name", PROJECTS)
def test_siblings_are_pinned_to_it(name):
    project = PROJECTS[name]
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(line for extra in extras for line in extra)]
    siblings = [line for line in requirements if re.split(r"[^\w-]", line)[0] in PROJECTS]
    assert [line for line in siblings if not line.endswith(f"=={project['version']}")] == []


@pytest.mark.parametrize("name", PROJECTS)
def test_a_package_is_imported_by_its_name(name):
    root = Path(__file__).parents[2] / "packages" / name / "src" / name.replace("-", "_")
    assert (root / "__init__.py").is_file()
    assert (root / "py.typed").is_file()
