"""Loaders written by hand, run on values to prove where tensors land. No vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.weight_map.chart import is_repeatable, lands
from cosmos_rl_llm.engines.vllm.weight_map.region import LandingRegion
from cosmos_rl_transfer.layout.manifest import Box

Load = Callable[["Model", Tensor], object]
SQUARE = WeightSpec(name="x", shape=(4, 4), dtype="float32")
WHOLE = Box((0, 0), (4, 4))


class Model(nn.Module):
    """Two parameters, held twice, and a loader."""

    def __init__(self, load: Load, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.empty(4, 4, device="meta", dtype=dtype), requires_grad=False)
        self.q = nn.Parameter(torch.empty(4, 4, device="meta", dtype=dtype), requires_grad=False)
        self.again = nn.Module()
        self.again.p = self.p
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            self._load(self, tensor)


STRAIGHT = LandingRegion("x", WHOLE, "p", (4, 1), 0)
TRANSPOSED = LandingRegion("x", WHOLE, "p", (1, 4), 0)
NOTHING = LandingRegion.nothing("x", "p", ndim=2)


def copies(model: Model, x: Tensor) -> None:
    model.p.copy_(x)


def transposes(model: Model, x: Tensor) -> None:
    model.again.p.copy_(x.t())


def skips(model: Model, x: Tensor) -> None:
    pass


def copies_twice(model: Model, x: Tensor) -> None:
    model.p.copy_(x)
    model.q.copy_(x)


def rebinds(model: Model, x: Tensor) -> None:
    model.p.data = x


def fails(model: Model, x: Tensor) -> None:
    raise ValueError("not now")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("load", "right"), [(copies, STRAIGHT), (transposes, TRANSPOSED), (skips, NOTHING), (rebinds, STRAIGHT)]
)
def test_one_of_three_places_is_right(load, right, dtype):
    found = [p for p in (STRAIGHT, TRANSPOSED, NOTHING) if lands(Model(load, dtype=dtype), SQUARE, [p])]
    assert found == [right]


def test_what_lands_elsewhere_is_seen_where_it_is_looked_for():
    elsewhere = LandingRegion("x", WHOLE, "q", (4, 1), 0)
    assert not lands(Model(copies_twice), SQUARE, [STRAIGHT], beside=[elsewhere])
    assert lands(Model(copies_twice), SQUARE, [STRAIGHT, elsewhere])


def test_nothing_is_proven_by_a_loader_that_fails_or_by_values_that_are_too_few():
    assert not lands(Model(fails), SQUARE, [STRAIGHT])
    flags = WeightSpec(name="x", shape=(4, 4), dtype="bool")
    assert not lands(Model(copies, dtype=torch.bool), flags, [STRAIGHT])


def test_the_model_has_no_memory_afterwards():
    model = Model(rebinds)
    before = model.p
    lands(model, SQUARE, [STRAIGHT])
    assert model.p is before and model.again.p is before and before.is_meta


def computes(model: Model, x: Tensor) -> None:
    model.p.copy_(x)
    model.p.copy_(-model.p.exp())


def computes_in_part(model: Model, x: Tensor) -> None:
    model.p[:2].copy_(x[:2])
    model.p.copy_(-model.p.exp())


def computes_two(model: Model, x: Tensor) -> None:
    computes(model, x)
    model.q.mul_(2)


@pytest.mark.parametrize(
    ("load", "parameters", "expected"),
    [
        (computes, {"p"}, True),
        (computes_in_part, {"p"}, False),
        (computes_two, {"p"}, False),
        (computes_two, {"p", "q"}, False),
        (skips, {"p"}, False),
        (fails, {"p"}, False),
    ],
)
def test_a_loader_may_be_called_again_if_nothing_else_decides_the_outcome(load, parameters, expected):
    assert is_repeatable(Model(load), [SQUARE], parameters) is expected
