"""Reward models of steps: their rows and terms, and the score of a response by its steps."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from digit_chat import TEMPLATE, collate, make_chat, words
from transformers import AutoConfig, AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from cosmos_rl_core import run
from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_llm import write_tiny_model
from cosmos_rl_llm.config import LLMDataConfig
from cosmos_rl_llm.data.rows import load_rows
from cosmos_rl_llm.data.spans import STEPS, steps_of
from cosmos_rl_llm.rewards.reward_model import RewardModelReward

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = {"steps_column": "completions", "label_column": "labels", "step_separator": " "}
ROW = {"prompt": "12", "response": "3 45 6", STEPS: [["3 ", True], ["45 ", False], ["6", True]]}


def load(tmp_path, row, **keys):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    return load_rows(LLMDataConfig(path=str(file), chat_template="none", **{**KEYS, **keys}))[0][0]


def test_the_terms_of_a_row_are_the_ends_of_its_steps():
    (microbatch,) = collate([ROW], replace(make_chat(), scores=True)).microbatches
    inputs, terms = microbatch.inputs, microbatch.terms
    read = words(inputs["tokens"])
    assert read == list("123 45 6")
    assert [read[place] for place in inputs["logit_index"]] == [" ", " ", "6"]
    assert terms.advantages.tolist() == [1, -1, 1]
    assert terms.loss_mask.tolist() == [1, 1, 1]
    assert terms.preference is None


def test_the_steps_of_a_chat_are_those_of_the_rendered_answer():
    row = {**ROW, "prompt": [{"role": "user", "content": "12"}]}
    (microbatch,) = collate([row], replace(make_chat(TEMPLATE), scores=True)).microbatches
    read = words(microbatch.inputs["tokens"])
    assert read == ["<user>", "1", "2", "</s>", " ", "<assistant>", *"3 45 6"]
    assert microbatch.inputs["logit_index"].tolist() == [7, 10, 11]


def test_a_template_that_changes_the_steps_is_told():
    template = TEMPLATE.replace("m['content']", "m['content'] | replace(' ', '')")
    with pytest.raises(PromptError, match="changes the steps of the answer"):
        replace(make_chat(template), scores=True).encode_steps({**ROW, "prompt": [{"role": "user", "content": "1"}]})


@pytest.mark.parametrize(("max_length", "steps"), [(9, 3), (8, 2), (5, 1)])
def test_a_long_row_loses_its_last_steps(max_length, steps):
    chat = replace(make_chat(max_length=max_length, overlong="truncate"), scores=True)
    batch = collate([ROW], chat)
    assert batch.microbatches[0].terms.advantages.tolist() == [1, -1, 1][:steps]
    assert batch.num_terms == steps


@pytest.mark.parametrize(
    ("response", "pieces"),
    [
        ("a\nb\nc", ["a\n", "b\n", "c"]),
        ("a\n\n\nb\n", ["a\n\n\n", "b\n"]),
        ("\n a\nb", ["\n a\n", "b"]),
        ("one", ["one"]),
        (" ", [" "]),
    ],
)
def test_a_response_is_cut_after_each_separator(response, pieces):
    assert steps_of(response, "\n") == pieces


def test_rows_have_a_list_of_steps_and_one_of_labels(tmp_path):
    row = load(tmp_path, {"prompt": "12", "completions": ["3", "45", "6"], "labels": [True, False, True]})
    assert (row["prompt"], row["response"], row[STEPS]) == (ROW["prompt"], ROW["response"], ROW[STEPS])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"completions": "3"}, r"rows.jsonl:1: the steps must be a list of texts .*data.steps_column"),
        ({"completions": ["3", " "]}, r"rows.jsonl:1: the steps must be a list of texts that are not empty"),
        ({"labels": [True]}, r"rows.jsonl:1: there are 2 steps and 1 labels"),
        ({"labels": [True, "good"]}, r"rows.jsonl:1: the labels of steps must be a list of true or false"),
        ({"completions": ["3 4", "5"]}, r"rows.jsonl:1: a step has the text between steps, ' ', inside"),
    ],
)
def test_wrong_steps_are_named_with_their_row(change, error, tmp_path):
    with pytest.raises(UserError, match=error):
        load(tmp_path, {"prompt": "1", "completions": ["3", "4"], "labels": [True, False], **change})


@pytest.mark.parametrize("keys", [{"label_column": None}, {"response_column": "r"}])
def test_keys_of_steps_that_do_not_fit_together_are_refused(keys):
    with pytest.raises(ValueError, match="steps_column needs label_column"):
        LLMDataConfig(path="x.jsonl", **{**KEYS, **keys})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("base"), num_layers=2, hidden_size=32, initializer_range=0.2)


@pytest.mark.parametrize("over", ["min", "mean", "last"])
def test_a_response_has_the_score_of_its_steps(over, base, tmp_path):
    config = AutoConfig.from_pretrained(base, num_labels=1)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(base, config=config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    reward = RewardModelReward(path=str(tmp_path), chat_template="none", step_separator="+", over_steps=over)
    responses = ["3+45+6", "7", "12+", " "]
    blank = np.zeros(1, np.float32)
    rollout = Rollout(rollout_logprobs=blank, versions=blank.astype(np.int32), loss_mask=blank == 0, arrays={})
    rollouts = tuple(replace(rollout, text=text) for text in responses)
    found = asyncio.run(reward(RolloutGroup(prompt=Prompt(sample_id=0, row={"prompt": "12="}), rollouts=rollouts)))

    theirs = Qwen3ForSequenceClassification.from_pretrained(tmp_path).eval()
    chat = reward._load()[1]

    def probability(text):  # of its last step: what follows does not change it
        ids = torch.tensor([chat.tokenizer(text).input_ids])
        return torch.sigmoid(theirs(input_ids=ids).logits[0, 0]).item()

    ends = [["12=3+", "12=3+45+", "12=3+45+6"], ["12=7"], ["12=12+"]]
    of = {"min": min, "mean": lambda values: sum(values) / len(values), "last": lambda values: values[-1]}[over]
    assert found.pop() == 0.0  # it has no step
    assert found == pytest.approx([of([probability(text) for text in texts]) for texts in ends], abs=1e-5)
    assert len({round(value, 3) for value in found}) == 3


@pytest.mark.ci
def test_a_model_learns_which_steps_are_right_and_rewards_rollouts(base, tmp_path):
    """A step is right if its digit is even."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(200):
        digits = rng.integers(0, 10, 1 + number % 4).tolist()
        rows.append({"prompt": "1=", "steps": list(map(str, digits)), "right": [digit % 2 == 0 for digit in digits]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "rows.jsonl"), "chat_template": "none"}
    common = {"domain": "llm", "placement": "inline"}
    trained = run({
        "run": {**common, "max_steps": 25, "output_dir": str(tmp_path / "prm")},
        "model": {"path": str(base), "scores": True},
        "data": {**data, "steps_column": "steps", "label_column": "right", "step_separator": "+"},
        "algorithm": {"name": "process_reward_model"},
        "policy": {"prompts_per_step": 16, "optimizer": {"learning_rate": 3e-3}},
        "eval": {"held_out": 40},
    })  # fmt: skip
    assert trained.metrics[-1]["loss"] < 0.5 * trained.metrics[0]["loss"]
    assert trained.evaluations[25]["eval/step_accuracy"] > 0.9
    assert trained.evaluations[25]["eval/loss"] < 0.5 * trained.evaluations[0]["eval/loss"]
    options = {"path": str(trained.checkpoint / "policy"), "chat_template": "none", "step_separator": "+"}
    drawn = run({
        "run": {**common, "max_steps": 2, "output_dir": str(tmp_path / "rl")},
        "model": {"path": str(base)},
        "data": data,
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 4},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 4}},
        "reward": {"functions": [{"name": "reward_model", "options": options}]},
    })  # fmt: skip
    assert all(0 < line["reward_mean"] < 1 and line["reward_std"] > 0 for line in drawn.metrics)
