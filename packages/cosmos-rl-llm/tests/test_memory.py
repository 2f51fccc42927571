"""Memory traded for time and float8, through a whole language model: the training stays the same."""

import shutil

import pytest
import torch
from llm_parity import FAMILIES, assert_equal, make_batch, train, train_rank

from cosmos_rl_core.parallel.config import MemorySection, PrecisionSection
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Share
from cosmos_rl_llm.config import LLMLoraSection
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.lora import add_adapters
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from doubles.ranks import run_ranks

MODES = ["selective", "full"]


def microbatch(seed=0):
    return make_batch(seed, share=Share(), supervised=False, microbatch_terms=1000).microbatches[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_recomputation_trains_the_same(family, mode):
    section = MemorySection(activation_checkpointing=mode)
    plain = train(family, num_layers=2, num_steps=2)
    assert_equal(plain, [train(family, num_layers=2, num_steps=2, memory=section)], tolerance=1e-6)


@pytest.mark.parametrize(
    ("dims", "mode"), [({"dp_shard": 2}, "full"), ({"tp": 2}, "selective")], ids=["dp_shard2", "tp2"]
)
def test_ranks_that_recompute_train_the_same(dims, mode):
    options = {"family": "qwen3", "num_layers": 2, "num_steps": 2}
    memory = {"activation_checkpointing": mode}
    assert_equal(train(**options), run_ranks(train_rank, 2, dims=dims, memory=memory, **options))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile calls a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
def test_compiled_layers_train_the_same_and_serve_new_lengths():
    torch.compiler.reset()
    compiled = train("qwen3", num_layers=1, num_steps=2, memory=MemorySection(compile=True))
    assert_equal(train("qwen3", num_layers=1, num_steps=2), [compiled])
    with torch.compiler.set_stance("fail_on_recompile"):
        policy = CausalLMPolicy(model(), setup=ModelSetup(memory=MemorySection(compile=True)))
        for seed in range(2, 5):
            policy.forward(microbatch(seed)).logprobs.sum().backward()


def model():
    return make_model({**FAMILIES["qwen3"], "num_hidden_layers": 2}, dtype=torch.float32, seed=0)


@pytest.mark.filterwarnings("ignore")  # torchao's own, about kernels it does not find on CPUs
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("lora", [False, True])
def test_float8_stays_near_float32(recipe, lora):
    pytest.importorskip("torchao")
    found = {}
    for fp8 in ("none", recipe):
        network = model()
        if lora:
            add_adapters(network, LLMLoraSection(), base="some/base")
        policy = CausalLMPolicy(network, setup=ModelSetup(precision=PrecisionSection(fp8=fp8)))
        found[fp8] = policy.forward(microbatch()).logprobs
        found[fp8].sum().backward()
        assert all(p.grad is not None for p in policy.module.parameters() if p.requires_grad)
        kinds = {name: type(module).__name__ for name, module in policy.module.named_modules()}
        layers = {name for name, kind in kinds.items() if kind == "Float8Linear"}
        assert len(layers) == (0 if fp8 == "none" else 2 * 7)  # neither the head nor adapters
    error = (found[recipe] - found["none"]).abs().mean()
    assert 0 < error < 0.05 * found["none"].abs().mean()
