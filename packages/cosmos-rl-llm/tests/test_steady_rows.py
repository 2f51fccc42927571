"""What the engine runs gives a row the same bits alone and among others, whatever the number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from cosmos_rl_core.parallel.axes.linear import MIN_ROWS, product
from cosmos_rl_llm.engines.torch.cache import DecodeLayout, span_unit
from cosmos_rl_llm.engines.torch.exact import use_steady_activations, use_steady_experts
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.attention import Scoring
from cosmos_rl_llm.policy.routing import routers

THREADS = [1, 2, 3, 7]
ROWS = (4, 5, 11, 23, 64, 100)
MIXTURES = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 32},
    "deepseek_v3": {"n_routed_experts": 32, "first_k_dense_replace": 0, "moe_intermediate_size": 32},
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def mixture(family: str, *, hidden_size: int) -> PreTrainedModel:
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": 1, "vocab_size": 32, "initializer_range": 0.3}
    config = {"model_type": family, **sizes, **MIXTURES[family]}
    return make_model(config, dtype=torch.float32, seed=0).requires_grad_(False)


def drawn(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("count", THREADS)
@pytest.mark.parametrize(("name", "width"), [("silu", 66), ("silu", 1216), ("gelu_pytorch_tanh", 1216), ("gelu", 608)])
def test_activations(name, width, count):
    model, rows = nn.Sequential(ACT2FN[name]), drawn(101, width)
    wanted = model(rows)
    use_steady_activations(model)
    with threads(count):
        whole = model(rows)
        assert all(torch.equal(model(rows[:n]), whole[:n]) for n in ROWS)
        assert torch.equal(model(rows.t()), whole.t())
    torch.testing.assert_close(whole, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", THREADS)
@pytest.mark.parametrize("shape", [(15, 64), (66, 32), (1, 50), (2, 8), (3, 384), (80, 200), (192, 160)])
def test_products(shape, count):
    rows, weight = drawn(101, shape[1]), drawn(*shape)
    with threads(count):
        whole = product(rows, weight)
        assert all(torch.equal(product(rows[:n], weight), whole[:n]) for n in ROWS)


@pytest.mark.parametrize("count", THREADS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 8), (4, 4, 12), (6, 2, 64), (8, 1, 128)])
def test_attention_of_a_decode_step(heads, kv_heads, head_dim, count):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": heads}
    model = make_model({"model_type": "qwen3", **sizes, "head_dim": head_dim}, dtype=torch.float32, seed=0)
    unit, places, scoring = span_unit(model), torch.tensor([0, 7, 31, 15, 20]), Scoring(scale=0.3)
    query = drawn(5, heads, 1, head_dim)
    keys, values = drawn(2, 5, kv_heads, 8 * unit, head_dim)

    def attend(rows: int, span: int) -> Tensor:
        layout = DecodeLayout(place=places[:rows], span=span)
        return layout.attend(query[:rows], keys[:rows, :, :span], values[:rows, :, :span], scoring)

    with threads(count):
        far = attend(5, 8 * unit)
        assert all(torch.equal(attend(rows, span), far[:rows]) for rows in (4, 5) for span in (unit, 3 * unit))


@pytest.mark.parametrize("count", THREADS)
@pytest.mark.parametrize("family", MIXTURES)
def test_routers(family, count):
    model = mixture(family, hidden_size=320)
    (router,) = routers(model).values()
    rows = drawn(101, 320)
    wanted, *_ = router(rows)
    use_steady_experts(model)
    with threads(count):
        whole, *_ = router(rows)
        assert all(torch.equal(router(rows[:n])[0], whole[:n]) for n in ROWS)
    torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", THREADS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts(family, count):
    model = mixture(family, hidden_size=64)
    (experts,) = (module for name, module in model.named_modules() if name.endswith(".experts"))
    rows = drawn(101, 64)
    gates, chosen = drawn(101, 8).softmax(-1).topk(2)
    wanted = experts(rows, chosen, gates)
    use_steady_experts(model)
    with threads(count):
        whole = experts(rows, chosen, gates)
        assert all(torch.equal(experts(rows[:n], chosen[:n], gates[:n]), whole[:n]) for n in (1, MIN_ROWS, *ROWS))
    torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-5)
