"""TRL's side of multi_turn.py: the tool loop of GRPOTrainer. Runs in TRL's own environment.

python _trl_tools.py FOLDER --threads 2

It trains a Qwen3 of 0.8 million parameters, of the shape in llm_vs_trl.py, until it knows eight chats by heart, in
which it reads three pages by a tool and then answers, writes it to FOLDER and prints a line. Then each line of the
standard input is the latency of the tool in seconds, and is answered by the seconds and the counts of one batch.

What is timed is `GRPOTrainer._generate` with `tools=[read_page]`: prompts from messages, transformers' generation,
calls from what was sampled, the tool, the next turn. Rewards and log-probabilities are not. The template is TRL's copy
of Qwen3-Instruct-2507's, whose calls TRL parses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

BOOKS = "abcdefgh"
PAGES = 3
TURNS = PAGES + 1
GROUP_SIZE = 8
MAX_TOKENS = 256
_WARM_UP_STEPS, _LEARNING_RATE = 150, 3e-3
_SHARPER = 16.0
"""Factor of the logits after the warm-up, so that sampling at temperature 1 takes the token known by heart."""


class Library:
    """Holds the pages."""

    latency_s = 0.0


async def read_page(book: str, page: int) -> str:
    """Read a page of a book.

    Args:
        book: The letter of the book.
        page: The number of the page.
    """
    await asyncio.sleep(Library.latency_s)
    return f"page {page} of {book}"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch of episodes."""

    seconds: float
    cpu_s: float
    """Of the process."""
    episodes: int
    turns: int
    tokens: int
    """Of all episodes, prompts and the tool's answers included."""
    sampled: int
    """Of them, those that the model sampled."""
    changed: int = 0
    """Of those, the ones that are others in what is trained on (TRL's side alone)."""


def asked(book: str) -> list[dict[str, Any]]:
    """Return the prompt of a book."""
    return [{"role": "user", "content": f"Read all of {book}."}]


def _chats() -> Iterator[list[dict[str, Any]]]:
    """Yield the chats that the model knows by heart."""
    for book in BOOKS:
        messages = asked(book)
        for page in range(1, PAGES + 1):
            function = {"name": "read_page", "arguments": {"book": book, "page": page}}
            calls = [{"type": "function", "function": function}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "name": "read_page", "content": f"page {page} of {book}"})
        yield [*messages, {"role": "assistant", "content": f"{book} has {PAGES} pages."}]


def _write_tokenizer(folder: Path) -> Any:
    """Write and return a tokenizer whose words are those of the chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=qwen3_instruct_2507_chat_template)
    texts = [fast.apply_chat_template(chat, tools=[read_page], tokenize=False) for chat in _chats()]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=qwen3_instruct_2507_chat_template,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )
    fast.add_tokens(["<tool_call>", "</tool_call>"])  # as of Qwen3: decoded as text
    fast.save_pretrained(folder)
    return fast


def write_model(folder: Path) -> None:
    """Write the Qwen3 that knows the chats."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _write_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    texts = [tokenizer.apply_chat_template(chat, tools=[read_page], tokenize=False) for chat in _chats()]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=_WARM_UP_STEPS)
    for _ in range(_WARM_UP_STEPS):
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        model.model.norm.weight.mul_(_SHARPER)
    model.save_pretrained(folder)
    print(f"loss after {_WARM_UP_STEPS} steps: {loss.item():.4f}", flush=True)


def _trainer(folder: Path) -> Any:
    """Return a GRPOTrainer that times its rollouts and keeps what was sampled."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        took_s = cpu_s = 0.0
        drawn: list[list[list[int]]] = []  # noqa: RUF012  of each turn, the tokens of each episode that has it
        rollouts: tuple[Any, ...] = ()

        def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
            self.drawn = []
            began, cpu_began = time.perf_counter(), time.process_time()
            self.rollouts = super()._generate(prompts)
            self.took_s, self.cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
            return self.rollouts

        def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
            result = super()._generate_single_turn(*arguments, **keywords)
            self.drawn.append([list(ids) for ids in result[0]])
            return result

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=GROUP_SIZE * len(BOOKS),
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        beta=0.0,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    rows = [{"prompt": asked(book)} for book in BOOKS]
    return TimedTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        args=config,
        train_dataset=Dataset.from_list(rows),
        tools=[read_page],
    )


def _batch(trainer: Any) -> Batch:
    """Let TRL generate one batch: all prompts with the samples of each."""
    rows = [{"prompt": asked(book)} for book in BOOKS for _ in range(GROUP_SIZE)]
    trainer.model.train()
    trainer._generate_and_score_completions(rows)
    prompt_ids, completion_ids, tool_mask, completions, *_ = trainer.rollouts
    if any(len(turn) != len(rows) for turn in trainer.drawn):
        raise SystemExit(f"the episodes have other numbers of turns: {[len(turn) for turn in trainer.drawn]}")
    sampled = changed = 0
    for number, (ids, mask) in enumerate(zip(completion_ids, tool_mask, strict=True)):
        drawn = [token for turn in trainer.drawn for token in turn[number]]
        trained = [token for token, own in zip(ids, mask, strict=True) if own]
        sampled += len(drawn)
        changed += sum(a != b for a, b in zip_longest(drawn, trained))
    return Batch(
        seconds=trainer.took_s,
        cpu_s=trainer.cpu_s,
        episodes=len(rows),
        turns=sum(message["role"] == "assistant" for each in completions for message in each),
        tokens=sum(map(len, prompt_ids)) + sum(map(len, completion_ids)),
        sampled=sampled,
        changed=changed,
    )


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty one, for the model")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # of TRL's own messages
        write_model(given.folder)
        trainer = _trainer(given.folder)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            Library.latency_s = float(line)
            print(json.dumps(asdict(_batch(trainer))), file=answers, flush=True)


if __name__ == "__main__":
    main()
