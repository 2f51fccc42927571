"""Landing maps of real vLLM models, tiny and on CPU, against what their own loaders do.

The oracle loads tensors whose elements are numbered through the whole checkpoint, so that every element of every
parameter says where it came from.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

pytest.importorskip("vllm")

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.options import PLAIN_WEIGHTS
from cosmos_rl_llm.engines.vllm.weight_map.chart import chart_of
from cosmos_rl_llm.engines.vllm.weight_map.landing import Landing, replica_manifest
from cosmos_rl_llm.engines.vllm.weight_map.names import VllmNames
from cosmos_rl_llm.engines.vllm.weight_map.region import LandingRegion
from cosmos_rl_llm.engines.vllm.weight_map.table import place
from cosmos_rl_llm.engines.vllm.weight_map.trace import trace
from cosmos_rl_llm.engines.vllm.weight_map.twin import acting_as, detached, twin
from cosmos_rl_transfer.layout.manifest import Manifest

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

_SIZES: dict[str, Any] = dict(
    hidden_size=64, num_hidden_layers=2, vocab_size=100, max_position_embeddings=128, dtype="float32"
)
_WIDE: dict[str, Any] = dict(intermediate_size=96)
_HEADS: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=32)
_MLA: dict[str, Any] = dict(
    num_attention_heads=8, num_key_value_heads=8, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32,
    qk_rope_head_dim=16, v_head_dim=32,
)  # fmt: skip
_ROUTED: dict[str, Any] = dict(
    n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
    topk_method="noaux_tc", moe_intermediate_size=128,
)  # fmt: skip

FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "llama", "LlamaForCausalLM", _HEADS | _WIDE),
    "qwen2": (
        "Qwen2Config", "qwen2", "Qwen2ForCausalLM", _HEADS | _WIDE | {"head_dim": 8, "tie_word_embeddings": True}
    ),
    "qwen3": ("Qwen3Config", "qwen3", "Qwen3ForCausalLM", _HEADS | _WIDE),
    "qwen3_moe": (
        "Qwen3MoeConfig", "qwen3_moe", "Qwen3MoeForCausalLM",
        _HEADS | _WIDE | {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma3": ("Gemma3TextConfig", "gemma3", "Gemma3ForCausalLM", _HEADS | _WIDE | {"sliding_window": 32}),
    "mixtral": (
        "MixtralConfig", "mixtral", "MixtralForCausalLM", _HEADS | {"intermediate_size": 128, "num_local_experts": 4}
    ),
    "deepseek_v3": ("DeepseekV3Config", "deepseek_v2", "DeepseekV3ForCausalLM", _MLA | _ROUTED | _WIDE),
    "gpt_oss": (
        "GptOssConfig", "gpt_oss", "GptOssForCausalLM",
        _HEADS | {"num_key_value_heads": 4, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
                  "sliding_window": 32},
    ),
}  # fmt: skip
"""Configuration, vLLM's module, class, sizes."""
OTHERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig", "ernie45_moe", "Ernie4_5_MoeForCausalLM",
        _HEADS | _WIDE | {"moe_intermediate_size": 128, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    ),
    "gpt2": ("GPT2Config", "gpt2", "GPT2LMHeadModel", {"num_attention_heads": 4}),
    "bloom": ("BloomConfig", "bloom", "BloomForCausalLM", {"n_head": 4}),
    "llama4": (
        "Llama4TextConfig", "llama4", "Llama4ForCausalLM",
        _HEADS | _WIDE | {"num_local_experts": 4, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
                          "attention_chunk_size": 32},
    ),
    "mamba2": (
        "Mamba2Config", "mamba2", "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 2, "tie_word_embeddings": True},
    ),
    "falcon_h1": (
        "FalconH1Config", "falcon_h1", "FalconH1ForCausalLM",
        _HEADS | _WIDE | {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
                          "mamba_n_groups": 2, "tie_word_embeddings": False},
    ),
}  # fmt: skip
"""Those that the table alone gets wrong, or does not know."""
FP8_CHANNELS: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"all": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    }},
}  # fmt: skip
"""The one quantised layout of linear layers that vLLM can process on any CPU."""
WITH_EXPERTS = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]


@dataclass(frozen=True)
class Checkpoint:
    """A tiny model on disk."""

    path: Path
    specs: tuple[WeightSpec, ...]

    @property
    def numbered(self) -> dict[str, Tensor]:
        """Tensors whose elements count 1, 2, ... through the checkpoint, exact in float32."""
        tensors, first = {}, 1
        for spec in self.specs:
            count = math.prod(spec.shape)
            tensors[spec.name] = torch.arange(first, first + count, dtype=torch.float32).view(spec.shape)
            first += count
        assert first < 1 << 24
        return tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Checkpoint]]:
    """Write the checkpoint of a family once, and make vLLM know its class without a look into another process."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def write(family: str) -> Checkpoint:
        if family not in made:
            made[family] = _write(family, root / family)
        return made[family]

    yield write
    gc.collect()  # vLLM's models: their products read a tensor when they are freed, and a later test may have fake ones


def _write(family: str, path: Path) -> Checkpoint:
    from importlib import import_module

    import transformers
    from transformers.utils import logging
    from vllm import ModelRegistry

    logging.disable_progress_bar()
    config, module, name, sizes = (FAMILIES | OTHERS)[family]
    ModelRegistry.register_model(name, getattr(import_module(f"vllm.model_executor.models.{module}"), name))
    made = getattr(transformers, config)(**(_SIZES | sizes))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(path)
    with safe_open(path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return Checkpoint(path, tuple(WeightSpec(name=n, shape=shape, dtype="float32") for n, shape in shapes.items()))


def vllm_config(path: Path, *, dtype: Any = "float32", **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(path), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, dtype=dtype,
        distributed_executor_backend="mp", **options,
    )  # fmt: skip
    return arguments.create_engine_config()


def build(config: Any) -> nn.Module:
    """The model with memory, all zeros."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = detached(config)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(config)
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def loaded(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters after the model's own loader took the whole checkpoint."""
    model: Any = build(config)
    model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    return dict(model.named_parameters())


def places_of(model: Any, specs: Sequence[WeightSpec], by: str) -> list[LandingRegion]:
    """What the table alone, the trace alone, or both together say."""
    if by == "table":
        names = VllmNames(model)
        return [found for spec in specs for found in place(names, spec.name, spec.shape) or ()]
    places = trace(model, specs).places if by == "trace" else chart_of(model, specs).places
    return [found for several in places.values() for found in several]


def landed(
    config: Any, specs: Sequence[WeightSpec], tensors: Mapping[str, Tensor], *, by: str = "both"
) -> dict[str, Tensor]:
    """The parameters after each box was written to its places."""
    model = build(config)
    parameters = dict(model.named_parameters())
    for found in places_of(twin(config), specs, by):
        found.view(parameters[found.parameter]).copy_(tensors[found.name][found.box.slices()])
    return parameters


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_lands_where_the_loader_puts_it(family, tp, checkpoint):
    made = checkpoint(family)
    config = vllm_config(made.path, tensor_parallel_size=tp)
    for rank in range(tp):
        with acting_as(rank, tp=tp):
            expected = loaded(config, made.numbered)
            assert same(landed(config, made.specs, made.numbered, by="table"), expected)
            assert same(landed(config, made.specs, made.numbered, by="trace"), expected)


def test_a_bias_that_its_family_never_trains_lands_where_the_loader_puts_it(checkpoint):
    made = checkpoint("ernie4_5_moe")
    config = vllm_config(made.path)
    assert any("e_score_correction_bias" in spec.name for spec in made.specs)
    with acting_as(0, tp=1):
        assert same(landed(config, made.specs, made.numbered), loaded(config, made.numbered))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_spread_over_ranks_land_whole(family, checkpoint):
    made = checkpoint(family)
    config = vllm_config(made.path, tensor_parallel_size=2, enable_expert_parallel=True)
    for rank in range(2):
        with acting_as(rank, tp=2):
            expected = loaded(config, made.numbered)
            assert same(landed(config, made.specs, made.numbered, by="table"), expected)
            assert same(landed(config, made.specs, made.numbered, by="trace"), expected)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_square_matrix_that_the_loader_transposes_lands_transposed(tp, checkpoint):
    """GPT-2 keeps [in, out]; the table sees no more than that the shape of `attn.c_proj` is right."""
    made = checkpoint("gpt2")
    config = vllm_config(made.path, tensor_parallel_size=tp)
    for rank in range(tp):
        with acting_as(rank, tp=tp):
            expected = loaded(config, made.numbered)
            assert not same(landed(config, made.specs, made.numbered, by="table"), expected)
            assert same(landed(config, made.specs, made.numbered), expected)


def test_a_tensor_that_lands_neither_by_the_table_nor_by_the_trace_is_refused(checkpoint):
    def load(weights: Any) -> None:
        for _, tensor in weights:
            torch.nn.init.constant_(model.lm_head.weight.data, 3.0)
            model.model.norm.weight.data.copy_(tensor[0])

    made = checkpoint("llama")
    spec = next(spec for spec in made.specs if spec.name == "lm_head.weight")
    with acting_as(0):
        model: Any = twin(vllm_config(made.path))
        model.load_weights = load
        with pytest.raises(ValueError, match=r'lm_head\.weight cannot be delivered.*LlamaFor.*engine = "torch"'):
            chart_of(model, [spec])


def test_a_loader_that_keeps_what_it_computes_from_a_parameter_is_refused(checkpoint):
    made = checkpoint("llama")
    with acting_as(0):
        model: Any = twin(vllm_config(made.path))
        load, kept = model.load_weights, []
        model.load_weights = lambda weights: (load(weights), kept.append(torch.cat([model.model.norm.weight] * 2)))
        with pytest.raises(ValueError, match=r"LlamaForCausalLM computes values from model\.norm\.weight, which new"):
            chart_of(model, made.specs)


def stacked(made: Checkpoint) -> Checkpoint:
    """The checkpoint as transformers holds it while it trains: all experts of a layer in two tensors."""
    sizes = {"gate_up_proj": (4, 256, 64), "down_proj": (4, 64, 128)}
    kept = [spec for spec in made.specs if ".experts." not in spec.name]
    added = [
        WeightSpec(name=f"model.layers.{layer}.mlp.experts.{name}", shape=shape, dtype="float32")
        for layer in range(2)
        for name, shape in sizes.items()
    ]
    return Checkpoint(made.path, (*kept, *added))


@pytest.mark.parametrize(("tp", "ep"), [(1, False), (2, False), (4, False), (2, True)])
def test_experts_stacked_in_one_tensor_land_where_the_loader_puts_them(tp, ep, checkpoint):
    made = stacked(checkpoint("qwen3_moe"))
    config = vllm_config(made.path, tensor_parallel_size=tp, enable_expert_parallel=ep)
    for rank in range(tp):
        with acting_as(rank, tp=tp):
            expected = loaded(config, made.numbered)
            assert same(landed(config, made.specs, made.numbered), expected)
            chart = chart_of(twin(config), made.specs)
        assert chart.is_scattered("model.layers.0.mlp.experts.gate_up_proj") == (tp > 1 and not ep)
        assert not chart.is_scattered("model.layers.0.mlp.experts.down_proj")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_knows_every_tensor_of_the_family(family, checkpoint):
    made = checkpoint(family)
    config = vllm_config(made.path, tensor_parallel_size=2)
    with acting_as(1, tp=2):
        model = twin(config)
        names, places = VllmNames(model), trace(model, made.specs).places
        assert {spec.name: place(names, spec.name, spec.shape) for spec in made.specs} == places


def manifest_for(config: Any, specs: Sequence[WeightSpec]) -> Manifest:
    """The parts of all ranks of a replica, in one process: rank = pp_rank * tp_size + tp_rank."""
    tp, pp = config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size
    parts = []
    for rank in range(tp * pp):
        with acting_as(rank, tp=tp, pp=pp):
            parts.append(Manifest(chart_of(twin(config), specs).layouts(rank)))
    return replica_manifest(parts)


def test_pipeline_stages_need_only_their_layers(checkpoint):
    made = checkpoint("qwen3")
    config = vllm_config(made.path, tensor_parallel_size=2, pipeline_parallel_size=2)
    manifest = manifest_for(config, made.specs)
    assert manifest.ranks == (0, 1, 2, 3)
    holders = {layout.spec.name: tuple(layout.boxes) for layout in manifest.layouts}
    assert holders["model.layers.0.mlp.down_proj.weight"] == (0, 1)
    assert holders["model.layers.1.mlp.down_proj.weight"] == (2, 3)
    assert holders["lm_head.weight"] == (2, 3)


def test_key_heads_shared_by_ranks_are_the_same_box(checkpoint):
    manifest = manifest_for(vllm_config((made := checkpoint("llama")).path, tensor_parallel_size=4), made.specs)
    boxes = {layout.spec.name: layout.boxes for layout in manifest.layouts}["model.layers.0.self_attn.k_proj.weight"]
    assert [boxes[rank].offset for rank in range(4)] == [(0, 0), (0, 0), (32, 0), (32, 0)]
    assert {box.shape for box in boxes.values()} == {(32, 64)}


def test_a_padded_vocabulary_leaves_the_last_rank_what_is_left(checkpoint):
    manifest = manifest_for(vllm_config((made := checkpoint("llama")).path, tensor_parallel_size=4), made.specs)
    boxes = {layout.spec.name: layout.boxes for layout in manifest.layouts}["lm_head.weight"]
    assert [boxes[rank].shape[0] for rank in range(4)] == [32, 32, 32, 4]


def test_a_manifest_has_the_dtypes_of_the_engine_whichever_rank_holds_a_tensor(checkpoint):
    made = checkpoint("deepseek_v3")
    config = vllm_config(made.path, dtype="bfloat16", tensor_parallel_size=2, enable_expert_parallel=True)
    dtypes = {name: spec.dtype for name, spec in manifest_for(config, made.specs).specs.items()}
    assert list(dtypes) == [spec.name for spec in made.specs]
    assert [name for name, dtype in dtypes.items() if dtype != "bfloat16"] == [
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ]


def redundant_experts(made: Checkpoint) -> Any:
    """A configuration with two spare experts; vLLM would refuse to serve it on CPU, but builds and loads it."""
    config = vllm_config(made.path, tensor_parallel_size=2, enable_expert_parallel=True)
    config.parallel_config.enable_eplb = True
    config.parallel_config.eplb_config.num_redundant_experts = 2
    return config


def test_every_copy_of_a_redundant_expert_is_a_place(checkpoint):
    made = checkpoint("qwen3_moe")
    config = redundant_experts(made)
    for rank in range(2):
        with acting_as(rank, tp=2):
            expected = loaded(config, made.numbered)
            assert same(landed(config, made.specs, made.numbered, by="table"), expected)
            assert same(landed(config, made.specs, made.numbered), expected)


def serving_config(path: Path, family: str) -> Any:
    """A config that computes in float32; vLLM's own choice for latent attention on CPUs with AMX does not."""
    return vllm_config(path, **({"attention_backend": "CPU_MLA"} if family == "deepseek_v3" else {}))


def process(model: nn.Module, config: Any) -> None:
    """What vLLM does between loading and serving: on CPU, pack."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with set_current_vllm_config(config):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))


def products(model: nn.Module) -> dict[str, Tensor]:
    """What each packed layer computes."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, layer in model.named_modules():
        packed: Any = vars(layer).get("cpu_linear")
        if packed is not None:
            width = getattr(layer, "input_size_per_partition", None) or layer.input_size
            found[name] = packed(torch.randn(3, width, generator=generator), layer.weight, None)
    assert found
    return found


def random_tensors(specs: Sequence[WeightSpec], *, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}


def served(config: Any, tensors: Mapping[str, Tensor], *, take: Callable[[Any], None] | None = None) -> nn.Module:
    """The model as vLLM serves it after loading; `take` may change it before that."""
    model: Any = build(config)
    if take is not None:
        take(model)
    model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    process(model, config)
    return model


def update(landing: Landing, tensors: Mapping[str, Tensor], *, rank: int = 0) -> None:
    """What a subscriber and the engine do for each version."""
    boxes = {layout.spec.name: layout.boxes for layout in landing.manifest.layouts}
    for name, view in landing.views.items():
        view.copy_(tensors[name][boxes[name][rank].slices()])
    landing.settle()


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_packed_layers_are_reloaded_and_compute_with_the_new_weights(family, checkpoint):
    made = checkpoint(family)
    config = serving_config(made.path, family)
    old, *versions = (random_tensors(made.specs, seed=seed) for seed in range(3))
    with acting_as(0):
        model = served(config, old)
        landing = Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=0)
        assert landing.reloaded and not landing.untouched
        for new in versions:
            update(landing, new)
            expected = served(config, new)
            assert same(dict(model.named_parameters()), dict(expected.named_parameters()))
            assert same(products(model), products(expected))


def test_what_a_rank_holds_as_zeros_is_zero_after_a_reload(checkpoint):
    """gpt-oss adds the bias of the experts' last product on the first rank alone."""
    made = checkpoint("gpt_oss")
    config = vllm_config(made.path, tensor_parallel_size=2)
    old, new = (random_tensors(made.specs, seed=seed) for seed in range(2))
    with acting_as(1, tp=2):
        model, expected = served(config, old), served(config, new)
        for name, parameter in model.named_parameters():
            if name.endswith("w2_bias"):
                parameter.data.fill_(7.0)  # whatever the memory held before
        landing = Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=1)
        update(landing, new, rank=1)
    assert same(dict(model.named_parameters()), dict(expected.named_parameters()))


def test_parts_that_lie_apart_are_copied_to_their_places(checkpoint):
    made = stacked(checkpoint("qwen3_moe"))
    config = vllm_config(made.path, tensor_parallel_size=2)
    old, new = (random_tensors(made.specs, seed=seed) for seed in range(2))
    with acting_as(1, tp=2):
        model, expected = served(config, old), served(config, new)
        landing = Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=1)
        update(landing, new, rank=1)
    assert landing.scattered == tuple(f"model.layers.{n}.mlp.experts.gate_up_proj" for n in range(2))
    assert same(dict(model.named_parameters()), dict(expected.named_parameters()))


def test_plain_layers_are_written_in_place(checkpoint):
    made = checkpoint("deepseek_v3")
    config = serving_config(made.path, "deepseek_v3")
    old, new = (random_tensors(made.specs, seed=seed) for seed in range(2))
    with acting_as(0):
        model = served(config, old)
        landing = Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=0)
    name = "model.layers.0.input_layernorm.weight"
    landing.views[name].copy_(new[name])
    assert name not in landing.reloaded
    assert torch.equal(model.get_parameter(name), new[name])


def convolutions(model: nn.Module) -> dict[str, Tensor]:
    """What Mamba's layers compute with: views of parameters."""
    return {name: buffer for name, buffer in model.named_buffers() if "conv_weights" in name}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("family", "computed"),
    [
        ("mamba2", {"A_log"}),
        ("falcon_h1", {"A_log"}),
        ("bloom", {"query_key_value"}),  # heads are reordered
        ("llama4", {"q_proj", "k_proj", "v_proj"}),  # queries and keys are; values lie beside them
    ],
)
def test_what_the_loader_computes_is_computed_anew_and_the_rest_stays_live(family, computed, tp, checkpoint):
    made = checkpoint(family)
    config = vllm_config(made.path, tensor_parallel_size=tp, quantization=PLAIN_WEIGHTS)
    old, *versions = (random_tensors(made.specs, seed=seed) for seed in range(3))
    for rank in range(tp):
        with acting_as(rank, tp=tp):
            model = served(config, old)
            landing = Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=rank)
            by_loader = {name for name, why in landing.reloaded.items() if why.startswith("the loader computes")}
            assert by_loader == {spec.name for spec in made.specs if computed & set(spec.name.split("."))}
            assert not landing.untouched
            for new in versions:
                update(landing, new, rank=rank)
                expected = served(config, new)
                assert same(dict(model.named_parameters()), dict(expected.named_parameters()))
                assert same(convolutions(model), convolutions(expected))
                assert same(products(model), products(expected))


def test_a_view_of_a_parameter_that_vllm_moved_is_refused(checkpoint):
    """As on CPUs with bfloat16 instructions, where vLLM packs the weights of convolutions."""
    made = checkpoint("mamba2")
    config = vllm_config(made.path, quantization=PLAIN_WEIGHTS)
    with acting_as(0):
        model = served(config, random_tensors(made.specs, seed=0))
        moved = next(layer for name, layer in model.named_modules() if name.endswith("conv1d"))
        moved.weight.data = moved.weight.data.clone()
        with pytest.raises(ValueError, match=r"packed .*conv1d\.weight .*conv_weights.* would not update"):
            Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=0)


class Kernels:
    """Attention that keeps a copy of the layer's sinks in another type, as FlashInfer's does."""

    def __init__(self, sinks: Tensor) -> None:
        self.source, self.sinks = sinks, sinks.double()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.sinks.copy_(self.source)


def test_what_attention_kernels_keep_of_the_weights_is_made_anew(checkpoint):
    made = checkpoint("gpt_oss")
    config = vllm_config(made.path)
    old, new = (random_tensors(made.specs, seed=seed) for seed in range(2))
    with acting_as(0):
        model: Any = served(config, old)
        layer = model.model.layers[0].attn
        layer.attn.impl = Kernels(layer.sinks)
        landing = Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=0)
        update(landing, new)
    assert torch.equal(layer.attn.impl.sinks, new["model.layers.0.self_attn.sinks"].double())


def test_a_layer_whose_method_processes_more_than_its_base_is_reloaded(checkpoint):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Splits(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.half = layer.weight / 2

    made = checkpoint("qwen3")
    config = vllm_config(made.path, quantization=PLAIN_WEIGHTS)
    with acting_as(0):
        model: Any = served(config, random_tensors(made.specs, seed=0))
        model.model.layers[0].mlp.down_proj.quant_method = Splits()
        landing = Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=0)
        update(landing, new := random_tensors(made.specs, seed=1))
    name = "model.layers.0.mlp.down_proj.weight"
    assert landing.reloaded[name] == f"{name}: Splits processes it after loading"
    assert torch.equal(model.model.layers[0].mlp.down_proj.half, new[name] / 2)


def test_a_model_that_computes_from_its_weights_after_loading_is_refused(checkpoint):
    made = checkpoint("llama")
    config = vllm_config(made.path)
    with acting_as(0):
        model: Any = served(config, random_tensors(made.specs, seed=0))
        fused = type("Fuses", (type(model),), {"process_weights_after_loading": lambda self: None})
        model.__class__ = fused
        with pytest.raises(ValueError, match=r'Fuses computes values from its weights.*engine = "torch"'):
            Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=0)


def doubles_the_last_norm(model: Any) -> None:
    """A loader that computes from one tensor."""
    load = model.load_weights
    model.load_weights = lambda weights: load((n, w * 2 if n == "model.norm.weight" else w) for n, w in weights)


def test_the_table_does_not_hide_that_a_loader_computes(checkpoint):
    made = checkpoint("qwen3")
    config = vllm_config(made.path)
    old, new = (random_tensors(made.specs, seed=seed) for seed in range(2))
    with acting_as(0):
        model, bare = served(config, old, take=doubles_the_last_norm), twin(config)
        assert place(VllmNames(bare), "model.norm.weight", (64,)) is not None
        doubles_the_last_norm(bare)
        landing = Landing(model, chart_of(bare, made.specs), vllm_config=config, rank=0)
        update(landing, new)
    assert landing.reloaded["model.norm.weight"] == "the loader computes model.norm.weight"
    assert torch.equal(model.get_parameter("model.norm.weight"), 2 * new["model.norm.weight"])


def scales_the_last_norm(model: Any) -> None:
    """A loader that asks for a value while it loads."""
    load = model.load_weights
    model.load_weights = lambda weights: load(
        (n, w * w.abs().max().item() if n == "model.norm.weight" else w) for n, w in weights
    )


def test_a_loader_that_asks_for_values_gets_all_tensors_whole(checkpoint):
    made = checkpoint("qwen3")
    config = vllm_config(made.path)
    old, new = (random_tensors(made.specs, seed=seed) for seed in range(2))
    with acting_as(0):
        model, bare = served(config, old, take=scales_the_last_norm), twin(config)
        scales_the_last_norm(bare)
        landing = Landing(model, chart_of(bare, made.specs), vllm_config=config, rank=0)
        update(landing, new)
        expected = served(config, new, take=scales_the_last_norm)
    assert "reads values" in landing.reloaded["model.norm.weight"]
    assert same(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert same(products(model), products(expected))


def with_row_scales(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of linear layers as float8 with a scale for each row, as compressed-tensors names them."""
    published: dict[str, Tensor] = {}
    for name, weight in weights.items():
        published[name] = weight
        if name.endswith("proj.weight"):
            scale = (weight.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-6)
            published |= {name: (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    return published


def test_weights_quantised_by_the_sender_land_with_their_scales(checkpoint):
    made = checkpoint("qwen3")
    config = vllm_config(made.path, dtype="bfloat16", hf_overrides={"quantization_config": FP8_CHANNELS})
    old, new = (
        with_row_scales({n: t.bfloat16() for n, t in random_tensors(made.specs, seed=seed).items()})
        for seed in range(2)
    )
    specs = [WeightSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for n, t in new.items()]
    with acting_as(0):
        model, expected = served(config, old), served(config, new)
        landing = Landing(model, chart_of(twin(config), specs), vllm_config=config, rank=0)
        update(landing, new)
    assert "processes it after loading" in landing.reloaded["model.layers.0.mlp.down_proj.weight_scale"]
    found, wanted = ({name: p.view(torch.uint8) for name, p in m.named_parameters()} for m in (model, expected))
    assert same(found, wanted)


def test_weights_without_scales_are_refused_by_an_engine_that_wants_them(checkpoint):
    made = checkpoint("qwen3")
    config = vllm_config(made.path, dtype="bfloat16", hf_overrides={"quantization_config": FP8_CHANNELS})
    with acting_as(0), pytest.raises(ValueError, match="publish quantised weights with their scales"):
        chart_of(twin(config), made.specs)


def test_a_layer_is_not_reloaded_in_part(checkpoint):
    made = checkpoint("qwen2")
    config = vllm_config(made.path)
    specs = [spec for spec in made.specs if not spec.name.endswith("proj.bias")]
    with acting_as(0):
        model = served(config, random_tensors(made.specs, seed=0))
        with pytest.raises(ValueError, match=r"qkv_proj\.bias is not among the delivered tensors"):
            Landing(model, chart_of(twin(config), specs), vllm_config=config, rank=0)


def test_one_memory_for_two_trained_tensors_is_refused(checkpoint):
    made = checkpoint("llama")
    config = vllm_config(made.path)
    with acting_as(0):
        model: Any = served(config, random_tensors(made.specs, seed=0))
        model.lm_head.weight = model.model.embed_tokens.weight
        with pytest.raises(ValueError, match="share memory in the engine but are trained separately"):
            Landing(model, chart_of(twin(config), made.specs), vllm_config=config, rank=0)
