"""Two policy replicas train what one does, with every layout of ranks inside a replica."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

STEPS = 3
LAYOUTS = {
    "HSDP": {"dp_replicate": 2, "dp_shard": 2},
    "TP": {"tp": 2},
    "PP": {"pp": 2},
    "CP": {"cp": 2},
    "EP": {"dp_shard": 2, "ep": 2},
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory, qwen):
    """A folder with a model of experts, and the tokenizer of the other one."""
    from torch import float32

    from cosmos_rl_llm.model.causal_lm import make_model

    folder = tmp_path_factory.mktemp("experts")
    shutil.copytree(qwen, folder, dirs_exist_ok=True)
    vocabulary = json.loads((qwen / "config.json").read_text())["vocab_size"]
    make_model({**EXPERTS, "vocab_size": vocabulary}, dtype=float32, seed=0).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_replicas_of_any_layout_train_what_one_does(tmp_path, sums, experts, write_recipe, start, rows_of, layout):
    found = {}
    for replicas in (1, 2):
        run_dir = tmp_path / f"replicas_{replicas}"
        tables = sums(
            run_dir,
            run__max_steps=STEPS,
            model__path=str(experts),
            policy__replicas=replicas,
            policy__parallel=LAYOUTS[layout],
            sync__max_staleness=0,
        )
        process = start("run", write_recipe(run_dir.with_suffix(".toml"), tables))
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
        found[replicas] = weights(run_dir), [row["loss"] for row in rows_of(run_dir / "metrics.jsonl")]
    assert found[2][1] == pytest.approx(found[1][1], rel=1e-4, abs=1e-6)
    assert difference(found[2][0], found[1][0]) < 1e-4


def weights(run_dir):
    """Tensors of the last checkpoint, optimizer state included."""
    return {
        (file.name, name): tensor
        for file in sorted(Path(run_dir / "checkpoints" / f"step_{STEPS}").rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if not name.startswith("rng/")
    }


def difference(one, other):
    assert one.keys() == other.keys() and one
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)
