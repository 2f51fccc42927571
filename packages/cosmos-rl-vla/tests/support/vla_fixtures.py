"""What tests of several files make."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.config import CriticSection as Critic
from cosmos_rl_vla.models.checkpoint import empty, fill, weight_files
from cosmos_rl_vla.models.pi.config import GemmaSize, PiConfig, VisionSize
from cosmos_rl_vla.models.pi.family import read_config
from cosmos_rl_vla.models.pi.model import PiModel
from cosmos_rl_vla.sims.pool.messages import ChunkResult
from cosmos_rl_vla.sims.pool.worker import run_chunks
from cosmos_rl_vla.sims.rendering import choose_gl


def small_pi(**changes: Any) -> PiConfig:
    """Return a pi0.5 of a few thousand parameters whose sizes all differ, with other choices where asked for."""
    size = GemmaSize(width=32, depth=2, mlp=48, heads=2, kv_heads=1, head_dim=16)
    base = PiConfig(
        family="pi05",
        state="prefix",
        prompt="words",
        vocab_size=20,
        vision=VisionSize(image_size=16, patch_size=8, width=16, depth=1, mlp=32, heads=2),
        language=size,
        expert=replace(size, width=24, mlp=40),
        horizon=3,
        action_dim=2,
        model_horizon=4,
        model_action_dim=5,
        max_state_dim=6,
        num_steps=3,
        value=Critic(pool="mean", hidden=(16,)),
    )
    return replace(base, **changes)


def load_pi(directory: Path, *, config: PiConfig | None = None, seed: int = 0) -> tuple[PiModel, list[str]]:
    """Return the model of a directory and the names of heads that it lacks, initialised by `seed`.

    config: replaces the directory's own; may differ from `read_config` in noise, critic or action sizes.
    """
    model = empty(PiModel, config or read_config(directory), seed=seed)
    return model, fill(model, weight_files(directory))


def save_pi(model: PiModel, directory: Path) -> None:
    """Write config.json and model.safetensors, with the names of the public checkpoints."""
    model.config.save(directory)
    tensors = {
        model.names.public_name(name): tensor.detach().contiguous() for name, tensor in model.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def run_chunk(step: Any, actions: np.ndarray) -> ChunkResult:
    """Execute actions [H, D] in one slot. Raises the slot's SimulatorError."""
    (result,) = run_chunks(lambda _, first: [step(first[0])], [0], actions[None])
    if not isinstance(result, ChunkResult):
        raise result
    return result


def why_not_drawn(package: str) -> str:
    """Return why nothing can be drawn with a simulator's package here; "" where it can."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        choose_gl(dict(os.environ))
    except UserError as error:
        return str(error)
    return ""
