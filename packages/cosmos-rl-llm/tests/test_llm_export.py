"""`cosmos-rl export` of language models: transformers and peft load what it writes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.errors import UserError
from cosmos_rl_llm.model.causal_lm import empty_model
from cosmos_rl_llm.model.checkpoint import read_specs
from cosmos_rl_llm.tiny import write_tiny_model

LORA = {"rank": 4, "alpha": 16.0, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model as published: with a second set of weights, and settings of generation that transformers warns of."""
    folder = write_tiny_model(tmp_path_factory.mktemp("base") / "model", num_layers=2, initializer_range=0.1)
    weights = {
        f"layers.{number}": tensor for number, tensor in enumerate(load_file(folder / "model.safetensors").values())
    }
    save_file(weights, folder / "consolidated.safetensors")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    return folder


def trained(base, run_dir, **model):
    """The directory of a run of two steps."""
    rows = run_dir / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "response": f"{n + 1}"}) + "\n" for n in range(8)))
    run(
        {
            "run": {"domain": "llm", "output_dir": str(run_dir / "run"), "max_steps": 2, "placement": "inline"},
            "model": {"path": str(base), **model},
            "data": {"path": str(rows), "chat_template": "none"},
            "algorithm": {"name": "sft"},
            "policy": {"prompts_per_step": 4, "optimizer": {"learning_rate": 2e-2}},
            "logging": {"sinks": ["jsonl"]},
        }
    )
    return str(run_dir / "run")


def loaded(folder):
    """The model of an export, all of whose weights are in its files, and no others."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder)("1 + 1")["input_ids"]
    return model


@torch.no_grad()
def logits(model):
    return model(torch.arange(8)[None]).logits


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_an_export_of_trained_weights_loads(base, tmp_path, max_shard_bytes):
    written = export(trained(base, tmp_path), tmp_path / "model", max_shard_bytes=max_shard_bytes)
    assert not torch.equal(logits(loaded(tmp_path / "model")), logits(loaded(base)))
    assert written.num_tensors == len(load_file(base / "model.safetensors"))
    assert (len(list((tmp_path / "model").glob("*.safetensors"))) > 1) == (max_shard_bytes < 10**9)
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["temperature"] == 0.6


def test_exports_of_adapters_load_merged_and_beside_their_base(base, tmp_path):
    peft = pytest.importorskip("peft")
    source = trained(base, tmp_path, lora=LORA)
    written = export(source, tmp_path / "merged")
    export(source, tmp_path / "kept", merge_adapters=False)
    assert written.num_tensors == len(load_file(base / "model.safetensors"))
    merged = logits(loaded(tmp_path / "merged"))
    assert not torch.allclose(merged, logits(loaded(base)), atol=1e-4)
    for adapted in (
        peft.PeftModel.from_pretrained(loaded(base), str(tmp_path / "kept")),
        AutoModelForCausalLM.from_pretrained(tmp_path / "kept"),
    ):
        torch.testing.assert_close(logits(adapted), merged, rtol=1e-5, atol=1e-5)
    assert not (tmp_path / "merged" / "merged").exists() and not (tmp_path / "kept" / "merged").exists()


def test_another_set_of_weights_counts_once(base):
    assert {spec.name for spec in read_specs(base)} == set(load_file(base / "model.safetensors"))


def test_settings_of_generation_that_transformers_refuses_are_named(tmp_path):
    folder = write_tiny_model(tmp_path / "model", num_layers=1)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": -1}))
    with pytest.raises(UserError, match=r"generation_config.json: .*greater than 0.*; mend or remove the file"):
        empty_model(folder, dtype=torch.float32)
