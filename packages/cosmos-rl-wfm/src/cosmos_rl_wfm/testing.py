"""Small parts for tests and demos: a model of pixels that is made in a moment, and prompts for it."""

from __future__ import annotations

from typing import Any

from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.models.config import WFMModelConfig

NETWORK: dict[str, Any] = {
    "patch_size": [2, 4, 4],
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 3,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 1,
}
"""A WanTransformer3DModel of pixels."""


def pixel_model(**keys: Any) -> WFMModelConfig:
    """Return the [model] section of a network of pixels that reads words."""
    given = {"family": "wan", "codec": "pixels", "network": NETWORK, "text": {"encoder": "words", "length": 4}}
    return WFMModelConfig.model_validate(given | keys)


def mock_data(**keys: Any) -> WFMDataConfig:
    """Return a [data] section of mock clips of 4 frames of 8 x 8."""
    given = {"kind": "mock", "size": {"frames": 4, "height": 8, "width": 8}, "mock": {"rows": 6}}
    return WFMDataConfig.model_validate(given | keys)


def prompt(sample_id: int = 0, caption: str = "a square moving left") -> Prompt:
    """Return a prompt with nothing but a caption."""
    return Prompt(sample_id=sample_id, row={"caption": caption}, origin=f"test:{sample_id}")
