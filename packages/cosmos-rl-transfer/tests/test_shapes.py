import json
import math
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.shapes import PRESETS, decoder_of, read_shapes

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
}
"""As published."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_published(name):
    assert read_shapes(name).num_parameters == PARAMETERS[name]


def test_names_are_those_of_the_hub():
    specs = {spec.name: spec for spec in read_shapes("qwen3-30b-a3b").specs}
    assert len(specs) == 18_867
    assert specs["model.layers.47.mlp.experts.127.down_proj.weight"].shape == (2048, 768)
    assert specs["model.layers.0.self_attn.q_norm.weight"].shape == (128,)


def test_the_first_layers_of_deepseek_are_dense():
    names = [spec.name for spec in read_shapes("deepseek-v3").specs]
    assert "model.layers.2.mlp.gate_proj.weight" in names
    assert "model.layers.3.mlp.gate_proj.weight" not in names
    assert "model.layers.3.mlp.shared_experts.gate_proj.weight" in names


def test_a_tied_model_has_no_head():
    assert all(spec.name != "lm_head.weight" for spec in read_shapes("smollm2-135m").specs)


def test_a_configuration_is_read_like_a_preset(tmp_path):
    config = {
        "model_type": "qwen2", "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = read_shapes(str(tmp_path / "config.json"))
    attention = 8 * 8 + 8 + 2 * (4 * 8 + 4) + 8 * 8
    assert shapes.num_parameters == 50 * 8 + 2 * (attention + 3 * 24 * 8 + 2 * 8) + 8
    assert shapes.kv_heads == 2


def test_a_configuration_with_experts_is_read_like_a_preset():
    config = {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "num_experts": 128,
        "moe_intermediate_size": 768,
    }  # fmt: skip
    assert decoder_of(config) == PRESETS["qwen3-30b-a3b"]


def test_a_configuration_with_latent_attention_is_read_like_a_preset():
    config = {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "head_dim": 192, "intermediate_size": 18432, "n_routed_experts": 256,
        "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    assert decoder_of(config) == PRESETS["deepseek-v3"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known here .*index.json instead"),
        ({"model_type": "llama"}, "the config.json of a llama model lacks 'num_attention_heads'"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_one_clear_error(config, message):
    with pytest.raises(LayoutError, match=message):
        decoder_of(config)


@pytest.fixture
def checkpoint(tmp_path):
    """Two safetensors files with their index and the model's configuration."""
    parts = {
        "a.safetensors": {f"model.layers.{i}.w": torch.zeros(i + 1, 3) for i in (10, 9)},
        "b.safetensors": {
            "model.norm": torch.zeros(4, dtype=torch.bfloat16),
            "head": torch.zeros((), dtype=torch.int64),
            "model.embed": torch.zeros(2),
        },
    }
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, tensors in parts.items() for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_key_value_heads": 4}}))
    return tmp_path


def test_an_index_gives_the_headers_of_its_files(checkpoint):
    shapes = read_shapes(str(checkpoint / "model.safetensors.index.json"))
    assert [(spec.name, spec.shape, spec.dtype) for spec in shapes.specs] == [
        ("model.embed", (2,), "float32"),
        ("model.layers.9.w", (10, 3), "float32"),
        ("model.layers.10.w", (11, 3), "float32"),
        ("head", (), "int64"),
        ("model.norm", (4,), "bfloat16"),
    ]
    assert shapes.num_bytes == 8 + 4 * 3 * (10 + 11) + 2 * 4 + 4 * 2
    assert shapes.kv_heads == 4


def test_a_folder_stands_for_its_index(checkpoint):
    assert read_shapes(str(checkpoint)) == read_shapes(str(checkpoint / "model.safetensors.index.json"))


def test_one_file_gives_its_header(checkpoint):
    found = Counter(spec.dtype for spec in read_shapes(str(checkpoint / "b.safetensors")).specs)
    assert found == {"bfloat16": 1, "int64": 1, "float32": 1}


def test_no_tensor_is_read(checkpoint):
    """A file that ends behind its header does."""
    path = checkpoint / "a.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])
    assert sum(math.prod(spec.shape) for spec in read_shapes(str(path)).specs) == 63


def test_a_missing_part_is_named(checkpoint):
    (checkpoint / "b.safetensors").unlink()
    with pytest.raises(LayoutError, match=r"names b.safetensors, which is not beside it \(1 of 2 files are missing\)"):
        read_shapes(str(checkpoint))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.safetensors", b"", "is not a safetensors file"),
        ("x.safetensors", b"\xff" * 64, "is not a safetensors file"),
        ("x.safetensors", (4).to_bytes(8, "little") + b"{{{{", "is not a safetensors file"),
        ("x.json", b"[]", "neither a safetensors file nor JSON"),
    ],
)
def test_a_file_of_another_kind_is_one_clear_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LayoutError, match=message):
        read_shapes(str(tmp_path / name))


def test_an_unknown_name_says_what_is_known():
    with pytest.raises(
        LayoutError, match=r"'lama-8b' is no file and no preset \(did you mean llama-8b\?\); known: smol"
    ):
        read_shapes("lama-8b")
