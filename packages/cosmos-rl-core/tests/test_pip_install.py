"""The command that installs a missing package, from where this one came."""

import json
import shutil
import subprocess
import sys

import pytest

from cosmos_rl_core import imports

VLLM = "cosmos-rl-llm[vllm]"
FOLDERS = ("{root}/packages/cosmos-rl-core", "{root}/packages/cosmos-rl-transfer", "{root}/packages/cosmos-rl-llm")


def command(root, *requirements, url=None, is_clone=True, is_editable=False, has_pip=True, prefix=None):
    """Return the command that a copy of the module prints, without anything that is installed here.

    url: of the folder or wheel that pip installed, as it records it. prefix: folder of the environment.
    """
    site, source = root / "site", root / "packages/cosmos-rl-core/src"
    record = site / "cosmos_rl_core-0.1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: cosmos-rl-core\nVersion: 0.1.0\n")
    if url:
        (record / "direct_url.json").write_text(json.dumps({"url": url.format(root=root)}))
    if has_pip:
        (site / "pip-25.0.dist-info").mkdir()
        (site / "pip-25.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: pip\nVersion: 25.0\n")
    if is_clone:
        source.mkdir(parents=True)
        (source.parent / "pyproject.toml").touch()
    home = source if is_editable else site
    (home / "cosmos_rl_core").mkdir(parents=True)
    (home / "cosmos_rl_core/__init__.py").touch()
    shutil.copy(imports.__file__, home / "cosmos_rl_core")
    code = f"""
import sys
sys.path[:0] = {[str(site), str(source)]!r}
if {prefix!r}:
    sys.prefix, sys.executable = {prefix!r}, {prefix!r} + "/bin/python"
from cosmos_rl_core.imports import pip_install
print(pip_install(*{requirements!r}))
"""
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("requirement", "paths"),
    [
        (VLLM, [*FOLDERS[:2], f"'{FOLDERS[2]}[vllm]'"]),
        ("cosmos-rl-transfer[nixl]", [FOLDERS[0], f"'{FOLDERS[1]}[nixl]'"]),
        ("cosmos-rl-core[tls]", [f"'{FOLDERS[0]}[tls]'"]),
        ("cosmos-rl-core", [FOLDERS[0]]),
    ],
)
@pytest.mark.parametrize("is_editable", [False, True])
def test_from_a_clone_a_package_comes_with_those_that_it_requires(tmp_path, requirement, paths, is_editable):
    url = None if is_editable else "file://{root}/packages/cosmos-rl-core"
    arguments = [f"-e {path}" if is_editable else path for path in paths]
    line = command(tmp_path, requirement, url=url, is_editable=is_editable)
    assert line == " ".join(["pip install", *arguments]).format(root=tmp_path)


def test_packages_of_several_versions_are_all_installed_again_from_a_clone(tmp_path):
    url = "file://{root}/packages/cosmos-rl-core"
    line = command(tmp_path, "cosmos-rl-core==0.2.0", "cosmos-rl-llm==0.2.0", url=url)
    assert line == " ".join(["pip install", *FOLDERS]).format(root=tmp_path)


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("file://{root}/wheels/cosmos_rl_core-0.1.0-py3-none-any.whl", "{root}/wheels"),
        (None, "dist"),  # pip does not record where --find-links found a wheel
        ("file://{root}/packages/cosmos-rl-core", "dist"),  # which was removed
        ("https://host.example/wheels/cosmos_rl_core-0.1.0-py3-none-any.whl", "dist"),
    ],
)
def test_without_a_clone_packages_come_from_wheels(tmp_path, url, folder):
    line = command(tmp_path, VLLM, url=url, is_clone=False)
    assert line == f"pip install --find-links {folder} 'cosmos-rl-llm[vllm]'".format(root=tmp_path)


def test_packages_of_an_index_come_from_there(tmp_path):
    line = command(tmp_path, "paddleocr", "nixl-cu12>=1.5.1", url="file://{root}/packages/cosmos-rl-core")
    assert line == "pip install paddleocr 'nixl-cu12>=1.5.1'"


@pytest.mark.parametrize(
    ("active", "has_pip", "line"),
    [
        ("/an env", True, "pip install trackio"),
        ("", True, "'/an env/bin/python' -m pip install trackio"),
        ("", False, "uv pip install --python '/an env/bin/python' trackio"),
    ],
)
def test_the_command_installs_into_this_environment(tmp_path, monkeypatch, active, has_pip, line):
    monkeypatch.setenv("VIRTUAL_ENV", active)
    assert command(tmp_path, "trackio", has_pip=has_pip, prefix="/an env") == line
