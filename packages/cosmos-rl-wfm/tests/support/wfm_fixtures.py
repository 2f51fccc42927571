"""Small parts for tests and demos: recipes of seconds, models that are made in a moment, and what goes into them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.models.base import ClipSize
from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.config import FamilyName, WFMModelConfig
from cosmos_rl_wfm.models.model import DiffusersModel
from cosmos_rl_wfm.models.networks.tiny import tiny_network, tiny_vae
from cosmos_rl_wfm.models.weights import random_network

if TYPE_CHECKING:
    from diffusers import WanPipeline
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FAMILIES: tuple[FamilyName, ...] = ("wan", "cosmos", "sd3", "sana", "sana_video")
"""Those that `tiny_model` makes."""
NETWORK: Mapping[str, Any] = {
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
VOCABULARY = ("<pad>", "</s>", "<unk>", "a", "red", "square", "moves", "two", "discs", "cross", "&", "draw", ":")
"""Words that `tiny_tokenizer` knows."""


# -- sections of recipes


def pixel_model(**keys: Any) -> WFMModelConfig:
    """Return the [model] section of a network of pixels that reads words."""
    given = {"family": "wan", "codec": "pixels", "network": NETWORK, "text": {"encoder": "words", "length": 4}}
    return WFMModelConfig.model_validate(given | keys)


def mock_data(**keys: Any) -> WFMDataConfig:
    """Return a [data] section of mock clips of 4 frames of 8 x 8."""
    given = {"kind": "mock", "size": {"frames": 4, "height": 8, "width": 8}, "mock": {"rows": 6}}
    return WFMDataConfig.model_validate(given | keys)


def recipe(**sections: Any) -> dict[str, Any]:
    """Return a recipe of three steps in one process; each of `sections` stands for the one of its name."""
    return {
        "run": {"domain": "wfm", "placement": "inline", "max_steps": 3},
        "model": pixel_model().model_dump(mode="json", exclude_none=True),
        "data": mock_data().model_dump(mode="json", exclude_none=True),
        "algorithm": {"name": "flow_grpo"},
        "policy": {"prompts_per_step": 2, "microbatch_terms": 6, "optimizer": {"learning_rate": 1e-3}},
        "rollout": {"group_size": 3, "sampling": {"num_steps": 4, "window": "fixed", "steps": [0, 2]}},
        "reward": {"functions": [{"name": "brightness"}]},
        "sync": {"max_staleness": 0},
        "logging": {"sinks": ["jsonl"], "media_every": 0},
    } | sections


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- what is generated for, and what rewards look at


def prompt(sample_id: int = 0, caption: str = "a square moving left") -> Prompt:
    """Return a prompt with nothing but a caption."""
    return Prompt(sample_id=sample_id, row={"caption": caption}, origin=f"test:{sample_id}")


def shown(*videos: np.ndarray | None, **row: Any) -> RolloutGroup:
    """Return a group of rollouts that have a video uint8 [F, H, W, 3] each, or None, and nothing else."""
    rollouts = [
        Rollout(
            arrays={},
            rollout_logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            loss_mask=np.ones(1, bool),
            media={} if video is None else {"video": video},
        )
        for video in videos
    ]
    return RolloutGroup(prompt=Prompt(sample_id=0, row=row), rollouts=tuple(rollouts))


# -- models


def tiny_model(
    family: FamilyName = "wan", *, parameter_dtype: torch.dtype | None = None, **keys: Any
) -> DiffusersModel:
    """Return a tiny model with autoencoder and words for captions; `keys` are of [model]."""
    config = WFMModelConfig.model_validate({"family": family, "tiny": True, "text": {"encoder": "words"}} | keys)
    return build_model(config, parts=("network", "codec", "text"), seed=config.seed, parameter_dtype=parameter_dtype)


def image_to_video_model() -> DiffusersModel:
    """Return a tiny Wan that takes given frames by extra channels."""
    return tiny_model(network={**tiny_network("wan"), "in_channels": 36})


def size_of(model: DiffusersModel) -> ClipSize:
    """Return the size nearest to 5 frames of 32 x 32 that the model can take."""
    return model.grid.nearest(ClipSize(frames=5, height=32, width=32))


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator at its start."""
    return torch.Generator().manual_seed(seed)


def noise(model: DiffusersModel, count: int = 1, *, seed: int = 0) -> Tensor:
    """Return latents [count, C, f, h, w] of pure noise."""
    return torch.randn(count, *model.latent_shape(size_of(model)), generator=seeded(seed))


def clips(model: DiffusersModel, count: int = 1, *, seed: int = 0) -> Tensor:
    """Return random clips uint8 [count, F, H, W, 3]."""
    size = size_of(model)
    shape = (count, size.frames, size.height, size.width, 3)
    return torch.randint(0, 256, shape, generator=seeded(seed), dtype=torch.uint8)


# -- folders of diffusers


def tiny_tokenizer(*, length: int = 8) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words, which ends each caption with </s>; `length` is the most that it takes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    words.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


def tiny_t5(kind: Literal["T5EncoderModel", "UMT5EncoderModel"]) -> PreTrainedModel:
    """Return an encoder of `VOCABULARY` of width 32 with random weights, always the same."""
    import transformers

    config = getattr(transformers, kind.replace("EncoderModel", "Config"))
    sizes = {"d_model": 32, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": len(VOCABULARY)}
    with forked_rng(seed=0):
        return getattr(transformers, kind)(config(**sizes)).eval()


def save_pipeline(directory: Path, *, seed: int = 0) -> WanPipeline:
    """Let diffusers write a tiny pipeline of Wan, text encoder and all, into `directory`; return it."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    parts: dict[str, Any] = {
        "tokenizer": tiny_tokenizer(),
        "text_encoder": tiny_t5("UMT5EncoderModel"),
        "transformer": random_network("WanTransformer3DModel", tiny_network("wan"), dtype=torch.float32, seed=seed),
        "vae": random_network(*tiny_vae("wan"), dtype=torch.float32, seed=seed + 1),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    pipeline = WanPipeline(**parts)
    pipeline.save_pretrained(directory)
    return pipeline
