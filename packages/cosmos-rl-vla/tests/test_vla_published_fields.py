"""Every field of a published configuration is used, has its default, has no effect here, or is refused by name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.models.openvla.family import read_config as read_openvla
from cosmos_rl_vla.models.pi.family import read_config

LEROBOT = {
    "n_obs_steps": 1,
    "input_features": {"observation.state": {"type": "STATE", "shape": [7]}},
    "output_features": {"action": {"type": "ACTION", "shape": [7]}},
    "device": "cuda",
    "use_amp": False,
    "use_peft": False,
    "push_to_hub": True,
    "repo_id": None,
    "private": None,
    "tags": None,
    "license": None,
    "pretrained_path": None,
    "pretrained_revision": None,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "dtype": "float32",
    "chunk_size": 50,
    "n_action_steps": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "num_inference_steps": 10,
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
    "min_period": 0.004,
    "max_period": 4.0,
    "use_relative_actions": False,
    "relative_exclude_joints": ["gripper"],
    "action_feature_names": None,
    "rtc_config": None,
    "image_resolution": [224, 224],
    "empty_cameras": 0,
    "tokenizer_max_length": 200,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    "gradient_checkpointing": False,
    "compile_model": False,
    "compile_mode": "max-autotune",
    "freeze_vision_encoder": False,
    "train_expert_only": False,
    "optimizer_lr": 2.5e-5,
    "optimizer_betas": [0.9, 0.95],
    "optimizer_eps": 1e-8,
    "optimizer_weight_decay": 0.01,
    "optimizer_grad_clip_norm": 1.0,
    "scheduler_warmup_steps": 1000,
    "scheduler_decay_steps": 30000,
    "scheduler_decay_lr": 2.5e-6,
}
"""All fields of PI05Config in lerobot 0.6.1, as its config.json has them. PI0Config has the same."""
OF_THEIR_RUNS = {
    *("device", "use_amp", "push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path", "dtype"),
    *("pretrained_revision", "gradient_checkpointing", "compile_model", "compile_mode", "freeze_vision_encoder"),
    *("train_expert_only", *(name for name in LEROBOT if name.startswith(("optimizer_", "scheduler_")))),
    # nothing without relative actions; cameras that are masked out; read from the processors and checked here
    *("relative_exclude_joints", "action_feature_names", "empty_cameras", "input_features"),
}
"""Fields that change nothing of a policy."""
OTHERS = {
    "image_resolution": [448, 448],
    "output_features": {"action": {"type": "ACTION", "shape": [6]}},
    "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    "rtc_config": {"enabled": True, "execution_horizon": 10},
    "text_config": {"vocab_size": 32128},
}


def other_value(name, value):
    match value:
        case _ if name in OTHERS:
            return OTHERS[name]
        case bool():
            return not value
        case int() | float():
            return value * 2 + 1
        case list():
            return [*value, *value]
        case dict():
            return {**value, "another": "value"}
    return "another"


def write(directory, held, **files):
    (directory / "config.json").write_text(json.dumps(held))
    for name, steps in files.items():
        (directory / f"policy_{name}processor.json").write_text(json.dumps({"steps": steps}))
    return directory


def walked(held, read, *, without_effect):
    """Change each field of a configuration, and return those without an effect or a refusal."""
    plain, silent = read(held), set()
    for name, value in held.items():
        if name in ("type", "model_type"):  # which reader
            continue
        try:
            found = read({**held, name: other_value(name, value)})
        except UserError as error:
            assert name in str(error), str(error)
        else:
            if found == plain:
                silent.add(name)
    assert silent == without_effect & set(held)
    with pytest.raises(UserError, match=r"config\.json.* memory_layers = 3 is a field that is not known here"):
        read({**held, "memory_layers": 3})


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_every_field_of_lerobot(tmp_path, family):
    tokens = {"pi0": 48, "pi05": 200}[family]
    held = {"type": family, **LEROBOT, "tokenizer_max_length": tokens, "num_inference_steps": 7, "n_action_steps": 20}

    def read(changed):
        return read_config(write(tmp_path, changed))

    walked(held, read, without_effect=OF_THEIR_RUNS)
    assert read(held).max_prompt_tokens == tokens
    assert read({**held, "tokenizer_max_length": 77}).max_prompt_tokens == 77


def test_relative_actions_of_lerobots_processors_are_refused(tmp_path):
    step = {"registry_name": "relative_actions_processor", "config": {"enabled": False, "exclude_joints": ["gripper"]}}
    held = {"type": "pi05", **LEROBOT}
    read_config(write(tmp_path, held, pre=[step], post=[{"registry_name": "absolute_actions_processor"}]))
    step["config"]["enabled"] = True
    with pytest.raises(UserError, match=r"policy_preprocessor\.json, relative_actions_processor: enabled = true"):
        read_config(write(tmp_path, held, pre=[step]))
    with pytest.raises(UserError, match=r"policy_postprocessor\.json: the step 'clip_processor' is not supported"):
        read_config(write(tmp_path, held, pre=[], post=[{"registry_name": "clip_processor"}]))
    step = {"registry_name": "normalizer_processor", "config": {"norm_map": {"VISUAL": "MEAN_STD"}}}
    with pytest.raises(UserError, match=r"policy_preprocessor\.json, .*: VISUAL is normalised by MEAN_STD"):
        read_config(write(tmp_path, held, pre=[step]))


OPENPI = {
    "action_dim": 32,
    "action_horizon": 10,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "precision": "bfloat16",
    "dtype": "bfloat16",
    "max_token_len": 200,
    "pi05": True,
    "discrete_state_input": True,
    "pytorch_compile_mode": "max-autotune",
}
"""What openpi's conversion to PyTorch writes, and the other fields of its Pi0Config."""


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_every_field_of_openpi(tmp_path, family):
    norm = {"pi0": "weight", "pi05": "dense.weight"}[family]
    name = f"paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm.{norm}"
    save_file({name: torch.zeros(1)}, tmp_path / "model.safetensors")
    held = {**OPENPI, "pi05": family == "pi05", "discrete_state_input": family == "pi05"}
    held["max_token_len"] = {"pi0": 48, "pi05": 200}[family]
    silent = {"precision", "dtype", "pytorch_compile_mode"}
    walked(held, lambda changed: read_config(write(tmp_path, changed)), without_effect=silent)


STATISTICS = {name: [value] * 7 for name, value in (("q01", -1.0), ("q99", 1.0), ("mean", 0.0), ("std", 1.0))}
OPENVLA = {
    "architectures": ["OpenVLAForActionPrediction"],
    "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
    "arch_specifier": "no-align+fused-gelu-mlp",
    "hf_llm_id": "meta-llama/Llama-2-7b-hf",
    "image_resize_strategy": "resize-naive",
    "image_sizes": [224, 224],
    "llm_backbone_id": "llama2-7b-pure",
    "llm_max_length": 2048,
    "model_type": "openvla",
    "n_action_bins": 256,
    "norm_stats": {"bridge_orig": {"action": STATISTICS}},
    "output_projector_states": False,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "text_config": {"model_type": "llama", "pad_token_id": 32000, "torch_dtype": "bfloat16", "vocab_size": 32064},
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_fused_vision_backbone": True,
    "vision_backbone_id": "dinosiglip-vit-so-224px",
}
"""config.json of openvla-7b."""


def test_every_field_of_openvla(tmp_path):
    save_file({"projector.fc1.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    # names of files and people's models; norm_stats are read by `published_stats`
    silent = {"architectures", "auto_map", "hf_llm_id", "llm_max_length", "torch_dtype", "transformers_version"}
    silent |= {"norm_stats", "pad_token_id", "vision_backbone_id", "llm_backbone_id"}

    def read(held):
        return read_openvla(write(tmp_path, held), family="openvla", action_dim=7)

    walked({**OPENVLA}, read, without_effect=silent)
    with pytest.raises(UserError, match=r"text_config: adapter_layers = 3 is a field that is not known here"):
        read({**OPENVLA, "text_config": {**OPENVLA["text_config"], "adapter_layers": 3}})
    with pytest.raises(UserError, match=r"text_config: attention_dropout = 0\.1 is not supported"):
        read({**OPENVLA, "text_config": {**OPENVLA["text_config"], "attention_dropout": 0.1}})
