"""Plug-ins: found by entry point or written as "module:attribute", imported only when requested by name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from contextvars import ContextVar
from importlib import metadata
from typing import Any

from cosmos_rl_core.errors import UserError, closest
from cosmos_rl_core.imports import add_folders, pip_install

_SHIPPED: dict[str, dict[str, str]] = {
    "cosmos_rl.domains": {
        "llm": "cosmos_rl_llm.domain:LLM",
        "vla": "cosmos_rl_vla.domain:VLA",
        "wfm": "cosmos_rl_wfm.domain:WFM",
    },
    "cosmos_rl.weight_sync": {"transfer": "cosmos_rl_transfer.backend:TransferSync"},
    "cosmos_rl.transports": {
        "shm": "cosmos_rl_transfer.transports.shm:SharedMemory",
        "tcp": "cosmos_rl_transfer.transports.tcp:Tcp",
        "nixl": "cosmos_rl_transfer.transports.nixl:Nixl",
        "collective": "cosmos_rl_transfer.transports.collective:Collective",
        "cuda_ipc": "cosmos_rl_transfer.transports.cuda_ipc:CudaIpc",
        "nixl_vram": "cosmos_rl_transfer.transports.nixl_vram:NixlVram",
    },
    "cosmos_rl.environments": {
        "gymnasium_text": "cosmos_rl_llm.environments.gymnasium_text:GymnasiumText",
        "openenv": "cosmos_rl_llm.environments.openenv:OpenEnv",
        "reasoning_gym": "cosmos_rl_llm.environments.reasoning_gym:ReasoningGym",
        "textarena": "cosmos_rl_llm.environments.textarena:TextArena",
        "tools": "cosmos_rl_llm.tools.environment:ToolEnvironment",
        "verifiers": "cosmos_rl_llm.environments.verifiers:Verifiers",
    },
    "cosmos_rl.rewards": {
        "environment": "cosmos_rl_core.episodes.rewards:EnvironmentReward",
        "remote": "cosmos_rl_core.reward.remote:RemoteReward",
    },
    "cosmos_rl.launchers": {
        "kubernetes": "cosmos_rl_core.ops.clusters.kubernetes:Kubernetes",
        "local": "cosmos_rl_core.ops.clusters.local:Local",
        "ray": "cosmos_rl_core.ops.clusters.ray:Ray",
        "slurm": "cosmos_rl_core.ops.clusters.slurm:Slurm",
    },
    "cosmos_rl.commands": {
        "dashboard": "cosmos_rl_core.ops.commands:dashboard",
        "doctor": "cosmos_rl_core.ops.commands:doctor",
        "launch": "cosmos_rl_core.ops.commands:launch",
        "migrate": "cosmos_rl_core.ops.commands:migrate",
        "node": "cosmos_rl_core.ops.commands:node",
        "reward-server": "cosmos_rl_core.ops.commands:reward_server",
        "scale": "cosmos_rl_core.ops.commands:scale",
        "serve-policy": "cosmos_rl_vla.serving.command:serve_policy",
        "status": "cosmos_rl_core.ops.commands:status",
        "stop": "cosmos_rl_core.ops.commands:stop",
    },
    "cosmos_rl.migrations": {
        "llm": "cosmos_rl_llm.migrate:migrate",
        "predict": "cosmos_rl_wfm.migrate:migrate_predict",
        "vla": "cosmos_rl_vla.migrate:migrate",
        "wfm": "cosmos_rl_wfm.migrate:migrate",
    },
    "cosmos_rl.doctors": {
        "hub": "cosmos_rl_llm.hub:checks",
        "sandbox": "cosmos_rl_llm.sandbox.sandbox:checks",
        "simulators": "cosmos_rl_vla.sims.doctor:checks",
        "transports": "cosmos_rl_transfer.doctor:checks",
    },
    "cosmos_rl.algorithms": {
        "ddrl": "cosmos_rl_wfm.objectives.table:DDRL",
        "flow_grpo": "cosmos_rl_wfm.objectives.table:FLOW_GRPO",
        "nft": "cosmos_rl_wfm.objectives.table:NFT",
    },
    "cosmos_rl.simulators": {
        "behavior": "cosmos_rl_vla.sims.behavior:Behavior",
        "gymnasium": "cosmos_rl_vla.sims.gymnasium:Gymnasium",
        "libero": "cosmos_rl_vla.sims.libero:Libero",
        "maniskill": "cosmos_rl_vla.sims.maniskill:ManiSkill",
        "maniskill_batch": "cosmos_rl_vla.sims.maniskill:ManiSkillBatch",
        "metaworld": "cosmos_rl_vla.sims.metaworld:MetaWorld",
        "reach": "cosmos_rl_vla.sims.reach:Reach",
        "robotwin": "cosmos_rl_vla.sims.robotwin:RoboTwin",
    },
}
"""Plug-ins of the five packages as their entry points name them, by group and name: a package that is importable from
source without an installation has no entry points, and one that is missing needs its `pip install` line."""

GROUPS = (
    "cosmos_rl.domains",
    "cosmos_rl.weight_sync",
    "cosmos_rl.engines",
    "cosmos_rl.transports",
    "cosmos_rl.environments",
    "cosmos_rl.rewards",
    "cosmos_rl.algorithms",
    "cosmos_rl.simulators",
    "cosmos_rl.launchers",
    "cosmos_rl.commands",
    "cosmos_rl.doctors",
    "cosmos_rl.migrations",
)
"""The entry point groups for plug-ins of packages."""

_importing: ContextVar[str] = ContextVar("_importing", default="")


def names(group: str) -> list[str]:
    """Return the names that `load` accepts in a group, sorted. Imports nothing."""
    return sorted(_targets(group))


def locate(group: str, name: str, *, beside: Sequence[str] = ()) -> str:
    """Return a plug-in's target, as "module:attribute". Imports nothing.

    Raises UserError for a name that no package offers, with the known names (those of the group and `beside`) and the
    line that installs it.
    """
    where = name if ":" in name else _targets(group).get(name)
    if where is None:
        raise UserError(_unknown(group, name, beside))
    return where


def load(group: str, name: str) -> Any:
    """Import the plug-in called `name` in an entry point group, or written as "module:attribute".

    Raises UserError as `locate` does, and for a plug-in that cannot be imported, with the cause.
    """
    return _resolve(locate(group, name), kind=_kind(group), name=name)


def attribute(name: str, *, kind: str) -> Any:
    """Import an attribute by its "module:attribute"; messages call it `kind`. Raises UserError as `load`."""
    return _resolve(name, kind=kind, name=name)


def importing() -> str:
    """Return the name of the module that is being imported for a plug-in; empty without one."""
    return _importing.get()


def _targets(group: str) -> dict[str, str]:
    """Plug-ins by name: entry points first, then those of our packages that are importable without an installation."""
    targets: dict[str, str] = {}
    for point in metadata.entry_points(group=group):
        other = targets.setdefault(point.name, point.value)
        if other != point.value:
            raise UserError(
                f"two installed packages offer {point.name!r} in {group}: {other} and {point.value}; "
                f"uninstall one, or write the one you mean as module:attribute"
            )
    for name, target in _SHIPPED.get(group, {}).items():
        if name not in targets and importlib.util.find_spec(_package(target)) is not None:
            targets[name] = target
    return targets


def _package(target: str) -> str:
    return target.partition(".")[0]


def _distribution(target: str) -> str:
    return _package(target).replace("_", "-")


def _unknown(group: str, name: str, beside: Sequence[str]) -> str:
    kind = _kind(group)
    shipped = _SHIPPED.get(group, {}).get(name)
    if shipped is not None:
        return f"{kind} {name!r} is not installed: {pip_install(_distribution(shipped))}"
    known = sorted({*names(group), *beside})
    near = closest(name, known)
    heading = f"; did you mean {near!r}? Known: " if near else "; known: "
    installable = [
        f"{other} ({pip_install(_distribution(shipped))})"
        for other, shipped in sorted(_SHIPPED.get(group, {}).items())
        if other not in known
    ]
    more = f"; can be installed: {', '.join(installable)}" if installable else ""
    listed = ", ".join(known) or "none"
    return f"no {kind} is called {name!r}{heading}{listed}{more}; one of your own is module:attribute"


def _kind(group: str) -> str:
    return group.rpartition(".")[2].removesuffix("s")


def _resolve(where: str, *, kind: str, name: str) -> Any:
    module_name, _, path = where.partition(":")
    if not module_name or not path:
        raise UserError(f"{kind} {name!r} must be written as module:attribute, such as my_module:my_function")
    add_folders()
    outer = _importing.set(module_name)
    try:
        value = importlib.import_module(module_name)
    except Exception as cause:  # importing runs the plug-in's own code, which may raise anything
        raise UserError(f"{kind} {name!r} ({where}) cannot be imported: {type(cause).__name__}: {cause}") from cause
    finally:
        _importing.reset(outer)
    file = vars(value).get("__file__") or "built in"
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as cause:
            raise UserError(f"{kind} {name!r}: {module_name} ({file}) has no attribute {path!r}") from cause
    return value
