"""Commands in the pages: verbs, options and files exist; recipes of the project accept their overrides."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec

import pytest
import typer
from pages import PAGES, ROOT, Block, blocks, name_of, prose

from cosmos_rl_core.cli.app import app
from cosmos_rl_core.cli.group import EXAMPLES
from cosmos_rl_core.recipe.load import load
from cosmos_rl_core.workers.node import Node, WorkerAddress

CLI = typer.main.get_command(app)
INLINE = re.compile(r"`((?:\.venv/bin/)?(?:cosmos-rl|make|python -m cosmos\w+)(?: [^`]+)?)`")
STARTS = re.compile(r"^\s*(?:\$ )?((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:cosmos-rl|make|python|scripts/\w+)\b.*)$")
FOLDERS = ("cookbook/", "scripts/", "packages/", "tests/", "docs/", "benchmarks/", "simulators/")


def lines_of(block: Block) -> Iterator[str]:
    """The commands of a block, each on one line."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if match := STARTS.match(line):
            yield match[1]


def commands() -> Iterator[tuple[str, str]]:
    """Where it is -> a command, as it stands."""
    for block in blocks("", "console"):
        yield from ((f"{block.page}:{number}", line) for number, line in enumerate(lines_of(block), start=block.line))
    for examples in EXAMPLES.values():
        yield from (("--help", f"cosmos-rl {line}") for line in examples)
    for page in PAGES:
        for match in INLINE.finditer(prose(page).replace("\n", " ")):
            yield name_of(page), match[1]


def words(command: str) -> list[str]:
    """The words of a command, without comment, environment and the environment's folder."""
    found = shlex.split(command.replace("|", " "), comments=True)
    while re.match(r"^[A-Z_]+=", found[0]):
        found = found[1:]
    return [found[0].removeprefix(".venv/bin/"), *found[1:]]


ALL = sorted(set(commands()))


def of_program(name: str) -> list:
    return [pytest.param(command, id=f"{place} {command[:60]}") for place, command in ALL if words(command)[0] == name]


def option_names(command) -> set[str]:
    if command.name == "worker":  # its options are the fields of two classes
        names = [one.metadata.get("flag", one.name) for one in (*fields(WorkerAddress), *fields(Node))]
        return {f"--{name.replace('_', '-')}" for name in names}
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("command", of_program("cosmos-rl"))
def test_verbs_and_options_exist(command):
    given = words(command)[1:]
    if not given or given[0].startswith("-"):
        assert set(given) <= option_names(CLI) | {"--help", "--install-completion"}
        return
    verb = CLI.commands.get(given[0])
    assert verb is not None, f"there is no verb {given[0]}"
    options = {word.split("=")[0].strip("[],()") for word in given[1:] if word.lstrip("[(").startswith("--")}
    assert options <= option_names(verb) | {"--help"}, f"options of {given[0]}: {sorted(option_names(verb))}"


@pytest.mark.parametrize("command", [each for each in of_program("cosmos-rl") if ".toml" in each.values[0]])
def test_overrides_are_keys_of_the_recipe(command):
    """Of a recipe of the project all together; of the reader's own each has to be a section and a key."""
    given = [word for word in words(command)[2:] if word not in ("...", "[...]")]
    overrides = [word for word in given if re.match(r"^[a-z_]+(\.\w+)+=", word)]
    recipes = [word for word in given if word.endswith(".toml") and (ROOT / word).exists()]
    if recipes:
        assert [str(each) for each in load(ROOT / recipes[0], overrides).problems] == []
        return
    keys = tuple(override.partition("=")[0] for override in overrides)
    of_domains = [load({"run": {"domain": name, "max_steps": 1}}, overrides).problems for name in ("llm", "vla", "wfm")]
    wrong = [[str(each) for each in found if each.key.startswith(keys)] for found in of_domains] if keys else [[]]
    assert [] in wrong


@pytest.mark.parametrize("command", of_program("make"))
def test_targets_exist(command):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in words(command)[1:]:
        if "=" not in target:
            assert re.search(rf"^{re.escape(target)}:", makefile, flags=re.MULTILINE), f"make has no {target}"


@pytest.mark.parametrize("command", of_program("python"))
def test_modules_scripts_and_their_options_exist(command):
    given = words(command)[1:]
    if given[0] == "-m":
        assert find_spec(given[1]) is not None
        return
    script = ROOT / given[0]
    if not given[0].startswith(FOLDERS):
        return
    source = script.read_text(encoding="utf-8")
    for option in (word.strip("[]") for word in given[1:] if word.lstrip("[").startswith("--")):
        assert f'"{option}"' in source, f"{given[0]} has no {option}"


@pytest.mark.parametrize("place, command", ALL)
def test_files_of_the_project_exist(place, command):
    for word in words(command):
        path = word.split("[")[0].split("::")[0]
        if path.removeprefix("./").startswith(FOLDERS) and "*" not in path:
            assert (ROOT / path).exists(), f"{place}: there is no {path}"
