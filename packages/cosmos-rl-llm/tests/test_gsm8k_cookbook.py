"""The recipes of GSM8K for GPUs: they fit the cards they name, and run on a CPU but for their sizes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from cosmos_rl_core import run
from cosmos_rl_core.cli.app import app
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_llm.tiny import write_tiny_model

COOKBOOK = Path(__file__).parents[3] / "cookbook"
pytestmark = pytest.mark.skipif(not COOKBOOK.is_dir(), reason="the wheel comes without the cookbook")
ONE_CARD, NODE = "llm_gsm8k_24gb", "llm_gsm8k_8gpu"
SIZES = {
    ONE_CARD: {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    NODE: {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
"""Of Qwen2.5-1.5B-Instruct and -7B-Instruct, as in their config.json."""


def planned(name, folder, *overrides, memory):
    """Exit code and JSON of the plan for GPUs, from the model's config.json alone."""
    common = {"num_hidden_layers": 28, "max_position_embeddings": 32768, "architectures": ["Qwen2ForCausalLM"]}
    AutoConfig.for_model("qwen2", **SIZES[name], **common).save_pretrained(folder)
    arguments = ["plan", str(COOKBOOK / name / "run.toml"), f"model.path={folder}", *overrides]
    result = CliRunner().invoke(app, [*arguments, "--memory", memory, "--gpu", "--json"])
    return result.exit_code, json.loads(result.stdout)["memory"]


@pytest.mark.parametrize(("name", "memory"), [(ONE_CARD, "24GiB"), (NODE, "80GiB")])
def test_the_recipe_fits_its_card_with_room_for_what_is_not_counted(name, memory, tmp_path):
    code, needs = planned(name, tmp_path, memory=memory)
    assert (code, needs["fits"], needs["unknown"]) == (0, True, [])
    assert needs["given"] - max(needs["device"], needs["rollout_device"]) > 2**31
    assert needs["in_turns"] == (name == ONE_CARD)
    assert planned(name, tmp_path, memory="8GiB")[0] == 1


def test_all_weights_of_the_small_model_do_not_fit_the_card(tmp_path):
    """Why the recipe trains adapters."""
    tables = tomllib.loads((COOKBOOK / ONE_CARD / "run.toml").read_text())
    del tables["model"]["lora"]
    planned(ONE_CARD, tmp_path, memory="24GiB")  # writes config.json
    tables["model"]["path"] = str(tmp_path)
    memory = plan(load_config(tables), memory=24 * 2**30, gpu=True).memory
    assert memory is not None and memory.fits is False


@pytest.mark.parametrize("name", [ONE_CARD, NODE])
def test_the_recipe_generates_with_vllm(name):
    assert load_config(COOKBOOK / name / "run.toml").rollout.engine == "vllm"


@pytest.mark.ci
@pytest.mark.parametrize("name", [ONE_CARD, NODE])
def test_the_recipe_runs_on_a_cpu_but_for_its_sizes(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = [json.dumps({"question": f"{number}+1", "answer": f"Easy.\n#### {number + 1}"}) for number in range(8)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    model = write_tiny_model(tmp_path / "model", num_layers=2)
    plain = 'chat_template="none"'
    changes = [
        f"run.output_dir={tmp_path / 'run'}",
        "run.max_steps=2",
        f"model.path={model}",
        "model.dtype=float32",
        f"data.path={tmp_path / 'train.jsonl'}",
        f"data.{plain}",
        "data.prompt_template={question}=",
        f"eval.data.path={tmp_path / 'test.jsonl'}",
        f"eval.data.{plain}",
        "eval.data.prompt_template={question}=",
        "policy.prompts_per_step=4",
        "policy.threads=1",
        "policy.schedule.warmup_steps=0",
        "rollout.threads=1",
        "rollout.engine=torch",
        "rollout.options={max_sequences=8}",
        "rollout.group_size=4",
        "rollout.sampling.max_tokens=4",
        "model.max_length=32",
        'logging.sinks=["jsonl"]',
    ]
    changes += ["policy.parallel.dp_shard=2", "rollout.replicas=2"] if name == NODE else []
    result = run(COOKBOOK / name / "run.toml", changes)
    assert [line["step"] for line in result.metrics] == [0, 1]
    assert {"reward/numeric", "reward/format"} <= result.metrics[0].keys()
    adapters = (tmp_path / "run/checkpoints/step_2/policy/adapter_model.safetensors").is_file()
    assert adapters == (name == ONE_CARD)
