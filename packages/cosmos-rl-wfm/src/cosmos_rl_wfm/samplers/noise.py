"""Noise that depends only on a sample's seed, not on the batch or on other noise sampled."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


def sample_noise(
    seeds: Sequence[int], shape: Sequence[int], *, stream: str = "start", device: torch.device | None = None
) -> Tensor:
    """Sample standard normal noise float32 [B, *shape], one sample per seed.

    `stream` names its purpose, such as "start" or "step 3": streams of one seed are independent. Sampled on the CPU, so
    that it is the same on every device. A group with shared start noise passes one seed for it, and many for its steps.
    """
    noise = [torch.randn(*shape, generator=_generator(seed, stream)) for seed in seeds]
    return torch.stack(noise).to(device) if noise else torch.empty(0, *shape, device=device)


def _generator(seed: int, stream: str) -> torch.Generator:
    digest = blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
