"""Pictures of ragged sizes for the workload of _ragged.py, a Qwen3-VL that sees them, and a count of its tower's work.

Imported in both environments, so it imports neither framework at module level.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIGNS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE, FRAMES = 16, 2, 2


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture as the tower takes it."""

    patches: np.ndarray
    """[n, 3 x FRAMES x PATCH^2] float32."""
    grid: tuple[int, int, int]
    """Patches along time, height and width."""

    @property
    def num_tokens(self) -> int:
        return len(self.patches) // MERGE**2


def picture(draw: np.random.Generator) -> Picture:
    """Draw a picture of 64 to 320 pixels a side: 4 to 100 tokens."""
    height, width = (MERGE * int(side) for side in draw.integers(2, 11, 2))
    pixels = draw.normal(size=(height * width, 3 * FRAMES * PATCH**2)).astype(np.float32)
    return Picture(patches=pixels, grid=(1, height, width))


def write_model(directory: Path, *, vocabulary: int) -> None:
    """Save a Qwen3-VL of 17 million random parameters, a tokenizer of numbers, and the image processor's file.

    The last four tokens of the vocabulary are SIGNS.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    ids = {sign: vocabulary - len(SIGNS) + place for place, sign in enumerate(SIGNS)}
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
    }
    tower = {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "out_hidden_size": 256,
        "deepstack_visual_indexes": [1],
        "num_position_embeddings": 400,
    }
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    named = dict(zip(names, ids.values(), strict=True))
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **named)
    Qwen3VLForConditionalGeneration(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1, **ids}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(directory)
    processing = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE}
    processing |= {"temporal_patch_size": FRAMES, "size": {"shortest_edge": 64**2, "longest_edge": 320**2}}
    (directory / "preprocessor_config.json").write_text(json.dumps(processing))


def count_pictures(model: Any) -> Callable[[], int]:
    """Count the pictures that pass through a model's tower; the returned function gives their number since its last
    call."""
    seen: list[int] = []

    def note(_: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        seen.append(len(keywords["grid_thw"] if "grid_thw" in keywords else given[1]))

    model.base_model.visual.register_forward_pre_hook(note, with_kwargs=True)

    def taken() -> int:
        total = sum(seen)
        seen.clear()
        return total

    return taken
