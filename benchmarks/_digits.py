"""The workload of llm_vs_trl.py, with the same files and reward for both sides: answer "a+b=" with digits.

Imported in both environments, so it imports neither framework at module level.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cosmos_rl_core.types import RolloutGroup

CHARACTERS = string.digits + string.ascii_lowercase + "+-*/="
SPECIAL = ("<pad>", "<eos>", "<unk>")
NUM_PROMPTS = 512
GROUP_SIZE = 8
MAX_TOKENS = 16


def digit_fraction(text: str) -> float:
    """Return the share of digits among the characters, 0 for an empty text."""
    return sum(character in string.digits for character in text) / max(1, len(text))


def digits(group: RolloutGroup) -> list[float]:
    """The reward as this framework calls it."""
    return [digit_fraction(rollout.text) for rollout in group.rollouts]


def trl_digits(completions: Iterable[str], **_: object) -> list[float]:
    """The reward as TRL calls it."""
    return [digit_fraction(completion) for completion in completions]


def write_prompts(path: Path) -> None:
    """Write 512 sums of two numbers below 100, one {"prompt": "a+b="} a line."""
    draw = random.Random(0)
    rows = [{"prompt": f"{draw.randrange(100)}+{draw.randrange(100)}="} for _ in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_prompts(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_model(directory: Path) -> None:
    """Save a Qwen3 of 0.8 million random parameters and a tokenizer of 44 single characters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
