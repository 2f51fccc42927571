"""`cosmos_rl_llm.tiny`: models and sums on disk, and loading them from several threads at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from cosmos_rl_core.types import Rollout
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.model.causal_lm import load_model, load_tokenizer, named_weights
from cosmos_rl_llm.tiny import write_sums, write_tiny_model


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sums_are_right_and_cut_in_two_without_overlap(tmp_path):
    train, test = write_sums(tmp_path, below=10, held_out=20)
    assert (len(rows(train)), len(rows(test))) == (80, 20)
    assert len({row["prompt"] for row in [*rows(train), *rows(test)]}) == 100
    for row in rows(train):
        a, b = row["prompt"].removesuffix("=").split("+")
        assert row["answer"] == row["response"] == str(int(a) + int(b))


def test_every_sum_can_be_written_by_the_tokenizer(tmp_path):
    tokenizer = load_tokenizer(write_tiny_model(tmp_path, num_layers=1))
    tokens = tokenizer("47+38=85")["input_ids"]
    assert len(tokens) == 8
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == "47+38=85"


def test_the_seed_decides_the_weights(tmp_path):
    weights = [
        named_weights(load_model(write_tiny_model(tmp_path / str(i), num_layers=1, seed=seed), dtype=torch.float32))
        for i, seed in enumerate((0, 0, 1))
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_models_can_be_loaded_in_several_threads(tmp_path):
    directory = write_tiny_model(tmp_path, num_layers=1)
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: load_model(directory, dtype=torch.float32), range(16)))
    first = named_weights(models[0])
    assert all(torch.equal(first[name], weight) for m in models for name, weight in named_weights(m).items())


def test_tokens_of_a_rollout_have_their_text(tmp_path):
    model = LLMModelConfig(path=str(write_tiny_model(tmp_path / "base")))
    tokens = load_tokenizer(model.path).encode("47+38=", add_special_tokens=False)
    rollout = Rollout(
        arrays={"tokens": np.array(tokens, np.int32)},
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        loss_mask=np.ones(len(tokens), bool),
    )
    assert LLM.term_texts(model, rollout) == list("47+38=")
    assert LLM.term_texts(model, replace(rollout, arrays={})) == ()
