"""Observations and their reductions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.observe.metrics import Metrics, Reduction

values = st.floats(-1e6, 1e6)
observations = st.lists(st.tuples(values, st.integers(1, 50)), min_size=1, max_size=20)


def test_a_mean_is_weighted_by_count():
    metrics = Metrics()
    metrics.add("reward", 1.0, count=3)
    metrics.add("reward", 0.0, count=1)
    assert metrics.summarise() == {"reward": 0.75}


@pytest.mark.parametrize(("reduction", "expected"), [(Reduction.SUM, 4.0), (Reduction.MAX, 5.0), (Reduction.MIN, -3.0)])
def test_sum_max_and_min_ignore_the_count(reduction, expected):
    metrics = Metrics()
    for value in (2.0, 5.0, -3.0):
        metrics.add("x", value, count=7, reduction=reduction)
    assert metrics.summarise() == {"x": expected}


@given(observations, st.sampled_from(Reduction), st.integers(0, 20))
def test_merging_two_collections_equals_adding_to_one(items, reduction, cut):
    whole, left, right = Metrics(), Metrics(), Metrics()
    for index, (value, count) in enumerate(items):
        whole.add("x", value, count=count, reduction=reduction)
        (left if index < cut else right).add("x", value, count=count, reduction=reduction)
    left.merge(right)
    assert left.summarise() == pytest.approx(whole.summarise(), rel=1e-9, abs=1e-6)


@given(observations)
def test_a_mean_lies_between_its_extremes(items):
    metrics = Metrics()
    for value, count in items:
        metrics.add("x", value, count=count)
    seen = [value for value, _ in items]
    assert min(seen) - 1e-6 <= metrics.summarise()["x"] <= max(seen) + 1e-6


@pytest.mark.parametrize("reduction", Reduction)
def test_a_count_of_zero_is_no_observation(reduction):
    metrics = Metrics()
    metrics.add("x", 99.0, count=0, reduction=reduction)
    assert metrics.summarise() == {}
    metrics.add("x", 5.0, reduction=reduction)
    assert metrics.summarise() == {"x": 5.0}


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize("order", [(1.0, math.nan), (math.nan, 1.0)])
def test_a_nan_is_never_hidden(reduction, order):
    metrics = Metrics()
    for value in order:
        metrics.add("x", value, reduction=reduction)
    assert math.isnan(metrics.summarise()["x"])


def test_names_keep_the_order_they_came_in():
    metrics = Metrics()
    for name in ("reward", "loss", "kl", "loss"):
        metrics.add(name, 1.0)
    assert list(metrics.summarise()) == ["reward", "loss", "kl"]


def test_one_name_has_one_reduction():
    metrics = Metrics()
    metrics.add("x", 1.0)
    with pytest.raises(ValueError, match="'x' is a mean, now added as a max"):
        metrics.add("x", 1.0, reduction=Reduction.MAX)


@pytest.mark.parametrize("count", [-1, math.nan])
def test_a_count_below_zero_is_refused(count):
    with pytest.raises(ValueError, match="count must be 0 or more"):
        Metrics().add("x", 1.0, count=count)
