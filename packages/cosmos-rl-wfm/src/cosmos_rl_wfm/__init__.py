"""World foundation models through diffusers on Cosmos-RL. The domain is `WFM`.

Called by core through `Domain`; imports core and transfer. `__all__` lists the public names. Importing this imports no
torch and no diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cosmos_rl_core.imports import lazy_exports

if TYPE_CHECKING:
    from cosmos_rl_wfm.data.video import read_clip
    from cosmos_rl_wfm.domain import WFM, WFMDomain
    from cosmos_rl_wfm.rewards.aesthetic_train import train_aesthetic
    from cosmos_rl_wfm.rewards.pixels import DIRECTIONS, brightness, direction, speed
    from cosmos_rl_wfm.rewards.pretrained import Pretrained
    from cosmos_rl_wfm.rewards.video import group_videos, luma, row_text, sample_frames

_HOMES = {
    "domain": ("WFM", "WFMDomain"),
    "data.video": ("read_clip",),
    "rewards.pixels": ("DIRECTIONS", "brightness", "direction", "speed"),
    "rewards.video": ("group_videos", "luma", "row_text", "sample_frames"),
    "rewards.pretrained": ("Pretrained",),
    "rewards.aesthetic_train": ("train_aesthetic",),
}
"""Public names by the module that defines them."""

__all__ = [
    "DIRECTIONS",
    "Pretrained",
    "WFM",
    "WFMDomain",
    "brightness",
    "direction",
    "group_videos",
    "luma",
    "read_clip",
    "row_text",
    "sample_frames",
    "speed",
    "train_aesthetic",
]

if not TYPE_CHECKING:  # a type checker uses the imports above, and so reports a misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
