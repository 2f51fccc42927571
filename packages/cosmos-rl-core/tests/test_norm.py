"""RMS norms with a backward pass of their own: values to the bit, gradients of float64, other modules as they are."""

import copy

import pytest
import torch
from torch import nn

from cosmos_rl_core.parallel.axes.norm import MIN_VALUES, rms_norm, use_rms_norms
from cosmos_rl_core.testing.slowdown import NO_SLOWER, slowdown

EPS = 1e-6
ROWS = 2 * MIN_VALUES // 24 + 1


class RMSNorm(nn.Module):
    """As in transformers."""

    def __init__(self, hidden_size, eps=EPS):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        values = hidden_states.to(torch.float32)
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * values.to(dtype)


class OnePlusRMSNorm(RMSNorm):
    """As in Gemma."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) / self.weight * (1.0 + self.weight)


class ScaleFreeRMSNorm(RMSNorm):
    """As in Gemma 4: values are normalised without a weight."""

    def __init__(self, hidden_size, eps=EPS, with_scale=True):
        super().__init__(hidden_size, eps)
        if not with_scale:
            del self.weight

    def forward(self, hidden_states):
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return hidden_states * scale * (self.weight if "weight" in self._parameters else 1.0)


class SizedRMSNorm(RMSNorm):
    def __init__(self, *, width):
        super().__init__(width)


class GatedRMSNorm(RMSNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * gate


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(input, weight):
    return weight * input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("shape", [(1, 7, 24), (64, 1, 3, 24), (1, 24)])
@pytest.mark.parametrize("trained", ["input", "weight", "both"])
def test_values_and_gradients_are_those_of_float64(shape, trained):
    input, weight = drawn(*shape), drawn(24, seed=1)
    chosen = [x.requires_grad_() for name, x in (("input", input), ("weight", weight)) if trained in (name, "both")]
    wanted = [x.detach().double().requires_grad_(x.requires_grad) for x in (input, weight)]
    slope = drawn(*shape, seed=2).transpose(0, -2).contiguous().transpose(0, -2)
    output = rms_norm(input, weight, EPS)
    torch.testing.assert_close(output, exact(*wanted).float(), rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(output, chosen, slope)
    right = torch.autograd.grad(exact(*wanted), [x for x in wanted if x.requires_grad], slope.double())
    for gradient, expected in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, expected.float(), rtol=1e-5, atol=1e-5)


def test_a_model_keeps_its_names_and_values_and_its_copies_are_its_own():
    model = nn.Sequential(nn.Linear(24, 24), RMSNorm(24))
    model[1].weight.data.copy_(drawn(24, seed=1))
    before, wanted = dict(model.state_dict()), model(drawn(ROWS, 24))
    use_rms_norms(model)
    use_rms_norms(model)
    assert type(model[1]) is not RMSNorm and isinstance(model[1], RMSNorm)
    assert dict(model.state_dict()).keys() == before.keys()
    output = model(drawn(ROWS, 24))
    assert torch.equal(output, wanted) and "RmsNorm" in type(output.grad_fn).__name__
    with torch.no_grad():
        assert torch.equal(model(drawn(ROWS, 24)), wanted)
    other = copy.deepcopy(model)
    other[1].weight.data.zero_()
    assert not other(drawn(ROWS, 24)).any() and torch.equal(model(drawn(ROWS, 24)), wanted)


@pytest.mark.parametrize("rows", [1, 7, ROWS])
@pytest.mark.parametrize("width", [24, 128, 577])
def test_without_gradients_the_bits_are_those_of_the_module(rows, width, monkeypatch):
    norm = RMSNorm(width)
    norm.weight.data.copy_(drawn(width, seed=1))
    input = 3 * drawn(rows, 2, width)
    wanted = norm(input)
    use_rms_norms(norm)
    monkeypatch.setattr(RMSNorm, "forward", None)  # it is not the module that computes them
    with torch.no_grad():
        assert torch.equal(norm(input), wanted)
        assert torch.equal(norm(input.transpose(0, 1)), wanted.transpose(0, 1))


@pytest.mark.parametrize("norm", [OnePlusRMSNorm(24), SizedRMSNorm(width=24), GatedRMSNorm(24), nn.LayerNorm(24)])
def test_modules_that_compute_something_else_stay(norm):
    kind = type(norm)
    use_rms_norms(norm)
    assert type(norm) is kind


@pytest.mark.parametrize(("norm", "least"), [(RMSNorm(32), MIN_VALUES), (nn.RMSNorm(32, eps=EPS), 2 * MIN_VALUES)])
def test_few_values_are_computed_by_the_module(norm, least):
    use_rms_norms(norm)
    few, enough = (type(norm(drawn(rows, 32)).grad_fn).__name__ for rows in (least // 32 - 1, least // 32))
    assert "RmsNorm" not in few and "RmsNorm" in enough


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_computed_by_the_module(dtype):
    norm, changed = RMSNorm(24), RMSNorm(24)
    use_rms_norms(changed)
    input = drawn(ROWS, 24).to(dtype).requires_grad_()
    assert torch.equal(changed.to(dtype)(input), norm.to(dtype)(input))
    assert "RmsNorm" not in type(changed(input).grad_fn).__name__


@pytest.mark.parametrize("given", [{}, {"eps": 1e-5}, {"elementwise_affine": False}])
@pytest.mark.parametrize("shape", [24, (ROWS, 24)])
def test_torchs_own_norm_keeps_its_values_whatever_its_options(shape, given):
    norm, changed = nn.RMSNorm(shape, **given), nn.RMSNorm(shape, **given)
    use_rms_norms(changed)
    input = drawn(ROWS, 24).requires_grad_()
    assert torch.equal(changed(input), norm(input))
    served = shape == 24 and "eps" in given
    assert ("RmsNorm" in type(changed(input).grad_fn).__name__) == served


def test_a_module_on_meta_decides_when_it_has_values():
    with torch.device("meta"):
        norm = RMSNorm(24)
    use_rms_norms(norm)
    assert norm(torch.empty(5, 24, device="meta")).shape == (5, 24)
    norm.to_empty(device="cpu").weight.data.fill_(1.0)
    assert "RmsNorm" in type(norm(drawn(ROWS, 24)).grad_fn).__name__


def test_a_context_of_another_device_does_not_reach_the_trial():
    class Norm2RMSNorm(RMSNorm):
        """A class that was not tried before."""

    norm = Norm2RMSNorm(24)
    with torch.device("meta"):
        use_rms_norms(norm)
    assert type(norm) is not Norm2RMSNorm


@pytest.mark.slow
@pytest.mark.parametrize("make", [RMSNorm, nn.RMSNorm])
@pytest.mark.parametrize("shape", [(64, 32), (64, 128), (16, 576), (128, 128), (1024, 128), (4096, 32), (2048, 576)])
def test_it_is_never_slower_than_the_module(one_thread, make, shape):
    plain, changed = make(shape[-1], eps=EPS), make(shape[-1], eps=EPS)
    use_rms_norms(changed)
    input, slope = drawn(*shape).requires_grad_(), drawn(*shape, seed=1)
    runs = [lambda norm=norm: norm(input).backward(slope) for norm in (plain, changed)]
    assert slowdown(plain=runs[0], chosen=runs[1]) <= NO_SLOWER


def test_a_norm_without_a_weight_stays_as_it_is():
    norm, input = ScaleFreeRMSNorm(24, with_scale=False), drawn(ROWS, 24)
    expected = norm(input)
    use_rms_norms(norm)
    assert type(norm) is not ScaleFreeRMSNorm  # the class computes w x r
    assert torch.equal(norm(input), expected)
