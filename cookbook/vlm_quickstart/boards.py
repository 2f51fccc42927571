"""Pictures of coloured squares with questions about them, and a tiny Qwen3-VL with a tokenizer of their words.

board of 2 x 2 squares --> "colour of A2" --> "red"
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 215, 50),
    "purple": (155, 50, 180),
    "white": (235, 235, 235),
}
PLACES = ("A1", "B1", "A2", "B2")
"""Columns A and B, rows 1 and 2, row after row."""
SQUARE = 8
"""Sides of a square in pixels: one token of the model."""
ASKED = "as it is"
BLIND = "with a grey picture"
OTHER = "with another question"

SIGNS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
ROLES = ["<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %} {{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<eos>' if m.role == 'assistant' }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_boards(directory: Path, *, number: int, held_out: int, seed: int) -> tuple[Path, Path, Path]:
    """Write pictures, and rows that name them; return the files (train, validation, test).

    `number` rows to learn from, and `held_out` each for validation and for each way of asking in a test.
    """
    draw = random.Random(seed)
    pictures = directory / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    parts = {"train": (number, [ASKED]), "validation": (held_out, [ASKED]), "test": (held_out, [ASKED, BLIND, OTHER])}
    files = []
    for part, (count, ways) in parts.items():
        named = [(pictures / f"{part}_{way}_{i}.png", asked) for way, asked in enumerate(ways) for i in range(count)]
        rows = [_row(file, draw, asked=asked) for file, asked in named]
        files.append(directory / f"{part}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    train, validation, test = files
    return train, validation, test


def chance(test: Path) -> float:
    """Return the share of correct answers to the pictures of `test` if all get its most frequent answer."""
    rows = [json.loads(line) for line in test.read_text(encoding="utf-8").splitlines()]
    answers = Counter(row["answer"] for row in rows if row["asked"] == BLIND)
    return max(answers.values()) / answers.total()


def _row(file: Path, draw: random.Random, *, asked: str) -> dict[str, str]:
    """Draw a board, write its picture, and ask for the colour of a square."""
    colours = draw.sample(list(COLOURS), len(PLACES))
    (board(colours, draw) if asked != BLIND else _grey()).save(file)
    place, other = draw.sample(range(len(PLACES)), 2)
    question, answer = f"colour of {PLACES[other if asked == OTHER else place]}", colours[place]
    return {"prompt": question, "picture": file.name, "response": answer, "answer": answer, "asked": asked}


def board(colours: Sequence[str], draw: random.Random) -> Image.Image:
    """Return squares of these colours, row after row, each a little lighter or darker, with noise in every pixel."""
    noise = np.random.default_rng(draw.getrandbits(32))
    values = np.array([COLOURS[colour] for colour in colours]) * noise.uniform(0.75, 1.05, (len(colours), 1))
    pixels = values.reshape(2, 2, 3).repeat(SQUARE, 0).repeat(SQUARE, 1)
    return Image.fromarray(np.clip(pixels + noise.normal(0, 12, pixels.shape), 0, 255).astype(np.uint8))


def _grey() -> Image.Image:
    return Image.new("RGB", (2 * SQUARE, 2 * SQUARE), (128, 128, 128))


def write_model(directory: Path, *, seed: int) -> Path:
    """Write a Qwen3-VL with random weights, its tokenizer and its image processor's file; return the directory."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = _write_tokenizer(directory)
    signs = dict(zip(("vision_start", "vision_end", "image", "video"), SIGNS, strict=True))
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": SQUARE // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
        "initializer_range": 0.1,
    }
    text = {
        "vocab_size": len(ids),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "eos_token_id": ids["<eos>"],
        "pad_token_id": ids["<pad>"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    named = {f"{name}_token_id": ids[sign] for name, sign in signs.items()}
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower, **named))
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=1.5)  # so small a tower learns places from the start
    model.save_pretrained(directory)
    processing = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": SQUARE // 2,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": SQUARE**2, "longest_edge": 64 * SQUARE**2},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processing), encoding="utf-8")
    return directory


def _write_tokenizer(directory: Path) -> dict[str, int]:
    """Write a tokenizer of whole words with its chat template; return its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *SIGNS, *ROLES, *COLOURS, *PLACES, "colour", "of"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[*SIGNS, *ROLES],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return vocabulary
