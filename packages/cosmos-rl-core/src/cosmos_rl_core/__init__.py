"""Controller, trainer, algorithms and interfaces of Cosmos-RL. Importing this does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosmos_rl_core.inference.evaluate import evaluate
    from cosmos_rl_core.inference.generate import generate
    from cosmos_rl_core.inference.request import Request
    from cosmos_rl_core.launch.result import RunResult
    from cosmos_rl_core.launch.run import run
    from cosmos_rl_core.recipe.load import load_config

__all__ = ["Request", "RunResult", "evaluate", "generate", "load_config", "run"]

_HOMES = {
    "Request": "cosmos_rl_core.inference.request",
    "RunResult": "cosmos_rl_core.launch.result",
    "evaluate": "cosmos_rl_core.inference.evaluate",
    "generate": "cosmos_rl_core.inference.generate",
    "load_config": "cosmos_rl_core.recipe.load",
    "run": "cosmos_rl_core.launch.run",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
