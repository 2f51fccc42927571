"""How fast averages of weights follow: their decays by hand, their width, and what the section refuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cosmos_rl_wfm.ema import average_decay, power_gamma
from cosmos_rl_wfm.models.config import EmaSection


def decays(count=5, **keys):
    of = average_decay(EmaSection(**keys))
    return [of(step) for step in range(1, count + 1)]


def averaged(values, *, start, **keys):
    held = start
    for value, decay in zip(values, decays(len(values), **keys), strict=True):
        held = decay * held + (1 - decay) * value
    return held


def test_a_constant_decay_by_hand():
    assert averaged([4.0, 2.0], start=8.0, decay=0.5) == (8.0 / 2 + 4.0 / 2) / 2 + 2.0 / 2


def test_a_warm_up_by_hand():
    assert decays(4, decay=0.9, warmup_power=0.5) == pytest.approx([0, 1 - 2**-0.5, 1 - 3**-0.5, 0.5])
    assert decays(200, decay=0.9, warmup_power=0.5)[99:] == [0.9] * 101  # 1 - 100 ^ -0.5 = 0.9


def test_a_warm_up_is_that_of_diffusers():
    from diffusers.training_utils import EMAModel

    theirs = EMAModel([], decay=0.99, use_ema_warmup=True, power=0.75)
    assert decays(2000, decay=0.99, warmup_power=0.75) == pytest.approx(
        [theirs.get_decay(step) for step in range(1, 2001)]
    )


def test_the_power_function_weighs_step_i_by_the_power_of_i():
    values = [3.0, -1.0, 4.0, 1.0, -5.0]
    gamma = power_gamma(0.2)
    share = 1.0  # by unrolling a <- (1 - 1/t)^(gamma + 1) a + ... ; the start has none of it
    expected = 0.0
    for step in range(5, 0, -1):
        decay = (1 - 1 / step) ** (gamma + 1)
        expected += share * (1 - decay) * values[step - 1]
        share *= decay
    assert share == 0.0
    assert averaged(values, start=100.0, width=0.2) == pytest.approx(expected)


@given(st.floats(0.01, 0.288))
@settings(max_examples=50, deadline=None)
def test_gamma_has_the_width_it_was_asked_for(width):
    gamma = power_gamma(width)
    assert gamma >= 0
    assert ((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) ** 0.5 == pytest.approx(width, rel=1e-6)


def test_the_width_of_cosmos_is_the_gamma_of_the_paper():
    assert power_gamma(0.1) == pytest.approx(6.94, abs=0.005)
    assert power_gamma(0.05) == pytest.approx(16.97, abs=0.005)


def test_the_widest_average_is_the_plain_mean():
    assert averaged([1.0, 2.0, 6.0], start=50.0, width=0.288) == pytest.approx(3.0, abs=0.05)
    with pytest.raises(ValueError, match=r"at most 0.289, not 0.3"):
        power_gamma(0.3)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, "either decay"),
        ({"decay": 0.5, "width": 0.1}, "either decay"),
        ({"width": 0.1, "warmup_power": 0.75}, "warmup_power needs decay"),
        ({"decay": 1.0}, "less than 1"),
        ({"decay": 0.0}, "greater than 0"),
        ({"width": 0.3}, "less than or equal to 0.288"),
    ],
)
def test_what_makes_no_average_is_refused(keys, why):
    with pytest.raises(ValidationError, match=why):
        EmaSection(**keys)
