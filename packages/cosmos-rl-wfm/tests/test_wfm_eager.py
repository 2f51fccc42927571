"""A network that was sped up is the network that it was."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from wfm_fixtures import NETWORK, mock_data, pixel_model, prompt

from cosmos_rl_core.parallel.axes.linear import MIN_MEASURED, ManyRowsLinear
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.testing.slowdown import NO_SLOWER, slowdown
from cosmos_rl_core.types import RolloutGroup, Share
from cosmos_rl_wfm.build import build_engine, build_policy
from cosmos_rl_wfm.collate import collate
from cosmos_rl_wfm.engines.torch import TorchEngineOptions
from cosmos_rl_wfm.models import eager
from cosmos_rl_wfm.models.eager import (
    ComplexRotary,
    complex_wins,
    sigmoid_wins,
    speed_up,
    speed_up_autoencoder,
    tanh_gelu,
    turned,
)
from cosmos_rl_wfm.models.networks.tiny import tiny_vae
from cosmos_rl_wfm.models.weights import random_network
from cosmos_rl_wfm.sampling import FlowSampling

WIDE = {**NETWORK, "num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 256}


def network():
    return random_network("WanTransformer3DModel", WIDE, dtype=torch.float32, seed=0)


def velocity_and_gradient(of):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 3, 4, 8, 8, generator=generator)
    text = torch.randn(2, 4, 16, generator=generator)
    times = torch.tensor([900.0, 100.0])
    of.requires_grad_(True).zero_grad()
    out = of(hidden_states=latents, timestep=times, encoder_hidden_states=text, return_dict=False)[0]
    out.square().sum().backward()
    return out.detach(), torch.cat([weight.grad.flatten() for weight in of.parameters()])


def test_velocity_and_gradient_stay(monkeypatch):
    plain = network()
    faster = copy.deepcopy(plain)
    monkeypatch.setattr(eager, "complex_wins", lambda head_dim, threads: True)
    monkeypatch.setattr(eager, "sigmoid_wins", lambda threads: True)
    speed_up(faster)
    assert faster.blocks[0].ffn.net[0].gelu is tanh_gelu
    assert type(faster.blocks[0].attn1.processor) is ComplexRotary
    (velocity, gradient), (same, other) = velocity_and_gradient(plain), velocity_and_gradient(faster)
    torch.testing.assert_close(velocity, same, rtol=1e-5, atol=1e-5)
    assert (gradient - other).norm() < 1e-5 * gradient.norm()


def test_names_and_weights_stay():
    plain, faster = network(), network()
    speed_up(faster)
    assert plain.state_dict().keys() == faster.state_dict().keys()
    wins = complex_wins(WIDE["attention_head_dim"], torch.get_num_threads())
    assert type(faster.blocks[0].attn1.processor) is (ComplexRotary if wins else type(plain.blocks[0].attn1.processor))
    assert type(faster.blocks[0].attn2.processor) is type(plain.blocks[0].attn2.processor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_are_turned_as_diffusers_turns_them(dtype):
    """x1 cos - x2 sin and x1 sin + x2 cos, in float32."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 5, 3, 8, generator=generator).to(dtype)
    angle = torch.rand(1, 5, 1, 4, generator=generator)
    first, second = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    wanted = torch.stack(
        [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], dim=-1
    )
    found = turned(states, torch.complex(angle.cos(), angle.sin()))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted.flatten(-2).to(dtype))


def test_gelu_and_its_gradient_are_as_exact_as_torchs():
    x = torch.cat([torch.linspace(-9.0, 9.0, 20_001), torch.tensor([-1e6, -0.0, 0.0, 1e6])])[None].requires_grad_()
    slope = torch.linspace(-1.0, 1.0, x.numel())[None]
    exact = F.gelu(wide := x.detach().double().requires_grad_(), approximate="tanh")
    exact.backward(slope.double())
    found = tanh_gelu(x)
    assert found.dtype == torch.float32 and "TanhGelu" in type(found.grad_fn).__name__
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(found, x, slope)
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "kind"),
    [(2**14, {"dtype": torch.bfloat16}), (2**14, {"dtype": torch.float64}), (2**14, {"device": "meta"}), (99, {})],
)
def test_gelu_of_other_types_and_devices_and_of_small_samples_is_torchs(length, kind):
    found = tanh_gelu(torch.ones(3, length, **kind, requires_grad=True))
    assert type(found.grad_fn).__name__ == "GeluBackward0"


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4, 32])
def test_a_chosen_gelu_is_never_slower_than_torchs(one_thread, samples):
    x, slope = torch.randn(samples, 64, 256, requires_grad=True), torch.randn(samples, 64, 256)

    def run(gelu):
        torch.autograd.grad(gelu(x), x, slope)

    def torchs(x):
        return F.gelu(x, approximate="tanh")

    chosen = tanh_gelu if sigmoid_wins(1) else torchs
    assert slowdown(plain=lambda: run(torchs), chosen=lambda: run(chosen)) <= NO_SLOWER


def test_ratios_are_exactly_one_where_products_go_through_onednn():
    sampling = FlowSampling(num_steps=4, window="fixed", steps=(0, 2))
    model, data = pixel_model(network=WIDE), mock_data()
    policy = build_policy(model, data=data, sampling=sampling, seed=0, setup=ModelSetup())
    engine = build_engine(model, data=data, options=TorchEngineOptions(samples_at_once=4))

    def copy_weights():
        with torch.no_grad():
            for name, tensor in engine.weights().items():
                tensor.copy_(policy.weights()[name])

    async def sample_group():
        await engine.switch(0, copy_weights)
        _, rollouts = await engine.generate(prompt(), num_samples=4, sampling=sampling, seed=0)
        await engine.close()
        return rollouts

    group = RolloutGroup(prompt=prompt(), rollouts=tuple(asyncio.run(sample_group())))
    (microbatch, other) = collate([group], microbatch_terms=4, share=Share()).microbatches
    if torch.backends.mkldnn.is_available():
        widest = policy.module.blocks[0].ffn.net[2]
        assert isinstance(widest, ManyRowsLinear) == (widest.weight.numel() >= MIN_MEASURED)
    for each in (microbatch, other):
        logprobs = policy.forward(each).logprobs.detach().numpy()
        np.testing.assert_array_equal(logprobs, each.terms.rollout_logprobs.numpy())


def test_an_autoencoder_that_was_sped_up_decodes_the_same(monkeypatch):
    name, values = tiny_vae("wan")
    plain = random_network(name, values, dtype=torch.float32, seed=0)
    faster = copy.deepcopy(plain)
    monkeypatch.setattr(eager, "sum_of_squares_wins", lambda channels, threads: True)
    speed_up_autoencoder(faster)
    assert plain.state_dict().keys() == faster.state_dict().keys()
    latents = torch.randn(2, values["z_dim"], 2, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = (vae.decode(latents, return_dict=False)[0] for vae in (plain, faster))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert "forward" in vars(faster.decoder.norm_out) and "forward" not in vars(plain.decoder.norm_out)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 12), (4, 16), (2, 64), (2, 128)])
def test_a_chosen_rotation_is_never_slower_than_that_of_diffusers(one_thread, heads, head_dim):
    shape = {**NETWORK, "num_attention_heads": heads, "attention_head_dim": head_dim, "ffn_dim": 64}
    plain = random_network("WanTransformer3DModel", shape, dtype=torch.float32, seed=0)
    chosen = copy.deepcopy(plain)
    if complex_wins(head_dim, 1):
        for block in chosen.blocks:
            block.attn1.processor = ComplexRotary()
    runs = [lambda of=of: velocity_and_gradient(of) for of in (plain, chosen)]
    assert slowdown(plain=runs[0], chosen=runs[1]) <= NO_SLOWER


@pytest.mark.slow
@pytest.mark.parametrize("side", [4, 8])
def test_a_chosen_autoencoder_is_never_slower_than_that_of_diffusers(one_thread, side):
    name, values = tiny_vae("wan")
    values = {**values, "base_dim": 16}
    plain = random_network(name, values, dtype=torch.float32, seed=0)
    chosen = copy.deepcopy(plain)
    speed_up_autoencoder(chosen)
    latents = torch.randn(1, values["z_dim"], 2, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        runs = [lambda vae=vae: vae.decode(latents, return_dict=False) for vae in (plain, chosen)]
        assert slowdown(plain=runs[0], chosen=runs[1]) <= NO_SLOWER
