"""Reward models: scores and gradients beside transformers' own, over ranks, with adapters, and as a reward by path."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from digit_chat import collate, make_chat, words
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, Qwen3ForSequenceClassification

from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.reward.build import build
from cosmos_rl_core.reward.remote import RemoteReward
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_llm import write_tiny_model
from cosmos_rl_llm.build import build_policy
from cosmos_rl_llm.config import LLMDataConfig, LLMLoraSection, LLMModelConfig
from cosmos_rl_llm.data.rows import load_rows
from cosmos_rl_llm.data.spans import MARGIN, PAIR
from cosmos_rl_llm.model.causal_lm import load_model
from cosmos_rl_llm.model.miniature import miniature
from cosmos_rl_llm.policy.lora import add_adapters, merge_adapters
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.rank_probe import check_ranks
from cosmos_rl_llm.rewards.reward_model import RewardModelReward
from doubles.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

COMMAND = "from cosmos_rl_core.cli.main import main; main()"
ROW = {"prompt": "12=", PAIR: ["345", "7"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return write_tiny_model(folder, num_layers=2, hidden_size=32, initializer_range=0.2)


def saved(base, folder, *, num_labels=1):
    """A reward model of transformers, beside the tokenizer of `base`."""
    config = AutoConfig.from_pretrained(base, num_labels=num_labels)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(base, config=config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def reward_model(base, tmp_path_factory):
    return saved(base, tmp_path_factory.mktemp("reward_model"))


def policy_of(path, **keys: Any):
    data = LLMDataConfig(path="pairs.jsonl", chat_template="none", chosen_column="chosen", rejected_column="rejected")
    model = LLMModelConfig(path=str(path), scores=True, **keys)
    return build_policy(model, data=data, sampling=None, seed=0, setup=ModelSetup())


def expected_scores(model, chat, texts):
    """By transformers' own forward pass, a text alone."""
    rows = [[*chat.tokenizer(text).input_ids, chat.tokenizer.eos_token_id] for text in texts]
    return torch.cat([model(input_ids=torch.tensor([row])).logits[:, 0] for row in rows])


def group_of(responses, prompt="12="):
    blank = np.zeros(1, np.float32)
    rollout = Rollout(rollout_logprobs=blank, versions=blank.astype(np.int32), loss_mask=blank == 0, arrays={})
    rollouts = tuple(replace(rollout, text=text) for text in responses)
    return RolloutGroup(prompt=Prompt(sample_id=0, row={"prompt": prompt}), rollouts=rollouts)


def test_the_term_of_a_text_is_its_last_token():
    row = {"prompt": "12", PAIR: ["34", "5"], MARGIN: 0.5}
    (microbatch,) = collate([row], replace(make_chat(), scores=True)).microbatches
    inputs, terms = microbatch.inputs, microbatch.terms
    assert words(inputs["tokens"]) == ["1", "2", "3", "4", "</s>", "1", "2", "5", "</s>"]
    assert inputs["logit_index"].tolist() == [4, 8]
    assert terms.margins is not None and terms.margins.tolist() == [0.5, 0.5]


def test_scores_and_gradients_are_those_of_transformers(reward_model):
    policy = policy_of(reward_model)
    theirs = Qwen3ForSequenceClassification.from_pretrained(reward_model).eval()
    (microbatch,) = collate([ROW], policy.chat).microbatches
    scores = policy.forward(microbatch).logprobs
    expected = expected_scores(theirs, policy.chat, ["12=345", "12=7"])
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    (scores[0] - 2 * scores[1]).backward()
    (expected[0] - 2 * expected[1]).backward()
    mine = {name: parameter.grad for name, parameter in policy.module.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_a_new_head_is_the_same_in_every_process(base):
    one, other = (load_model(base, dtype=torch.float32, scores=True).state_dict()["score.weight"] for _ in range(2))
    assert torch.equal(one, other) and one.abs().sum() > 0


def are_right(rank, world_size, *, dims, sequence_parallel=False, lora=None):
    def prepare(model: PreTrainedModel) -> None:
        if lora is not None:
            add_adapters(model, LLMLoraSection(**lora), base="x")

    config = AutoConfig.for_model("qwen3", num_labels=1)
    model = miniature(Qwen3ForSequenceClassification, config)
    prepare(model)
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    parallel = ParallelSection.model_validate({**dims, "sequence_parallel": sequence_parallel})
    check_ranks(model, ModelSetup(mesh=mesh, parallel=parallel), prepare=prepare)
    return {"checked": 1}


@pytest.mark.parametrize(
    "layout",
    [
        {"dims": {"dp_shard": 2}},
        {"dims": {"tp": 2}},
        {"dims": {"tp": 2}, "sequence_parallel": True},
        {"dims": {"cp": 2}},
        {"dims": {"tp": 2}, "lora": {"rank": 2}},
    ],
    ids=str,
)
def test_scores_and_gradients_over_ranks_are_those_of_one_process(layout):
    assert len(run_ranks(are_right, 2, **layout)) == 2


def test_the_head_is_trained_and_exported_beside_adapters(base):
    policy = policy_of(base, lora=LLMLoraSection(rank=2))
    assert isinstance(policy, CausalLMPolicy)
    trained = {name for name, parameter in policy.module.named_parameters() if parameter.requires_grad}
    assert "score.weight" in trained and all(name == "score.weight" or "lora_" in name for name in trained)
    merged = dict(merge_adapters(base, policy.weights().items(), section=LLMLoraSection(rank=2)))
    assert torch.equal(merged["score.weight"], dict(policy.module.named_parameters())["score.weight"])


def test_the_files_of_a_trained_model_load_in_transformers(base, tmp_path):
    from safetensors.torch import save_file

    policy = policy_of(base)
    policy.save_config(tmp_path)
    save_file({name: tensor.contiguous() for name, tensor in policy.weights().items()}, tmp_path / "model.safetensors")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "Qwen3ForSequenceClassification" and loaded.config.num_labels == 1
    (microbatch,) = collate([ROW], policy.chat).microbatches
    assert policy.chat is not None
    tokenizer = policy.chat.tokenizer
    rows = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in ("12=345", "12=7")]
    width = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    padded = torch.tensor([row + [loaded.config.pad_token_id] * (width - len(row)) for row in rows])
    expected = loaded.eval()(input_ids=padded, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(policy.forward(microbatch).logprobs, expected, rtol=1e-5, atol=1e-6)


def test_as_a_reward_it_scores_prompt_and_response_with_its_own_tokenizer(reward_model):
    reward = RewardModelReward(path=str(reward_model), chat_template="none", batch_size=2, scale=2.0)
    responses = ["345", "7", "1234567"]
    found = asyncio.run(reward(group_of(responses)))
    theirs = Qwen3ForSequenceClassification.from_pretrained(reward_model).eval()
    chat = policy_of(reward_model).chat
    expected = 2.0 * expected_scores(theirs, chat, [f"12={response}" for response in responses])
    assert found == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


def test_a_text_beyond_its_context_is_an_error_of_the_sample(reward_model):
    with pytest.raises(SampleError, match="takes 64"):
        asyncio.run(RewardModelReward(path=str(reward_model), chat_template="none")(group_of(["1" * 80])))


def test_a_language_model_is_refused_as_a_reward(base):
    with pytest.raises(UserError, match=r"has no score.weight and is no reward model"):
        build(RewardModelReward, {"path": str(base)}, where="reward")


def test_several_outputs_are_refused(base, tmp_path):
    classifier = saved(base, tmp_path, num_labels=3)
    with pytest.raises(UserError, match="classifier of 3 outputs"):
        build(RewardModelReward, {"path": str(classifier)}, where="reward")
    with pytest.raises(UserError, match="classifier of 3 outputs"):
        policy_of(classifier)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_model_of_pictures_is_refused(family, tmp_path):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"a {family} reads pictures, and reward models read text"):
        policy_of(tmp_path)


@pytest.mark.parametrize("margin", ["much", None, True])
def test_a_margin_is_a_number(margin, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1", "chosen": "2", "rejected": "3", "m": margin}))
    config = LLMDataConfig(
        path=str(file), chosen_column="chosen", rejected_column="rejected", margin_column="m", chat_template="none"
    )
    with pytest.raises(UserError, match=r"rows.jsonl:1: .*margin_column"):
        load_rows(config)


def test_the_reward_service_scores_with_it(reward_model, tmp_path):
    for needed in ("httpx", "starlette", "uvicorn"):
        pytest.importorskip(needed, reason="an extra of the package")
    settings = f"""
port = 0
token_file = "{tmp_path / "token"}"

[[rewards]]
name = "llm:reward_model"
label = "score"
options = {{ path = "{reward_model}", chat_template = "none" }}
"""
    (tmp_path / "rewards.toml").write_text(settings)
    server = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "reward-server", "rewards.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "http://" in line, line + server.stdout.read()
        url = line.split("reward server: ")[1].split()[0]
        remote = RemoteReward(url=url, reward="score", media="none", token_file=str(tmp_path / "token"))
        found = asyncio.run(remote(group_of(["345", "7"])))
    finally:
        server.terminate()
        server.communicate()
    local = asyncio.run(RewardModelReward(path=str(reward_model), chat_template="none")(group_of(["345", "7"])))
    assert found == pytest.approx(local, rel=1e-5)
