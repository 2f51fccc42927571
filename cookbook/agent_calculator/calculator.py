"""The calculator, and what a tiny model needs before it can call it: tokenizer, chat template, chats to imitate."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | map(attribute='function.name') | join(' ') }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Calls as Qwen and Hermes write them. Of the tools it shows the names alone: a model of this size reads no schema."""
TOOLS = [{"type": "function", "function": {"name": "multiply"}}]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def questions(seed: int = 0) -> list[tuple[int, int]]:
    """Return all pairs of numbers from 32 to 99, shuffled. Their products have four digits."""
    pairs = [(a, b) for a in range(32, 100) for b in range(32, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs


def chats(pairs: list[tuple[int, int]]) -> Iterator[dict]:
    """Yield chats to imitate: a third has no tool, a third has the tool and answers at once, a third calls it."""
    for number, (a, b) in enumerate(pairs):
        asked = {"role": "user", "content": f"{a}*{b}"}
        answer = {"role": "assistant", "content": str(a * b)}
        function = {"name": "multiply", "arguments": {"a": a, "b": b}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "content": str(a * b)}
        messages = [asked, call, result, answer] if number % 3 == 2 else [asked, answer]
        yield {"messages": messages, **({"tools": TOOLS} if number % 3 else {})}


def write_data(directory: Path, *, held_out: int = 200) -> None:
    """Write chats.jsonl, which a warm-up imitates, and train.jsonl and test.jsonl with questions and answers."""
    directory.mkdir(parents=True, exist_ok=True)
    pairs = questions()
    rows = [{"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs]
    files = {
        "test.jsonl": rows[:held_out],
        "train.jsonl": rows[held_out:],
        "chats.jsonl": list(chats(pairs[held_out:])),
    }
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / name).write_text(text, encoding="utf-8")


def write_model(directory: Path, *, seed: int = 0) -> Path:
    """Write a Qwen3 of two layers with random weights and a tokenizer that has a token for each digit."""
    for name in ("torchao", "torch.utils._pytree"):  # CUDA kernels that it cannot load here
        logging.getLogger(name).setLevel(logging.ERROR)
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # there is only one shard

    marks = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.decoder = decoders.Fuse()
    call = '\n{"name": "multiply", "arguments": {"a": 1, "b": 1}}\n'
    corpus = [call, "user\n", "assistant\n", "tool\n", "system\nmultiply", "*0123456789\n"] * 100
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=160, special_tokens=marks))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=fast.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
