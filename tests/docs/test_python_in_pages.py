"""Python in the pages runs. A block that cannot says why in a comment before it, and is counted."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from pages import blocks
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cosmos_rl_core import Options, Prompt, Rollout, RolloutGroup, check_reward, engine_options

PYTHON = blocks("python")
NOT_RUN = {"docs/wfm_rewards.md": 1, "docs/generate.md": 1, "docs/endpoint.md": 1, "docs/vla.md": 1}
"""Pages with blocks that no test runs, and their number."""
RUN_BY_PACKAGES = {f"packages/cosmos-rl-{name}/README.md" for name in ("core", "transfer", "llm", "vla", "wfm")}
"""Pages whose block a test of the package runs, in an environment with this package alone."""
TUTORIAL = "docs/ten_minutes.md"
"""test_ten_minutes.py runs it."""
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .?#+-="
RECIPE = """\
[run]
domain = "llm"
name = "{name}"
placement = "inline"
max_steps = 1

[model]
path = "model"

[data]
path = "train.jsonl"
chat_template = "none"
{columns}
answer_column = "answer"

[policy]
prompts_per_step = 1

[rollout]
group_size = 2

[rollout.sampling]
max_tokens = 4

[[reward.functions]]
name = "numeric"
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A directory as a reader has it: a tiny model, a few rows, and the recipes that the pages name."""
    directory = tmp_path_factory.mktemp("desk")
    words = ["<pad>", "<end>", "<unk>", *CHARACTERS]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<end>", pad_token="<pad>")
    tokenizer.save_pretrained(directory / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "eos_token_id": 1, "pad_token_id": 0}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), **sizes)).save_pretrained(directory / "model")
    rows = [{"prompt": f"{n} + 1?", "question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "my_run").mkdir()
    question = 'prompt_column = "question"'
    (directory / "gsm8k.toml").write_text(RECIPE.format(name="gsm8k", columns=question))
    (directory / "my_run/run.toml").write_text(RECIPE.format(name="my_run", columns=""))
    head = {"module.fc.weight": torch.zeros(2, 2)}
    torch.save(head, directory / "proprio_projector--150000_checkpoint.pt")
    return directory


def rollout(seed):
    """A rollout with all that rewards of the pages read."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    terms = np.zeros(2, np.float32)
    return Rollout(
        arrays={},
        rollout_logprobs=terms,
        versions=terms.astype(np.int32),
        loss_mask=np.ones(2, bool),
        text="4",
        media={"video": pixels, "image": pixels[0]},
    )


def group():
    row = {"answer": "4", "instruction": "reach", "caption": "a ball"}
    return RolloutGroup(prompt=Prompt(sample_id=0, row=row, origin="rows:1"), rollouts=(rollout(0), rollout(1)))


class MyOptions(Options):
    vocabulary: int = 8


class MyEngine:
    def __init__(self, path, options):
        self.vocabulary = options.vocabulary


GIVEN = {
    "docs/extending.md": {"engine_options": engine_options, "MyEngine": MyEngine, "MyOptions": MyOptions},
    "docs/reward_service.md": {
        "np": np,
        "score": lambda instruction, video: float(video.mean()),
        "load": lambda model: lambda images: images.mean((1, 2, 3)),
    },
    "docs/vla_data.md": {
        "video": np.zeros((3, 224, 224, 3), np.uint8),
        "states": np.zeros((3, 8), np.float32),
        "actions": np.zeros((3, 7), np.float32),
    },
}
"""Names of the reader's own."""
IN_PLACE = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "model",
    '"openai/gsm8k", "subset": "main"': '"train.jsonl", "chat_template": "none"',
    '"max_steps": 100': '"max_steps": 1, "placement": "inline"',
    '"max_tokens": 256': '"max_tokens": 4',
    "run.max_steps=10": "run.max_steps=1",
    '"my_run/run.toml", rewards': '"my_run/run.toml", overwrite=True, rewards',
    "episodes_per_task=40": "episodes_per_task=2",
    "looks_per_task=500": "looks_per_task=2",
}
"""What stands for models and data of hubs, and smaller numbers."""


def is_run(block):
    return not block.not_run and block.page not in {*RUN_BY_PACKAGES, TUTORIAL}


def test_blocks_that_no_test_runs_are_counted():
    assert Counter(block.page for block in PYTHON if block.not_run) == NOT_RUN
    assert {block.page for block in PYTHON} >= RUN_BY_PACKAGES


@pytest.mark.ci
@pytest.mark.parametrize("block", [block for block in PYTHON if is_run(block)], ids=str)
def test_a_block_runs(block, desk, tmp_path, monkeypatch):
    shutil.copytree(desk, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    text = block.text
    for found, value in IN_PLACE.items():
        text = text.replace(found, value)
    names = {"__name__": "__main__", **GIVEN.get(block.page, {})}
    exec(compile("\n" * (block.line - 1) + text, block.page, "exec"), names)
    for name in ("brevity", "tidy", "brightness", "steady"):
        if name in names:
            asyncio.run(check_reward(names[name], group()))
    if "train" in names:
        assert {"prompt", "answer"} <= names["train"]()[0].keys()
    if "conforms" in names:
        asyncio.run(names["conforms"]())
    elif "build" in names:
        engine = names["build"](type("Model", (), {"path": "model"}), data=None, options={"vocabulary": 4})
        assert engine.vocabulary == 4
    if "Aesthetic" in names:
        scores = names["Aesthetic"](model="head").score_groups([group(), group()])
        assert [len(each) for each in scores] == [2, 2]
