"""Each package, installed from its wheel into an environment of its own, passes its tests outside this workspace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = str(Path(sys.executable).with_name("uv"))
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
ABSENT = {
    "cosmos-rl-core": ("transformers", "cosmos_rl_transfer", "cosmos_rl_llm", "vllm"),
    "cosmos-rl-transfer": ("transformers", "cosmos_rl_llm", "vllm"),
    "cosmos-rl-llm": ("datasets", "vllm", "trl"),
    "cosmos-rl-vla": (
        *("peft", "boto3", "torchvision", "mujoco", "metaworld", "mani_skill", "libero", "robosuite", "lerobot"),
        *("cosmos_rl_llm", "cosmos_rl_wfm", "vllm"),
    ),
    "cosmos-rl-wfm": ("peft", "boto3", "torchvision", "webdataset", "cosmos_rl_llm", "vllm"),
}
"""What an environment with only this package must not contain."""
PYTEST_INI = """\
[pytest]
addopts = --import-mode=importlib --strict-markers -p no:cacheprovider -m "not slow and not ci"
pythonpath = tests/support shared
timeout = 180
markers =
    ci: slower proofs
    cuda_dry: on a pretend CUDA device
    slow: longer than CI can afford
filterwarnings =
    error
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def sh(*command, cwd, timeout=1700):
    """Run a command that knows nothing of this workspace; return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment |= {"OMP_NUM_THREADS": "1", "UV_NO_PROGRESS": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def torch_source():
    """Where torch comes from, as scripts/bootstrap decides it: uv does not read pip's configuration."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    configured = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()
    if configured:
        return [part for link in configured for part in ("--find-links", link)]
    return [] if shutil.which("nvidia-smi") else ["--torch-backend", "cpu"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dist")
    sh(UV, "build", "--all-packages", "--wheel", "--no-sources", "--out-dir", directory, cwd=ROOT)
    return directory


@pytest.mark.parametrize("package", sorted(ABSENT))
def test_a_package_alone_passes_its_tests(package, dist, tmp_path):
    python = tmp_path / "venv/bin/python"
    sh(UV, "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    wanted = [package, "torch==2.13.*", *TEST_TOOLS]
    sh(UV, "pip", "install", "--python", python, "--find-links", dist, *torch_source(), *wanted, cwd=tmp_path)
    find = "import sys; from importlib.util import find_spec; print([n for n in sys.argv[1:] if find_spec(n)])"
    assert sh(python, "-c", find, *ABSENT[package], cwd=tmp_path).strip() == "[]"
    shutil.copytree(ROOT / "packages" / package / "tests", tmp_path / "tests")
    shutil.copytree(ROOT / "tests/shared", tmp_path / "shared")
    shutil.copy(ROOT / "conftest.py", tmp_path)  # the profiles of Hypothesis
    shutil.copy(ROOT / "packages" / package / "README.md", tmp_path)  # whose example is tested
    (tmp_path / "pytest.ini").write_text(PYTEST_INI)
    sh(python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "tests", cwd=tmp_path)


def test_sinks_that_want_older_packages_than_the_workspace_pass_their_tests(dist, tmp_path):
    """trackio wants Pillow 12, mlflow older ones of others, and rerun-sdk is large: none is in the group `dev`."""
    python = tmp_path / "venv/bin/python"
    sh(UV, "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    wanted = ["cosmos-rl-core[rerun,tensorboard]", "cosmos-rl-vla", "torch==2.13.*", "mlflow", "trackio", *TEST_TOOLS]
    sh(UV, "pip", "install", "--python", python, "--find-links", dist, *torch_source(), *wanted, cwd=tmp_path)
    (tmp_path / "pytest.ini").write_text(PYTEST_INI)
    shutil.copytree(ROOT / "tests/shared", tmp_path / "shared")
    theirs = ("-W", "ignore::DeprecationWarning", "--timeout", "900")  # of SQLAlchemy in mlflow, which makes its tables
    for package, tests, chosen in (
        ("cosmos-rl-core", "test_sinks.py", "mlflow or trackio"),
        ("cosmos-rl-vla", "test_vla_episodes.py", "recording"),
    ):
        shutil.copytree(ROOT / "packages" / package / "tests", tmp_path / "tests", dirs_exist_ok=True)
        said = sh(python, "-m", "pytest", "-q", *theirs, f"tests/{tests}", "-k", chosen, cwd=tmp_path)
        assert " passed" in said and "skipped" not in said, said
