"""The models and data of both sides of wfm_step.py: networks of Wan's class, a text encoder, captions, sizes.

A model is written once, as a diffusers folder, so that both sides load the same weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.mock import mock_rows
from cosmos_rl_wfm.models.config import WFMModelConfig

TextName = Literal["words", "umt5"]

TEXT_LENGTH = 16
"""Tokens of a caption: to those of a clip about as in Wan2.1 at 240 x 416 (512 of 3,510)."""
NOISE_LEVEL = 0.7
KL_COEF = 0.04
CLIP = 1e-4
ADVANTAGE_CLIP = 5.0
LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A network with its codec and text encoder."""

    name: str
    network: dict[str, Any]
    """Of WanTransformer3DModel."""
    encoder: dict[str, Any]
    """Of a UMT5 with about four times the network's parameters, as Wan2.1 1.3B's."""
    size: dict[str, int]
    """Of a clip."""
    in_pixels: bool
    """Without an autoencoder; else the tiny one of the family."""

    @property
    def data(self) -> dict[str, Any]:
        """[data]."""
        return {"kind": "mock", "size": self.size, "mock": {"rows": 12}}

    @property
    def prompts(self) -> list[Prompt]:
        rows = mock_rows(WFMDataConfig.model_validate(self.data))
        return [Prompt(sample_id=i, row=row, origin=f"mock:{i}") for i, row in enumerate(rows)]

    def section(self, folder: Path, text: TextName) -> dict[str, Any]:
        """[model]."""
        encoder = {"encoder": "model" if text == "umt5" else "words", "length": TEXT_LENGTH}
        return {"path": str(folder), "codec": "pixels" if self.in_pixels else "vae", "text": encoder}

    def config(self, folder: Path, text: TextName) -> WFMModelConfig:
        return WFMModelConfig.model_validate(self.section(folder, text))


TINY = Model(
    name="tiny",
    network={
        "patch_size": [2, 4, 4],
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 1,
        "out_channels": 1,
        "text_dim": 128,
        "freq_dim": 32,
        "ffn_dim": 256,
        "num_layers": 3,
    },
    encoder={"d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4, "num_layers": 6},
    size={"frames": 8, "height": 16, "width": 16},
    in_pixels=True,
)
"""0.25 million parameters, 64 tokens of grey pixels 1 x 8 x 16 x 16."""
SMALL = Model(
    name="small",
    network={
        "patch_size": [1, 2, 2],
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 256,
        "freq_dim": 64,
        "ffn_dim": 512,
        "num_layers": 6,
    },
    encoder={"d_model": 256, "d_ff": 768, "d_kv": 64, "num_heads": 4, "num_layers": 9},
    size={"frames": 9, "height": 64, "width": 64},
    in_pixels=False,
)
"""1.8 million parameters, 48 tokens of latents 16 x 3 x 8 x 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A training step: the same rollouts, trained steps and update on both sides."""

    num_prompts: int = 4
    group_size: int = 8
    num_steps: int = 10
    """Denoising steps."""
    trained: tuple[int, ...] = tuple(range(9))
    """Those that draw noise and are trained; by default all but the last."""
    batch: int = 8
    """Samples in a forward pass of the plain loop; 8 in flow_grpo's recipe for Wan2.1."""
    terms: int = 32
    """Samples, or trained steps of any samples, in one of ours."""

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.group_size


def write_model(model: Model, root: Path, *, seed: int = 0) -> Path:
    """Write the model's folder, unless it is there, and return it."""
    folder = root / model.name
    if (folder / "model_index.json").is_file():
        return folder
    import torch
    from transformers import UMT5Config, UMT5EncoderModel

    from cosmos_rl_wfm.models.networks.tiny import tiny_vae
    from cosmos_rl_wfm.models.weights import random_network

    network = random_network("WanTransformer3DModel", model.network, dtype=torch.float32, seed=seed)
    network.save_pretrained(folder / "transformer")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    if not model.in_pixels:
        kind, values = tiny_vae("wan")
        random_network(kind, values, dtype=torch.float32, seed=seed).save_pretrained(folder / "vae")
        index["vae"] = ["diffusers", kind]
    tokenizer = _tokenizer(model)
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(seed)
    encoder = UMT5EncoderModel(UMT5Config(**model.encoder, vocab_size=len(tokenizer)))
    encoder.save_pretrained(folder / "text_encoder")
    index |= {
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _tokenizer(model: Model) -> Any:
    """A tokenizer with the captions' words as vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for prompt in model.prompts for word in prompt.row["caption"].split()})
    known = ["<pad>", "</s>", "<unk>", *words]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
