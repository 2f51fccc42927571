"""Plug-ins: by entry point or "module:attribute", imported only when asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError, closest
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.testing import tiny

GROUP = "cosmos_rl.domains"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution that offers one plug-in, the way pip leaves it on disk."""

    def put(distribution: str, *, name: str, target: str, source: str = "") -> None:
        info = tmp_path / distribution / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {target}\n")
        module = target.partition(":")[0]
        (info.parent / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(info.parent))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return put


def test_an_attribute_of_a_module_is_a_plugin():
    assert plugins.load(GROUP, "cosmos_rl_core.testing.tiny:TINY") is tiny.TINY


def test_each_group_is_listed_once():
    assert sorted(plugins.GROUPS) == sorted(set(plugins.GROUPS))


def test_an_attribute_may_lie_deeper():
    assert plugins.load(GROUP, "cosmos_rl_core.testing.tiny:Tiny.name") == "tiny"


def test_an_installed_plugin_is_found_by_its_name(install):
    install("somebodys_robots", name="robots", target="somebodys_robots_domain:DOMAIN", source="DOMAIN = 17\n")
    assert "robots" in plugins.names(GROUP)
    assert plugins.load(GROUP, "robots") == 17


def test_listing_and_locating_import_nothing(install):
    install("breaks_on_import", name="broken", target="breaks_on_import_module:X", source="raise RuntimeError\n")
    assert "broken" in plugins.names(GROUP)
    assert plugins.locate(GROUP, "broken") == "breaks_on_import_module:X"


def test_a_plugin_that_fails_to_import_shows_the_cause(install):
    install(
        "lacks_a_library",
        name="lacking",
        target="lacks_a_library_module:X",
        source="import no_such_library\n",
    )
    with pytest.raises(UserError, match=r"'lacking'.*ModuleNotFoundError: No module named 'no_such_library'"):
        plugins.load(GROUP, "lacking")


def test_a_plugin_that_raises_while_imported_shows_the_cause(install):
    install(
        "raises_early",
        name="early",
        target="raises_early_module:X",
        source="raise RuntimeError('no GPU here')\n",
    )
    with pytest.raises(UserError, match=r"'early'.*RuntimeError: no GPU here"):
        plugins.load(GROUP, "early")


def test_two_packages_with_one_name_are_told_apart(install):
    install("first_package", name="same", target="first_package_module:X")
    install("second_package", name="same", target="second_package_module:X")
    with pytest.raises(UserError, match="two installed packages offer 'same'"):
        plugins.load(GROUP, "same")


def test_an_unknown_name_answers_with_the_known_ones(install):
    install("more_robots", name="robots", target="more_robots_domain:DOMAIN")
    with pytest.raises(UserError, match=r"no domain is called 'robot'; did you mean 'robots'\? Known: .*robots"):
        plugins.load(GROUP, "robot")


def test_a_missing_attribute_is_named():
    with pytest.raises(UserError, match=r"json \(.*json.__init__\.py\) has no attribute 'nothing'"):
        plugins.load(GROUP, "json:nothing")


@pytest.mark.parametrize("name", [":x", "json:"])
def test_half_a_name_says_how_to_write_one(name):
    with pytest.raises(UserError, match="must be written as module:attribute"):
        plugins.load(GROUP, name)


def run_bare(code: str, *paths) -> str:
    """Run code with nothing but core's dependencies on the path: no entry points of ours."""
    prelude = f"""
import sys
from importlib import metadata
real = metadata.entry_points
metadata.entry_points = lambda **query: [p for p in real(**query) if not p.dist.name.startswith("cosmos-rl-")]
sys.path[:0] = {[str(path) for path in paths]!r}
"""
    done = subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_that_the_packages_offer_is_found_without_an_install():
    declared = {}
    for file in Path(__file__).parents[2].glob("*/pyproject.toml"):
        points = tomllib.loads(file.read_text())["project"].get("entry-points", {})
        for group in points.keys() & set(plugins.GROUPS):
            declared |= {f"{group} {name}": target for name, target in points[group].items()}
    if not declared:
        pytest.skip("outside of the source tree")
    code = """
from cosmos_rl_core.plugins import GROUPS, locate, names
print({f"{group} {name}": locate(group, name) for group in GROUPS for name in names(group)})
"""
    sources = sorted(str(path) for path in Path(__file__).parents[2].glob("*/src"))
    assert ast.literal_eval(run_bare(code, *sources)) == declared


def test_a_sibling_on_the_path_is_found_without_an_install(tmp_path):
    package = tmp_path / "cosmos_rl_llm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "domain.py").write_text("LLM = 'from source'\n")
    code = f"from cosmos_rl_core import plugins\nprint(plugins.load({GROUP!r}, 'llm'))"
    assert run_bare(code, tmp_path) == "from source"


@pytest.mark.parametrize(
    ("find", "name", "package"),
    [
        ("cosmos_rl_core.recipe.load:load_domain", "llm", "llm"),
        ("cosmos_rl_core.recipe.load:load_domain", "vla", "vla"),
        ("cosmos_rl_core.algorithms.table:find_algorithm", "ddrl", "wfm"),
    ],
)
def test_a_sibling_that_is_not_there_comes_with_its_install_line(find, name, package):
    code = f"""
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith("cosmos_rl_{package}") else find(name, *rest)
from cosmos_rl_core import plugins
try:
    plugins.load("any", {find!r})({name!r})
except ValueError as error:
    print(error)
"""
    assert run_bare(code).endswith(f" {name!r} is not installed: {pip_install(f'cosmos-rl-{package}')}")


@pytest.mark.parametrize(("typo", "meant"), [("gpro", "grpo"), ("gsop", "gspo"), ("grop", "grpo"), ("dapoo", "dapo")])
def test_swapped_letters_suggest_the_word_of_the_same_letters(typo, meant):
    known = ["aipo", "cispo", "dapo", "dr_grpo", "grpo", "gspo", "ppo"]
    assert closest(typo, known) == meant
    assert closest(typo, known[::-1]) == meant
