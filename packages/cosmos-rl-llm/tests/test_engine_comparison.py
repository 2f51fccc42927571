"""Engine and policy are compared at the start, on a prompt that is longer than the window of the model's attention."""

import json

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from cosmos_rl_core import run
from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.types import Sampling
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.engines.long_prompt import RESPONSE, boundaries, long_prompt
from cosmos_rl_llm.model.causal_lm import load_tokenizer
from cosmos_rl_llm.tiny import CHARACTERS, write_sums, write_tokenizer

WINDOW = 24


def config_of(**changes):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    limits = {"sliding_window": WINDOW, "max_position_embeddings": 128, "initializer_range": 0.3}
    ids = {"vocab_size": 3 + len(CHARACTERS), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    return MistralConfig(**{**sizes, **limits, **ids, "num_key_value_heads": 1, "head_dim": 16, **changes})


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    MistralForCausalLM(config_of()).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def one_token_off(model, *, data, options):
    """An engine whose attention sees one token more than the policy's."""
    assert not options
    other = model.model_copy(update={"path": f"{model.path}-off"})
    torch.manual_seed(0)
    MistralForCausalLM(config_of(sliding_window=WINDOW + 1)).save_pretrained(other.path)
    write_tokenizer(other.path)
    return LLM.build_engine(other, data=data, name="torch", options={})


def recipe(tmp_path, model, *, engine, max_staleness=0):
    train, _ = write_sums(tmp_path / "data")
    return {
        "run": {"domain": "llm", "output_dir": str(tmp_path / "run"), "max_steps": 2, "placement": "inline"},
        "model": {"path": str(model)},
        "data": {"path": str(train), "chat_template": "none"},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 2, "threads": 1},
        "rollout": {"engine": engine, "group_size": 4, "threads": 1, "sampling": {"max_tokens": 4}},
        "reward": {"functions": [{"name": "length", "options": {"max_tokens": 1, "slack_tokens": 3}}]},
        "sync": {"max_staleness": max_staleness},
        "logging": {"sinks": ["jsonl"]},
    }


def notes(tmp_path):
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    return [event["text"] for event in map(json.loads, events) if "nats" in event.get("text", "")]


def test_a_window_that_is_one_token_off_is_reported_before_the_first_step(tmp_path, model):
    done = run(recipe(tmp_path, model, engine=f"{__name__}:one_token_off"))
    (note,) = notes(tmp_path)
    assert f"beyond the model's window of {WINDOW}, and rounding explains 0.0003" in note
    assert done.metrics[0]["start_mismatch"] > 0.003
    assert abs(done.metrics[0]["mismatch_kl"]) < 1e-5  # the prompts of the data are short
    assert "start_mismatch" not in done.metrics[1]


def test_an_engine_that_computes_the_same_is_not_reported(tmp_path, model):
    done = run(recipe(tmp_path, model, engine="torch", max_staleness=1))
    assert notes(tmp_path) == []
    assert done.metrics[0]["start_mismatch"] < 1e-5


def prompt_of(model, *, limit, **changes):
    prompt, sampling = long_prompt(
        load_tokenizer(model), config_of(**changes), limit=limit, sampling=Sampling(max_terms=100, stop=("+",))
    )
    assert sampling == Sampling(max_terms=RESPONSE)
    return len(prompt.row["prompt"]), prompt.origin


@pytest.mark.parametrize(
    ("limit", "window", "length", "origin"),
    [
        (None, 4096, 4160, "a prompt of 4160 tokens, beyond the model's window of 4096"),
        (2048, 4096, 2032, "within the model's window of 4096, which no sequence of this recipe exceeds"),
        (None, 32768, 512, "within the model's window of 32768, and none is compared that is longer"),
        (2048, None, 512, "a prompt of 512 tokens"),
        (4100, 4096, 4084, "within the model's window of 4096, which no sequence of this recipe exceeds"),
    ],
)
def test_the_prompt_is_longer_than_the_window_where_the_recipe_allows_it(model, limit, window, length, origin):
    num_tokens, description = prompt_of(model, limit=limit, sliding_window=window)
    assert num_tokens == length and description.endswith(origin)


def test_a_limit_without_room_for_a_prompt(model):
    with pytest.raises(PromptError, match="a prompt of 0 tokens has no text"):
        prompt_of(model, limit=RESPONSE)


def test_a_window_that_no_layer_has_is_no_boundary():
    assert list(boundaries(config_of(layer_types=["full_attention"] * 2))) == []
    assert list(boundaries(config_of(rope_parameters={"rope_type": "dynamic", "factor": 2.0}))) == [WINDOW, 128]
