"""Real models on fake ranks: bytes of parameters, calls and bytes of collectives are those of `cosmos-rl plan`.

One process takes the place of one rank, parameters are on meta, and nothing is sent. The quick cases have few layers.
"""

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import InferenceMode
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from cosmos_rl_core.parallel.axes import expert
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import materialise, parameters_on_meta
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.estimate import estimate
from cosmos_rl_core.plan.live_bytes import LiveBytes
from cosmos_rl_core.plan.needs import START
from cosmos_rl_core.plan.traffic import traffic
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.types import Share
from cosmos_rl_llm import build
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.data.collate import TrainSequence, pack_batch
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.model import weights
from cosmos_rl_llm.model.causal_lm import empty_model
from cosmos_rl_llm.model.checkpoint import read_shape
from cosmos_rl_llm.model.weights import find_weights, specs_of_config
from cosmos_rl_llm.policy.pipelined import PipelinedPolicy, TermStage
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions
from doubles.fake_ranks import Collectives, fake_rank, faked

COMMON = {"max_position_embeddings": 8192, "tie_word_embeddings": False}
SIZES = {
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "llama-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3-235b": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "norm_topk_prob": True,
    },
}
SIZES["gemma2-9b"] = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 256000,
}
LAYOUTS = {
    "qwen2.5-7b": {"dp_shard": 4},
    "llama-70b": {"dp_shard": 8, "tp": 8},
    "qwen3-235b": {"dp_shard": 512, "ep": 64},
}
TOKENS = 512


def policy_of(name, mesh, *, layers=None, checkpointing="full", tied=False, **section):
    """The policy of one rank, on meta, with matrix products in bfloat16."""
    values = {**COMMON, **SIZES[name], **({"num_hidden_layers": layers} if layers else {}), "tie_word_embeddings": tied}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with no_init_weights(), parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
    section = ParallelSection(**{**dict(mesh.dims), "ep": mesh.dims.ep, **section})
    setup = ModelSetup(mesh=mesh, parallel=section, memory=MemorySection(activation_checkpointing=checkpointing))
    kind = PipelinedPolicy if mesh.dims.pp > 1 else CausalLMPolicy
    return kind(model, TermOptions(compute_dtype=torch.bfloat16), setup=setup), config


def planned(config, folder, dims):
    config.save_pretrained(folder)
    shape = read_shape(folder, LLMModelConfig(path=str(folder), dtype="bfloat16"), specs_of_config(folder))
    assert shape is not None
    section = PolicySection(parallel=ParallelSection(**{**dict(dims), "ep": dims.ep}))
    return shape, estimate(shape, dims=dims, policy=section, tokens=TOKENS)


def local_bytes(policy):
    parameters = list(policy.module.parameters())
    assert all(isinstance(parameter, DTensor) and parameter.is_meta for parameter in parameters)
    return sum(parameter.to_local().nbytes for parameter in parameters)


def check_bytes(folder, name, dims, *, layers=None):
    dims, found = ParallelDims(**dims), []
    last = dims.world_size - 1
    for rank in (0, last) if dims.pp > 1 else (0,):
        with fake_rank(dims, rank=rank) as mesh:
            policy, config = policy_of(name, mesh, layers=layers)
            found.append(local_bytes(policy))
    assert max(found) == pytest.approx(planned(config, folder, dims)[1].parameters, rel=1e-4)


QUICK = [
    ("qwen2.5-7b", {"dp_shard": 4}),
    ("llama-70b", {"dp_shard": 8, "tp": 8}),
    ("qwen3-235b", {"dp_shard": 128, "ep": 64}),
    ("llama-70b", {"dp_shard": 4, "pp": 2}),
    ("qwen2.5-7b", {"dp_shard": 2, "cp": 4}),
]


@pytest.mark.parametrize(("name", "dims"), QUICK)
def test_a_rank_holds_the_planned_bytes_of_parameters(tmp_path, name, dims):
    check_bytes(tmp_path, name, dims, layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_of_a_whole_model_holds_the_planned_bytes(tmp_path, name):
    check_bytes(tmp_path, name, LAYOUTS[name])


def write_headers(folder):
    """A checkpoint as published, in bfloat16: names and sizes, and a file without blocks on disk."""
    found, end = {}, 0
    for spec in specs_of_config(folder):
        for name, shape in published(spec.name, spec.shape):
            start, end = end, end + 2 * int(np.prod(shape))
            found[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(found).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def published(name, shape):
    """Names and shapes in a published checkpoint, which stores each expert by itself, as Qwen3-MoE's do."""
    if ".experts." not in name:
        return [(name, shape)]
    experts, rows, columns = shape
    whole = name.removesuffix("gate_up_proj").removesuffix("down_proj")
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    size = (rows // len(parts), columns)
    return [(f"{whole}{expert}.{part}.weight", size) for part in parts for expert in range(experts)]


@contextmanager
def open_without_reading(source):
    """As `open_weights`; the values of boxes do not exist."""

    def read(name, box):
        return torch.empty([piece.stop - piece.start for piece in box], dtype=torch.bfloat16)

    yield lambda weight: lambda index: weights._read(weight, index, read)


def check_start(monkeypatch, folder, name, dims, *, layers=None):
    monkeypatch.setattr(build, "open_weights", open_without_reading)
    dims = ParallelDims(**dims)
    with fake_rank(dims) as mesh:
        policy, config = policy_of(name, mesh, layers=layers)
        config.save_pretrained(folder)
        write_headers(folder)
        found = find_weights(empty_model(folder, dtype=torch.float32), str(folder))
        assert found is not None
        materialise(policy.module, device=torch.device("cpu"))
        parts = [local(parameter) for parameter in policy.module.parameters()]
        with LiveBytes(inputs=True) as held:
            for part in parts:
                part.detach()  # all of them are there before one is filled
            build.fill_model(policy.module, str(folder), found)
    assert held.peak == pytest.approx(planned_start(folder, dims), rel=0.01)


def local(parameter):
    return parameter.detach().to_local()


def planned_start(folder, dims):
    """Bytes of a rank while it is built, according to `cosmos-rl plan`."""
    recipe = {
        "run": {"domain": "llm", "max_steps": 1},
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "data": {"path": "unused.jsonl", "chat_template": "none"},
        "algorithm": {"name": "sft"},
        "policy": {"parallel": {**dict(dims), "ep": dims.ep}},
    }
    config = load_config(recipe)
    shape = read_shape(folder, LLMModelConfig(path=str(folder), dtype="bfloat16"))
    rank = estimate(shape, dims=dims, policy=config.policy, tokens=TOKENS)
    return sum(part.bytes for part in LLM.held_by_policy(config, rank) if START in part.at)


@pytest.mark.parametrize(("name", "dims"), QUICK)
def test_a_rank_starts_within_the_planned_bytes(monkeypatch, tmp_path, name, dims):
    check_start(monkeypatch, tmp_path, name, dims, layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_of_a_whole_model_starts_within_the_planned_bytes(monkeypatch, tmp_path, name):
    check_start(monkeypatch, tmp_path, name, LAYOUTS[name])


def one_microbatch():
    rng = np.random.default_rng(0)
    sample = TrainSequence(
        prompt_tokens=rng.integers(0, 1000, 1).astype(np.int32),
        tokens=rng.integers(0, 1000, TOKENS).astype(np.int32),
        logprobs=np.zeros(TOKENS, np.float32),
        loss_mask=np.ones(TOKENS, bool),
        advantage=1.0,
    )
    return pack_batch([sample], microbatch_terms=TOKENS, share=Share(), metrics={}).microbatches[0]


MODES = ("none", "selective", "full")
SENT = [
    ("qwen2.5-7b", {"dp_shard": 4}, {}, ("full",)),
    ("qwen2.5-7b", {"dp_shard": 2, "dp_replicate": 4}, {}, ("none",)),
    ("qwen2.5-7b", {"dp_shard": 2, "cp": 4}, {}, MODES),
    ("qwen2.5-7b", {"tp": 4}, {}, ("full",)),  # biases
    ("llama-70b", {"dp_shard": 8, "tp": 8}, {}, MODES),
    ("llama-70b", {"dp_shard": 8, "tp": 8}, {"sequence_parallel": True}, MODES),
    ("llama-70b", {"cp": 8, "tp": 8}, {"sequence_parallel": True}, ("full",)),
    ("gemma2-9b", {"dp_shard": 2, "tp": 4}, {}, ("full",)),  # a norm after each part of a layer
    ("gemma2-9b", {"dp_shard": 2, "tp": 4}, {"sequence_parallel": True}, ("selective", "full")),
    ("qwen3-235b", {"dp_shard": 64, "ep": 64}, {}, MODES),
    ("qwen3-235b", {"dp_replicate": 2, "dp_shard": 64, "tp": 4, "ep": 64}, {"sequence_parallel": True}, ("full",)),
    ("qwen3-235b", {"dp_shard": 32, "tp": 4}, {"reshard_after_forward": False}, ("full",)),
]


@pytest.mark.parametrize(
    ("name", "dims", "options", "checkpointing"), [(*layout, mode) for *layout, modes in SENT for mode in modes]
)
def test_a_pass_sends_the_planned_bytes(monkeypatch, tmp_path, name, dims, options, checkpointing):
    dims = ParallelDims(**dims)
    send_evenly(monkeypatch, SIZES[name].get("num_experts_per_tok", 0) * TOKENS // dims.tp)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_rank(dims) as mesh:
        policy, config = policy_of(name, mesh, layers=2, checkpointing=checkpointing, **options)
        row = policy.module.row(one_microbatch().inputs)
        with mode:
            policy.module.to_empty(device="cpu")
        with mode, Collectives(mesh) as seen:
            logprobs, entropy, _ = policy.module(None, faked(row, mode), True)
            (logprobs.sum() + entropy.sum()).backward()
    assert seen.found == seen.expected(sent(config, tmp_path, dims, checkpointing, options))


def send_evenly(monkeypatch, slots):
    """Routes depend on values: let each rank get as many rows as any other."""
    monkeypatch.setattr(expert, "_splits", lambda leaving, _: ([slots // len(leaving)] * len(leaving),) * 2)


def sent(config, folder, dims, checkpointing, options):
    section = PolicySection(
        parallel=ParallelSection(**{**dict(dims), "ep": dims.ep, **options}),
        memory=MemorySection(activation_checkpointing=checkpointing),
    )
    shape = planned(config, folder, dims)[0]
    return traffic(shape, dims=dims, policy=section, tokens=TOKENS, with_entropy=True)


PIPELINES = [
    ({"pp": 4, "dp_shard": 4}, {}, False),
    ({"pp": 4, "dp_shard": 4}, {"pipeline_schedule": "gpipe"}, True),
    ({"pp": 2, "dp_shard": 2, "tp": 4}, {"sequence_parallel": True}, False),
    ({"pp": 2, "dp_shard": 4}, {"pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}, False),
    ({"pp": 2, "dp_shard": 4}, {"reduce_once": True}, False),
    ({"pp": 2, "dp_shard": 4}, {"reduce_once": True, "pipeline_schedule": "gpipe"}, False),
    ({"pp": 2, "dp_shard": 4, "dp_replicate": 2}, {"reshard_after_forward": False}, False),
]


@pytest.mark.parametrize(("dims", "options", "tied"), PIPELINES)
def test_a_step_of_a_pipeline_sends_the_planned_bytes(monkeypatch, tmp_path, dims, options, tied):
    monkeypatch.setattr(_PipelineSchedule, "_warmup_p2p", without_vote)
    dims, mode, count = ParallelDims(**dims), FakeTensorMode(allow_non_fake_inputs=True), 4
    with fake_rank(dims, rank=dims.world_size - 1) as mesh:  # the last stage has one norm more than the first
        policy, config = policy_of("llama-70b", mesh, layers=4, tied=tied, **options)
        rows = iter([faked(policy._stages[0].prepare(one_microbatch()), mode) for _ in range(count)])
        monkeypatch.setattr(TermStage, "prepare", lambda *_: next(rows))
        with mode:
            policy.module.to_empty(device="cpu")
        with mode, Collectives(mesh) as seen:
            policy.forward_backward([one_microbatch()] * count, loss=summed, with_entropy=True)
    assert seen.found == seen.expected(sent(config, tmp_path, dims, "full", options), microbatches=count)


def summed(outputs, _):
    return outputs.logprobs.sum() + outputs.entropy.sum()


def without_vote(self, stages, *_):
    """Ranks agree on the mode of a schedule by one number, on whose value fake ranks would wait."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
