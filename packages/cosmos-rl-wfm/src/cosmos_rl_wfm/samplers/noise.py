"""Noise that depends on a sample's own seed alone: not on the batch, nor on which other noise is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


def draw_noise(
    seeds: Sequence[int], shape: Sequence[int], *, stream: str = "start", device: torch.device | None = None
) -> Tensor:
    """Draw standard normal noise float32 [B, *shape], one sample a seed.

    `stream` names what it is for, such as "start" or "step 3": streams of one seed are independent. Drawn on the CPU,
    so that it is the same on every device. A group that shares its start passes one seed for it, many for its steps.
    """
    drawn = [torch.randn(*shape, generator=_generator(seed, stream)) for seed in seeds]
    return torch.stack(drawn).to(device) if drawn else torch.empty(0, *shape, device=device)


def _generator(seed: int, stream: str) -> torch.Generator:
    digest = blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
