"""Averages of weights: their arithmetic, their width, and that the network gets its own weights back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cosmos_rl_wfm.models.average import WeightAverage, power_gamma


def network(value=0.0):
    module = nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(value)
    module.bias.requires_grad_(False)
    return module


def run(average, module, values):
    for step, value in enumerate(values, start=1):
        with torch.no_grad():
            module.weight.fill_(value)
        average.update(step)
    return float(average.tensors()["weight"])


def test_a_constant_decay_by_hand():
    module = network(8.0)
    assert run(WeightAverage(module, decay=0.5), module, [4.0, 2.0]) == (8.0 / 2 + 4.0 / 2) / 2 + 2.0 / 2


def test_the_power_function_weighs_step_i_by_the_power_of_i():
    module = network(100.0)
    values = [3.0, -1.0, 4.0, 1.0, -5.0]
    average = WeightAverage(module, width=0.2)
    gamma = power_gamma(0.2)
    found = run(average, module, values)
    share = 1.0  # by unrolling a <- (1 - 1/t)^(gamma + 1) a + ... ; the start has none of it
    expected = 0.0
    for step in range(5, 0, -1):
        decay = (1 - 1 / step) ** (gamma + 1)
        expected += share * (1 - decay) * values[step - 1]
        share *= decay
    assert share == 0.0
    assert found == pytest.approx(expected, rel=1e-5)


@given(st.floats(0.01, 0.288))
@settings(max_examples=50, deadline=None)
def test_gamma_has_the_width_it_was_asked_for(width):
    gamma = power_gamma(width)
    assert gamma >= 0
    assert ((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) ** 0.5 == pytest.approx(width, rel=1e-6)


def test_the_width_of_cosmos_is_the_gamma_of_the_paper():
    assert power_gamma(0.1) == pytest.approx(6.94, abs=0.005)
    assert power_gamma(0.05) == pytest.approx(16.97, abs=0.005)


def test_an_average_of_equal_weights_is_those_weights():
    module = network()
    assert run(WeightAverage(module, width=0.1), module, [7.0] * 9) == pytest.approx(7.0)


def test_the_network_gets_its_own_weights_back():
    module = network(2.0)
    average = WeightAverage(module, decay=0.5)
    assert run(average, module, [4.0]) == 3.0
    with pytest.raises(RuntimeError, match="evaluation"), average.swapped():
        assert module.weight.item() == 3.0
        raise RuntimeError("evaluation")
    assert module.weight.item() == 4.0


def test_frozen_parameters_are_no_part_of_it():
    assert set(WeightAverage(network(), decay=0.5).tensors()) == {"weight"}


def test_averages_go_on_from_a_checkpoint():
    module = network(1.0)
    first = WeightAverage(module, width=0.1)
    run(first, module, [2.0, 3.0])
    kept = {name: tensor.clone() for name, tensor in first.tensors().items()}
    second = WeightAverage(module, width=0.1)
    second.load(kept)
    for average in (first, second):
        average.update(3)
    assert torch.equal(first.tensors()["weight"], second.tensors()["weight"])
    with pytest.raises(ValueError, match="another network: bias"):
        second.load({**kept, "bias": torch.zeros(1)})


@pytest.mark.parametrize("keys", [{}, {"decay": 0.5, "width": 0.1}, {"decay": 1.0}, {"width": 0.3}, {"width": 0.0}])
def test_what_makes_no_average_is_refused(keys):
    with pytest.raises(ValueError, match="average"):
        WeightAverage(network(), **keys)
