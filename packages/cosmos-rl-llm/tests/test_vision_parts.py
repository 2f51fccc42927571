"""Training of vision-language models by part: adapters and learning rates; and in the dtype of the recipes."""

import asyncio
import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_rl_core import run
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import PrecisionSection
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.train.optimizers.build import parameter_groups
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling, Share
from cosmos_rl_llm.config import PARTS, LLMDataConfig, LLMLoraSection, LLMModelConfig
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.media.vision import find_family
from cosmos_rl_llm.model.causal_lm import load_model
from cosmos_rl_llm.model.vision_parts import part_of
from cosmos_rl_llm.policy.lora import add_adapters, read_tensors

pytest.importorskip("PIL")

from tiny_vision import make, picture, plain_logits, prompt, write_processing

ANSWER = Sampling(max_terms=6)


def write(directory, family="qwen3_vl"):
    make(family).save_pretrained(directory)
    write_processing(directory, family)
    for number in range(2):
        picture(32, 40, seed=number).save(directory / f"{number}.png")


def data_of(directory):
    return LLMDataConfig(path="unused.jsonl", image_column="picture", media={"root": str(directory)})


def build(directory, **model):
    section = LLMModelConfig(path=str(directory), **model)
    setup = ModelSetup(precision=PrecisionSection())
    return LLM.build_policy(section, data=data_of(directory), sampling=ANSWER, seed=0, setup=setup)


def sampled(directory, **model):
    """Groups of two rollouts for each of two pictures, by the engine "torch"."""
    section, data = LLMModelConfig(path=str(directory), **model), data_of(directory)
    engine = LLM.build_engine(section, data=data, name="torch", options={})

    async def work():
        groups = []
        for number in range(2):
            part = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "what colour ?"}]
            prompt = Prompt(sample_id=number, row={"prompt": [{"role": "user", "content": part}]})
            _, rollouts = await engine.generate(prompt, num_samples=2, sampling=ANSWER, seed=number)
            groups.append(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts)))
        await engine.close()
        return groups

    return asyncio.run(work())


def batch_of(groups):
    return collate(groups, microbatch_terms=10_000, share=Share()).microbatches[0]


@pytest.mark.parametrize("adapted", PARTS)
def test_adapters_on_one_part_are_trained_and_sent_alone(tmp_path, adapted):
    pytest.importorskip("peft")
    write(tmp_path)
    keys = {"freeze": [part for part in PARTS if part != adapted], "lora": LLMLoraSection(rank=2)}
    policy = build(tmp_path, **keys)
    policy.forward(batch_of(sampled(tmp_path, **keys))).logprobs.sum().backward()
    trained = {name: each for name, each in policy.module.named_parameters() if each.requires_grad}
    assert trained and {part_of(name) for name in trained} == {adapted}
    assert all("lora_" in name for name in trained)
    assert all(each.grad is not None and each.grad.any() for name, each in trained.items() if "lora_B" in name)
    assert len(policy.rollout_weights()) == len(trained)


def test_rates_are_those_of_the_parts_named(tmp_path):
    write(tmp_path)
    module = build(tmp_path).module
    rates = {"*.merger.*": 1e-5, "*.deepstack_merger_list.*": 1e-5, "model.visual.*": 2e-7}
    groups = parameter_groups(module, weight_decay=0.0, learning_rate=1e-6, rates=rates)
    given = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    expected = {"language_model": 1e-6, "projector": 1e-5, "tower": 2e-7}
    for name, parameter in module.named_parameters():
        assert given[id(parameter)] == expected[part_of(name)], name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_policy_and_engine_agree_in_bfloat16(tmp_path, family):
    write(tmp_path, family)
    groups = sampled(tmp_path, dtype="bfloat16")
    microbatch = batch_of(groups)
    exact, policy = build(tmp_path), build(tmp_path, dtype="bfloat16")
    with torch.no_grad():
        wanted, found = (each.forward(microbatch).logprobs for each in (exact, policy))
    for other in (microbatch.terms.rollout_logprobs, wanted):
        error = (found - other).abs().mean()
        assert 0 < error < 0.02, f"of log-probabilities that spread over {np.ptp(wanted.numpy()):.1f}"
    assert found.dtype == torch.float32


BESIDE = {"freeze": ["tower"], "lora": {"rank": 2, "whole": ["projector"]}}


def test_a_projector_is_trained_in_full_beside_adapters(tmp_path):
    pytest.importorskip("peft")
    write(tmp_path)
    policy = build(tmp_path, **BESIDE)
    policy.forward(batch_of(sampled(tmp_path, **BESIDE))).logprobs.sum().backward()
    trained = {name: each for name, each in policy.module.named_parameters() if each.requires_grad}
    in_full = [name for name in trained if "lora_" not in name]
    assert in_full and {part_of(name) for name in in_full} == {"projector"}
    assert {part_of(name) for name in trained if "lora_" in name} == {"language_model"}
    assert all(trained[name].grad.any() for name in in_full if name.endswith("weight"))
    assert len(policy.rollout_weights()) == len(trained)
    assert policy.reference() is None  # without adapters its projector is still the trained one
    shape = LLM.model_shape(LLMModelConfig(path=str(tmp_path), **BESIDE), data=data_of(tmp_path), sampling=ANSWER)
    assert shape.adapter_parameters == sum(each.numel() for each in trained.values())


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"freeze": ["projector"], "lora": {"whole": ["projector"]}}, "lora.whole and freeze both have 'projector'"),
        ({"lora": {"whole": ["language_model"]}}, "Input should be 'tower' or 'projector'"),
    ],
)
def test_a_part_is_frozen_or_trained_in_full(keys, wrong):
    with pytest.raises(ValidationError, match=wrong):
        LLMModelConfig(path="x", **keys)


def test_a_model_of_text_has_no_projector_to_train(tmp_path):
    pytest.importorskip("peft")
    text = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", num_hidden_layers=1, hidden_size=32))
    section = LLMLoraSection(rank=2, whole=["projector"])
    with pytest.raises(UserError, match="has no projector; remove it from the list"):
        add_adapters(text, section, base="x")


def small_tokens(group):
    return [float((rollout.arrays["tokens"] < 32).mean()) for rollout in group.rollouts]


@pytest.mark.ci
def test_engine_checkpoint_and_export_have_adapters_and_projector(tmp_path):
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    base.mkdir()
    write(base)
    rows = [{"prompt": "what colour ?", "picture": f"{number}.png", "answer": "red"} for number in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "run": {"domain": "llm", "output_dir": str(tmp_path / "run"), "max_steps": 3, "placement": "inline"},
        "model": {"path": str(base), **BESIDE},
        "data": {"path": str(tmp_path / "rows.jsonl"), "image_column": "picture", "media": {"root": str(base)}},
        "algorithm": {"name": "grpo", "kl_coef": 0.1},
        "policy": {"prompts_per_step": 2, "optimizer": {"learning_rate": 1e-2}},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 4}},
        "sync": {"max_staleness": 0},
        "logging": {"sinks": ["jsonl"]},
    }
    done = run(recipe, rewards=[small_tokens])
    assert all(line["mismatch_kl"] < 1e-6 for line in done.metrics)  # sampled with the weights that are trained
    assert done.metrics[0]["kl"] == pytest.approx(0, abs=1e-9) and done.metrics[2]["kl"] > 0
    adapters = done.checkpoint / "policy"
    config = json.loads((adapters / "adapter_config.json").read_text())
    assert config["modules_to_save"] and all("merger" in name for name in config["modules_to_save"])
    section = LLMModelConfig(**recipe["model"])
    merged = dict(LLM.export_weights(section, read_tensors(adapters), merge_adapters=True))
    before = dict(read_tensors(base))
    assert merged.keys() == before.keys()
    changed = {part_of(name) for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    assert changed == {"projector", "language_model"}

    def logits(model):
        family = find_family(str(base), model.config)
        item = family.image(picture(32, 40, seed=0))
        tokens, _ = prompt([item], family, base)
        return plain_logits(model, family, tokens, np.arange(7, 12), [item])

    whole = load_model(base, dtype=torch.float32)
    whole.load_state_dict(merged, strict=False)
    by_peft = peft.PeftModel.from_pretrained(load_model(base, dtype=torch.float32), adapters).merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(logits(by_peft), logits(whole), rtol=0, atol=1e-5)
    more = run({**recipe, "run": {**recipe["run"], "max_steps": 4}}, rewards=[small_tokens], resume="auto")
    assert len(more.metrics) == 1 and more.metrics[0]["mismatch_kl"] < 1e-6


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_adapters_are_merged_into_files_with_other_names_than_transformers_has(tmp_path, family):
    """Qwen2.5-VL was published before transformers put both of its parts under `model`."""
    pytest.importorskip("peft")
    write(tmp_path, family)
    if family == "qwen2_5_vl":
        published = {
            name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
            for name, tensor in read_tensors(tmp_path)
        }
        save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before = dict(read_tensors(tmp_path))
    section = LLMModelConfig(path=str(tmp_path), lora=LLMLoraSection(rank=2))
    policy = build(tmp_path, lora=section.lora)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    merged = dict(LLM.export_weights(section, policy.weights().items(), merge_adapters=True))
    assert merged.keys() == before.keys()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    assert len(changed) == len(policy.weights()) // 2
    (tmp_path / "merged").mkdir()
    save_file(merged, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    policy.module.causal_lm.config.save_pretrained(tmp_path / "merged")
    write_processing(tmp_path / "merged", family)
    batch = batch_of(sampled(tmp_path))
    whole = build(tmp_path / "merged").forward(batch).logprobs
    torch.testing.assert_close(whole, policy.forward(batch).logprobs, rtol=0, atol=1e-4)
