"""Adam on bfloat16 weights: small updates survive on average, and it is Adam where rounding does not matter."""

import copy

import pytest
import torch
from torch import nn

from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.train.optimizers.rounding import StochasticAdam, stochastic

LR, STEPS = 1e-6, 100


class Weights(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.full((64, 64), 0.02, dtype=dtype))


def optimizer(module, name="adamw", **keys):
    keys = {"learning_rate": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} | keys
    return build_optimizer(name, module, **keys)


def train(module, own, *, steps=STEPS, first=0):
    for step in range(first, first + steps):
        gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)) + 0.5
        module.weight.grad = gradient.to(module.weight.dtype)
        own.step()
    return module.weight.detach().double()


def test_weights_move_at_a_learning_rate_whose_updates_round_to_nothing():
    """Both against float32; rounded to nearest nothing moves, for an update is below 2^-9 of 0.02."""
    exact, ours, nearest = Weights(torch.float32), Weights(torch.bfloat16), Weights(torch.bfloat16)
    start = nearest.weight.detach().double().clone()
    moved = (train(exact, optimizer(exact)) - 0.02).mean()
    plain = torch.optim.AdamW(nearest.parameters(), lr=LR, weight_decay=0.0)
    assert torch.equal(train(nearest, plain), start)
    found = train(ours, optimizer(ours)) - start
    # Of each weight: a walk of STEPS steps that are 0 or a spacing of 2^-13, each with a mean of at most LR.
    error = 3 * (STEPS * LR * 2**-13) ** 0.5 / found.numel() ** 0.5
    assert abs(found.mean() - moved) < error
    assert abs(moved) > 5 * error


def test_a_second_moment_decays():
    """0.999 v is nearer to v than to its neighbour: rounded to nearest it would stay for ever."""
    module = Weights(torch.bfloat16)
    own = optimizer(module)
    train(module, own, steps=1)
    square = own.state[module.weight]["exp_avg_sq"]
    first = square.double().mean()
    for _ in range(STEPS):
        module.weight.grad = torch.zeros(64, 64, dtype=torch.bfloat16)
        own.step()
    assert float(square.double().mean() / first) == pytest.approx(0.999**STEPS, rel=0.01)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_in_float32_it_is_torchs_optimizer(name):
    ours, theirs = Weights(torch.float32), Weights(torch.float32)
    keys = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    own = StochasticAdam(ours.parameters(), decoupled_weight_decay=name == "adamw", **keys)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    torch.testing.assert_close(train(ours, own), train(theirs, kind(theirs.parameters(), **keys)), rtol=1e-6, atol=1e-8)


def test_only_bfloat16_weights_are_rounded_so():
    assert isinstance(optimizer(Weights(torch.bfloat16)), StochasticAdam)
    assert type(optimizer(Weights(torch.float32))) is torch.optim.AdamW


def test_a_resumed_optimizer_continues_bit_by_bit():
    module = Weights(torch.bfloat16)
    own = optimizer(module)
    train(module, own, steps=3)
    other = copy.deepcopy(module)
    resumed = optimizer(other)
    resumed.load_state_dict(copy.deepcopy(own.state_dict()))
    assert torch.equal(train(module, own, steps=3, first=3), train(other, resumed, steps=3, first=3))


def test_the_expectation_is_exact_and_infinities_stay():
    value = torch.full((100_000,), -(1.0 + 2**-7 * 0.3))  # 0.3 of the way from 1 to its neighbour
    found = stochastic(value, torch.Generator().manual_seed(0)).float()
    assert set(found.tolist()) == {-1.0, -(1.0 + 2**-7)}
    assert float((found + 1).mean() / 2**-7) == pytest.approx(-0.3, abs=3 * (0.21 / 1e5) ** 0.5)
    odd = torch.tensor([float("inf"), float("-inf"), 0.0, 1.5])
    assert torch.equal(stochastic(odd, torch.Generator().manual_seed(0)).float(), odd)
    assert stochastic(torch.tensor([float("nan")]), torch.Generator()).isnan().all()
