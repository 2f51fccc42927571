"""Tracing loaders written by hand, and the joining of their copies into boxes. No vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.weight_map.region import Region, join
from cosmos_rl_llm.engines.vllm.weight_map.trace import Trace, trace
from cosmos_rl_transfer.layout.manifest import Box

Load = Callable[[Tensor, Tensor], object]


class Model(nn.Module):
    """One parameter, and a loader for the tensor "x" that is given to it."""

    def __init__(self, shape: tuple[int, ...], load: Load) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.empty(shape, device="meta"))
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "x":
                self._load(self.p.data, tensor)
            elif name != "unused":
                raise KeyError(name)


def traced(shape: tuple[int, ...], load: Load, *, source: tuple[int, ...]) -> Trace:
    return trace(Model(shape, load), [WeightSpec(name="x", shape=source, dtype="float32")])


def landed(shape: tuple[int, ...], load: Load, *, source: tuple[int, ...]) -> list[tuple[Box, tuple[int, ...], int]]:
    found = traced(shape, load, source=source)
    assert not found.refused
    return [(place.box, place.strides, place.start) for place in found.places["x"]]


def test_a_narrowed_copy():
    found = landed((4, 6), lambda p, x: p[1:3].copy_(x.narrow(0, 2, 2)), source=(8, 6))
    assert found == [(Box((2, 0), (2, 6)), (6, 1), 6)]


def test_a_transposed_copy():
    found = landed((4, 6), lambda p, x: p.copy_(x.t().contiguous()), source=(6, 4))
    assert found == [(Box((0, 0), (6, 4)), (1, 6), 0)]


def test_a_cast_on_the_way():
    found = landed((4,), lambda p, x: p.copy_(x.to(torch.bfloat16).cpu()), source=(4,))
    assert found == [(Box((0,), (4,)), (1,), 0)]


def test_an_assignment_by_index():
    def load(p: Tensor, x: Tensor) -> None:
        p[1] = x

    assert landed((3, 4), load, source=(4,)) == [(Box((0,), (4,)), (1,), 4)]


def test_two_dims_taken_as_one():
    found = landed((4, 6), lambda p, x: p.copy_(x.view(4, 6)), source=(4, 2, 3))
    assert found == [(Box((0, 0, 0), (4, 2, 3)), (6, 3, 1), 0)]


def test_rows_loaded_one_by_one_are_one_box():
    def load(p: Tensor, x: Tensor) -> None:
        for row, part in enumerate(x.unbind()):
            p[row].copy_(part)

    assert landed((4, 6), load, source=(4, 6)) == [(Box((0, 0), (4, 6)), (6, 1), 0)]


def test_halves_of_experts_are_one_box_if_they_lie_at_equal_distances():
    def load(p: Tensor, x: Tensor) -> None:
        for expert, part in enumerate(x.unbind()):
            gate, up = part.chunk(2)
            p[expert, :3].copy_(gate)
            p[expert, 3:].copy_(up)

    assert landed((2, 6, 5), load, source=(2, 6, 5)) == [(Box((0, 0, 0), (2, 6, 5)), (30, 5, 1), 0)]


def test_copies_of_one_box_are_several_places():
    def load(p: Tensor, x: Tensor) -> None:
        p[0].copy_(x)
        p[2].copy_(x)

    assert landed((3, 4), load, source=(4,)) == [(Box((0,), (4,)), (1,), 0), (Box((0,), (4,)), (1,), 8)]


def test_a_shard_of_both_halves_is_two_places():
    def load(p: Tensor, x: Tensor) -> None:
        p[:2].copy_(x[:2])
        p[2:].copy_(x[4:6])

    assert landed((4, 3), load, source=(8, 3)) == [(Box((0, 0), (2, 3)), (3, 1), 0), (Box((4, 0), (2, 3)), (3, 1), 6)]


def test_every_other_row_is_no_box():
    found = traced((4, 3), lambda p, x: p.copy_(x[::2]), source=(8, 3))
    assert found.refused == {"x": "p: its parts are not boxes"}


def test_padding_is_no_landing():
    def load(p: Tensor, x: Tensor) -> None:
        p[:3].copy_(x)
        p[3:].fill_(0)

    assert landed((4, 2), load, source=(3, 2)) == [(Box((0, 0), (3, 2)), (2, 1), 0)]


def test_a_tensor_overwritten_with_zeros_takes_nothing():
    found = landed((4,), lambda p, x: p.copy_(x.zero_()), source=(4,))
    assert found == [(Box((0,), (0,)), (0,), 0)]


def test_a_tensor_of_another_rank_has_no_place():
    model = Model((2,), lambda p, x: None)
    assert trace(model, [WeightSpec(name="unused", shape=(2,), dtype="float32")]).places == {"unused": []}


@pytest.mark.parametrize(
    "load",
    [
        lambda p, x: p.fill_(x[0].item()),
        lambda p, x: p.add_(x),
        lambda p, x: p.copy_(x.mul_(2)),
        lambda p, x: p.copy_(x.fill_(3)),
        lambda p, x: (x[2:].zero_(), p.copy_(x)),
        lambda p, x: p.copy_(x[x > 0]),
    ],
)
def test_a_loader_that_needs_values_is_refused(load):
    found = traced((4,), load, source=(4,))
    assert list(found.refused) == ["x"] and not found.places and not found.computed


def copied_and_computed(p: Tensor, x: Tensor) -> None:
    p.copy_(x)
    p.copy_(-p.exp())


@pytest.mark.parametrize(
    "load",
    [
        lambda p, x: p.copy_(-torch.exp(x.float())),
        lambda p, x: p.copy_(torch.cat((x, x))[:4]),
        lambda p, x: p.copy_(x.view(torch.int32)),
        lambda p, x: p.copy_(x[torch.tensor([3, 2, 1, 0])]),
        lambda p, x: p.copy_(torch.nn.functional.normalize(x, dim=0)),
        copied_and_computed,
    ],
)
def test_what_a_loader_computes_from_one_tensor_is_no_place_but_known(load):
    found = traced((4,), load, source=(4,))
    assert found.computed == {"x": ("p",)} and not found.places and not found.refused


def test_what_a_loader_keeps_of_a_parameter_is_known():
    def load(p: Tensor, x: Tensor) -> None:
        p.copy_(x)
        kept.append(p.sum() + other)

    kept, other = list[Tensor](), torch.zeros(1)
    assert traced((4,), load, source=(4,)).read == {"p"}
    assert traced((4,), copied_and_computed, source=(4,)).read == set()


def test_what_a_loader_computes_from_two_tensors_is_refused():
    class Both(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            first, second = (tensor for _, tensor in weights)
            self.p.data.copy_(first * second)

    specs = [WeightSpec(name=name, shape=(4,), dtype="float32") for name in ("x", "y")]
    assert list(trace(Both((4,), lambda p, x: None), specs).refused) == ["x", "y"]


def test_a_buffer_of_the_loader_is_refused():
    found = traced((4,), lambda p, x: torch.empty(4).copy_(x), source=(4,))
    assert found.refused == {"x": "the loader stores it outside the model's parameters"}


def test_loading_goes_on_behind_a_tensor_that_raises():
    specs = [WeightSpec(name=name, shape=(4,), dtype="float32") for name in ("unknown", "x")]
    found = trace(Model((4,), lambda p, x: p.copy_(x)), specs)
    assert found.refused == {"unknown": "KeyError: 'unknown'"}
    assert [place.parameter for place in found.places["x"]] == ["p"]


def test_an_error_after_the_last_tensor_refuses_what_has_not_landed():
    class Late(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            kept = dict(weights)
            self.p.data.copy_(kept["x"])
            raise RuntimeError("too late")

    specs = [WeightSpec(name=name, shape=(4,), dtype="float32") for name in ("x", "unused")]
    found = trace(Late((4,), lambda p, x: None), specs)
    assert list(found.places) == ["x"] and found.refused == {"unused": "RuntimeError: too late"}


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, tuple[int, ...]]:
    """A shape, a box in it, and an order of its dims in the parameter."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    spans = [
        sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda s: s[0] != s[1]))) for n in shape
    ]
    box = Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
    return shape, box, tuple(draw(st.permutations(range(len(shape)))))


@given(cuts(), st.data())
@settings(deadline=None)
def test_a_box_cut_into_pieces_is_joined_again(cut, data):
    shape, box, order = cut
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parameter = torch.zeros([box.shape[dim] for dim in order], dtype=torch.int64).permute(
        [order.index(dim) for dim in range(len(order))]
    )
    pieces = [(whole[box.slices()], parameter)]
    for dim in range(len(shape)):
        if data.draw(st.booleans()):
            pieces = [pair for left, right in pieces for pair in zip(left.split(1, dim), right.split(1, dim))]
    regions = [Region.between(left, right, start=int(right.storage_offset())) for left, right in pieces]
    joined = join(regions, shape)
    assert joined is not None
    ((found, strides, start),) = joined
    assert found == box
    parameter.as_strided(found.shape, strides, start).copy_(whole[box.slices()])
    assert torch.equal(parameter, whole[box.slices()])
