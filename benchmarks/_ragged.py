"""The workload of train_step.py and vlm_step.py: prompts in groups of eight with answers of ragged lengths.

It is the same for all sides. For vlm_step.py each prompt begins with a picture.

Imported in both environments, so it imports neither framework at module level.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import _ragged_pictures
import numpy as np
from _ragged_pictures import SIGNS, Picture

GROUP_SIZE = 8
NUM_GROUPS = 8
VOCABULARY = 32_000
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
Pictures = Literal["none", "group", "sample"]
"""Whether samples have no picture, one in common with their group, or each its own."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt with its answer."""

    prompt: list[int]
    """With the tokens of the picture."""
    answer: list[int]
    advantage: float
    picture: Picture | None = None


def samples(*, longest: int, pictures: Pictures = "none", seed: int = 0) -> list[Sample]:
    """Return 64 samples: prompts of 16 to 64 tokens, answers of log-normal length (median 48) up to `longest`.

    A picture adds 6 to 102 tokens to a prompt.
    """
    draw = np.random.default_rng(seed)
    words = VOCABULARY if pictures == "none" else VOCABULARY - len(SIGNS)
    made: list[Sample] = []
    for _ in range(NUM_GROUPS):
        prompt = draw.integers(1, words, draw.integers(16, 65)).tolist()
        lengths = np.clip(np.exp(draw.normal(np.log(48), 0.9, GROUP_SIZE)), 4, longest).astype(int)
        advantages = draw.normal(size=GROUP_SIZE)
        shown = [_ragged_pictures.picture(draw) for _ in range({"none": 0, "group": 1, "sample": GROUP_SIZE}[pictures])]
        made += [
            Sample(
                prompt=prompt if not shown else [*_placeholders(shown[place % len(shown)]), *prompt],
                answer=draw.integers(1, words, n).tolist(),
                advantage=float(a),
                picture=shown[place % len(shown)] if shown else None,
            )
            for place, (n, a) in enumerate(zip(lengths, advantages))
        ]
    return made


def _placeholders(picture: Picture) -> list[int]:
    """The tokens of a picture in a prompt."""
    start, end, image, _ = range(VOCABULARY - len(SIGNS), VOCABULARY)
    return [start, *[image] * picture.num_tokens, end]


def num_tokens(work: list[Sample]) -> int:
    """Prompt and answer tokens of a step, without padding."""
    return sum(len(s.prompt) + len(s.answer) for s in work)


def write_model(directory: Path) -> None:
    """Save a Qwen3 of 11 million random parameters, most of them in its vocabulary, and a tokenizer of numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    numbers = {str(number): number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1, **numbers}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(directory)


class StepFile:
    """One JSON line per finished step: seconds, loss, pictures in the tower, and the process's peak memory so far."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def write(self, *, step_s: float, loss: float, pictures: int = 0) -> None:
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        line = {"step_s": step_s, "loss": loss, "pictures": pictures, "peak_bytes": peak}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
