"""Sizes read from a config.json against the network that diffusers builds of it."""

import json
import math
import subprocess
import sys

import pytest
import torch
from wfm_parity import FAMILIES, make_tiny

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.estimate import estimate
from cosmos_rl_core.plan.shape import check_fit
from cosmos_rl_wfm.parallel.shape import model_shape, num_tokens, parameter_shapes

CLASSES = {"wan": "WanTransformer3DModel", "cosmos": "CosmosTransformer3DModel", "sd3": "SD3Transformer2DModel"}
VARIANTS = [
    ("wan", {}),
    ("wan", {"cross_attn_norm": False, "image_dim": 8, "added_kv_proj_dim": 24, "pos_embed_seq_len": 6}),
    ("cosmos", {}),
    ("cosmos", {"concat_padding_mask": True, "extra_pos_embed_type": None, "use_crossattn_projection": True}),
    ("cosmos", {"img_context_dim_in": 8, "img_context_dim_out": 12, "mlp_ratio": 1.5}),
    ("sd3", {}),
    ("sd3", {"qk_norm": None, "dual_attention_layers": ()}),
]


def build(family, changes):
    import diffusers

    kind = getattr(diffusers, CLASSES[family])
    given = {key: value for key, value in make_tiny(family).config.items() if not key.startswith("_")}
    network = kind(**{**given, **changes})
    return network, {**network.config, "_class_name": CLASSES[family]}


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_every_parameter_has_its_name_and_shape(family, changes):
    network, config = build(family, changes)
    shape = model_shape(config)
    assert shape is not None
    built = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    assert {spec.name: spec.shape for spec in shape.weights} == built
    assert (shape.num_layers, shape.heads, shape.hidden) == (config["num_layers"], 4, 4 * shape.head_dim)


def test_a_config_read_from_a_file_gives_the_same(tmp_path):
    network, config = build("cosmos", {})
    network.save_pretrained(tmp_path)
    assert model_shape(json.loads((tmp_path / "config.json").read_text())) == model_shape(config)


def test_adapters_count_inputs_and_outputs_of_each_layer_times_the_rank():
    LoraConfig = pytest.importorskip("peft", reason="an extra of the package").LoraConfig

    network, config = build("sd3", {})
    targets = ["to_q", "to_out.0", "add_k_proj"]
    network.add_adapter(LoraConfig(r=3, target_modules=targets))
    shape = model_shape(config, lora_rank=3, lora_targets=targets)
    assert shape is not None
    assert shape.adapter_parameters == sum(p.numel() for p in network.parameters() if p.requires_grad)


def test_classes_that_were_not_measured_have_no_shape():
    assert model_shape({"_class_name": "SanaTransformer2DModel", "num_layers": 2}) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_headers_of_files_give_the_same_as_the_built_network(tmp_path, family):
    network, config = build(family, {})
    network.save_pretrained(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert parameter_shapes(CLASSES[family], {}, files) == parameter_shapes(CLASSES[family], config)
    assert model_shape(config, files=files) == model_shape(config)


def test_published_sizes():
    wan = {
        "_class_name": "WanTransformer3DModel",
        "patch_size": [1, 2, 2],
        "num_attention_heads": 12,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 8960,
        "num_layers": 30,
        "cross_attn_norm": True,
    }
    shape = model_shape(wan, dtype="bfloat16")
    assert shape is not None
    assert sum(math.prod(spec.shape) for spec in shape.weights) == pytest.approx(1.42e9, rel=0.01)
    assert num_tokens(wan, (16, 21, 60, 104)) == 32760
    with pytest.raises(UserError, match=r"= 8 does not divide the model's 12 attention heads"):
        check_fit(shape, ParallelSection(cp=8), dims=ParallelDims(cp=8))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_memory_has_the_weights_to_the_byte(family):
    network, config = build(family, {})
    shape = model_shape(config)
    assert shape is not None
    found = estimate(shape, dims=ParallelDims(), policy=PolicySection(), tokens=48)
    assert found.parameters == 4 * sum(parameter.numel() for parameter in network.parameters())


class Saved:
    """Bytes that autograd keeps, each storage once."""

    def __init__(self, without):
        self.storages = {}
        self._without = {tensor.untyped_storage().data_ptr() for tensor in without}

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._without:
            self.storages[storage.data_ptr()] = storage
        return tensor

    def total(self):
        return sum(storage.nbytes() for storage in self.storages.values())


def kept_bytes(network, frames, height):
    """Bytes that one sample's forward pass leaves for its backward pass."""
    shape = (4, height, height) if "SD3" in type(network).__name__ else (4, frames, height, height)
    inputs = {
        "hidden_states": torch.randn(1, *shape),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 1, 16),
    }
    if "SD3" in type(network).__name__:
        inputs["pooled_projections"] = torch.randn(1, 16)
    saved = Saved([*network.parameters(), *network.buffers()])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        output = network(**inputs, return_dict=False)[0]
    del output
    return saved.total()


WIDE = {
    "wan": {"num_layers": 4, "attention_head_dim": 24, "ffn_dim": 384},
    "cosmos": {"num_layers": 4, "attention_head_dim": 24, "mlp_ratio": 4.0, "max_size": (4, 32, 32)},
    "sd3": {"num_layers": 4, "attention_head_dim": 24, "caption_projection_dim": 96},
}
"""Wide enough that the blocks' activations are the greater part, as they are in earnest."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_memory_is_near_what_activations_take(family):
    network, config = build(family, WIDE[family])
    shape = model_shape(config)
    assert shape is not None
    tokens = num_tokens(config, (4, 4, 32, 32) if family != "sd3" else (4, 1, 32, 32))
    planned = estimate(shape, dims=ParallelDims(), policy=PolicySection(), tokens=tokens)
    taken = kept_bytes(network, 4, 32)
    assert planned.activations + planned.logits == pytest.approx(taken, rel=0.2)


def test_sizes_and_axes_are_read_without_torch():
    read = "import sys, cosmos_rl_wfm.parallel.shape; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True).stdout == "False\n"
