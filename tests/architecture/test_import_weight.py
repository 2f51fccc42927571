"""What the controller process imports stays light, and free of torch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "packages" / "cosmos-rl-core" / "src"
CONTROLLER = (
    "types.py",
    "interfaces.py",
    "plugins.py",
    "assemble.py",
    "recipe",
    "settings",
    "wire",
    "control",
    "observe",
    "launch",
)
"""What the controller process may import, files and folders of core."""
ALSO = ("data/source.py", "rollout/staleness.py", "algorithms/config.py", "algorithms/table.py")


def loaded_after(code: str) -> set[str]:
    """Top-level packages in sys.modules after running `code` in a new interpreter."""
    report = "\nimport sys\nprint('LOADED', *{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def module_names(*places: str) -> list[str]:
    core = SOURCE / "cosmos_rl_core"
    files = [
        file for place in places for file in ([core / place] if place.endswith(".py") else (core / place).rglob("*.py"))
    ]
    dotted = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in sorted(files)]
    return [name.removesuffix(".__init__") for name in dotted]


def test_core_alone_loads_nothing_heavy():
    assert not loaded_after("import cosmos_rl_core") & {"torch", "numpy", "pydantic", "transformers"}


@pytest.mark.parametrize("package", ["transfer", "llm", "vla", "wfm"])
def test_a_package_loads_nothing_heavy_before_a_name_is_used(package):
    found = loaded_after(f"import cosmos_rl_{package}; dir(cosmos_rl_{package})")
    assert not found & {"torch", "numpy", "pydantic", "transformers", "diffusers"}


def test_core_alone_is_imported_quickly():
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import cosmos_rl_core"], check=True, timeout=60)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 1.0


def test_help_loads_nothing_heavy():
    code = """
from cosmos_rl_core.cli.app import main
try:
    main(["--help"])
except SystemExit as ended:
    assert not ended.code
"""
    assert not loaded_after(code) & {"torch", "numpy", "pydantic", "transformers", "cosmos_rl_llm"}


@pytest.mark.parametrize("places", [CONTROLLER, ALSO], ids=["controller", "also"])
def test_the_controller_loads_no_torch(places):
    code = "\n".join(f"import {name}" for name in module_names(*places))
    assert not loaded_after(code) & {"torch", "transformers"}


@pytest.mark.parametrize("domain", ["llm", "vla", "wfm"])
def test_a_domain_is_found_without_torch_and_tables(domain):
    """Each worker imports it; rich takes a tenth of a second."""
    code = f"from cosmos_rl_core.recipe.load import load_domain\nload_domain({domain!r})"
    assert not loaded_after(code) & {"torch", "transformers", "diffusers", "rich"}
