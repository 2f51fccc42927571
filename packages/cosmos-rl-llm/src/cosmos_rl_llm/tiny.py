"""A generated tiny language model, tokenizer and problems, for examples and tests without a download.

model = write_tiny_model(directory / "base")
train, test = write_sums(directory / "data")
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from cosmos_rl_core.imports import quiet_torchao

CHARACTERS = "0123456789+="
"""The tokenizer's characters unless others are named, one token each, in addition to <pad>, <eos> and <unk>."""


def write_sums(directory: str | Path, *, below: int = 100, held_out: int = 200, seed: int = 0) -> tuple[Path, Path]:
    """Write all sums of two numbers below `below`, such as "47+38=", and return the files (train, test).

    Rows have the columns `prompt`, `answer` and, for supervised training, `response`.
    """
    numbers = range(below)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b)} for a in numbers for b in numbers]
    random.Random(seed).shuffle(rows)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    train, test = directory / "train.jsonl", directory / "test.jsonl"
    for path, part in ((test, rows[:held_out]), (train, rows[held_out:])):
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return train, test


def write_tiny_model(
    directory: str | Path,
    *,
    characters: str = CHARACTERS,
    num_layers: int = 4,
    hidden_size: int = 128,
    initializer_range: float = 0.02,
    seed: int = 0,
) -> Path:
    """Write a Qwen3 with random weights and a tokenizer of single characters; return the directory.

    Four layers of hidden size 128 make 0.8 million parameters. The context is 64 tokens. `hidden_size` is a multiple
    of 8.
    """
    quiet_torchao()
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # there is only one shard
    write_tokenizer(directory, characters)
    config = Qwen3Config(
        vocab_size=3 + len(characters),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=64,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return Path(directory)


def write_tokenizer(directory: str | Path, characters: str = CHARACTERS) -> None:
    """Write a tokenizer with one token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.clean_up_tokenization_spaces = False
    fast.save_pretrained(directory)
