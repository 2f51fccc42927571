"""Training of vision-language models by part: adapters and learning rates; and in the dtype of the recipes."""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cosmos_rl_core.parallel.config import PrecisionSection
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.train.optim import parameter_groups
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling, Share
from cosmos_rl_llm.config import PARTS, LLMDataConfig, LLMLoraSection, LLMModelConfig
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.model.parts import part_of
from cosmos_rl_llm.policy.lora import read_tensors

pytest.importorskip("PIL")

from tiny_vision import make, picture, write_processing

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
