"""vLLM's adapter slots as the target of weight transfers.

    <layer>.lora_A.weight [rank, in]           -> lora_a_stacked[slice][SLOT, 0, :rank]      of the layer's wrapper
    <layer>.lora_B.weight [out, rank], scaled  -> lora_b_stacked[slice][SLOT, 0, :, :rank]

A wrapper of fused layers has a slice for each (q, k, v; gate, up). Under tensor parallelism a worker's slot has a part
of the rows of B, or of the columns of A: vLLM's own `slice_lora_a` and `slice_lora_b` decide which, applied to numbered
elements. At the start every place is compared with where vLLM's own `set_lora` writes an adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.plugin import ADAPTER_ID
from cosmos_rl_llm.engines.vllm.weight_map.landing import Landing, landing_of
from cosmos_rl_llm.engines.vllm.weight_map.names import Target, VllmNames, is_a
from cosmos_rl_llm.engines.vllm.weight_map.twin import twin
from cosmos_rl_transfer import Box, Manifest, TensorLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SLOT = 0
"""Of the one adapter."""
_ADAPTER = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
_MERGED = 'set [model.lora] serve = "merged"'


def has_adapters(specs: Iterable[WeightSpec]) -> bool:
    """Whether adapters are published, by their names in peft's files."""
    return any(_ADAPTER.fullmatch(spec.name) for spec in specs)


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """The part of one adapter's matrix that a worker's slot has."""

    wrapper: Any
    """vLLM's layer with adapters."""
    matrix: str
    """"A" or "B"."""
    part: int
    """Index of the slice."""
    shape: tuple[int, ...]
    """Of the whole matrix."""
    box: Box
    view: Tensor
    """The memory in the slot [*box.shape]."""


class AdapterLanding:
    """One worker's adapter slots, and the places of weights that are trained in full beside the adapters.

    Members as those of `Landing`.
    """

    def __init__(self, model: nn.Module, specs: Sequence[WeightSpec], *, vllm_config: VllmConfig, rank: int) -> None:
        """specs: of the published tensors. Raises ValueError for an adapter that no slot takes."""
        wrappers = dict(model.named_modules(remove_duplicate=False))
        _check_slot(model)
        names = VllmNames(twin(vllm_config))
        self._places: dict[str, SlotPlace | None] = {}
        for spec in specs:
            if match := _ADAPTER.fullmatch(spec.name):
                self._places[spec.name] = _place(spec, match, names=names, wrappers=wrappers)
        compare_with_vllm([place for place in self._places.values() if place is not None])
        others = [spec for spec in specs if spec.name not in self._places]
        self._whole: Landing | None = None
        if others:
            self._whole = landing_of(model, others, vllm_config=vllm_config, rank=rank)
        layouts = {} if self._whole is None else {one.spec.name: one for one in self._whole.manifest.layouts}
        for spec in specs:
            if spec.name in self._places:
                layouts[spec.name] = self._layout(spec, self._places[spec.name], rank)
        self.manifest = Manifest(tuple(layouts[spec.name] for spec in specs))
        self.views: Mapping[str, Tensor] = {
            name: place.view for name, place in self._places.items() if place is not None
        } | ({} if self._whole is None else self._whole.views)
        self.reloaded = {} if self._whole is None else self._whole.reloaded
        self.untouched: tuple[str, ...] = ()
        """None: what is not published is the base model's."""

    def settle(self) -> None:
        """As `Landing.settle`, for the weights trained in full; slots need nothing."""
        if self._whole is not None:
            self._whole.settle()

    @staticmethod
    def _layout(spec: WeightSpec, place: SlotPlace | None, rank: int) -> TensorLayout:
        if place is None:
            return TensorLayout(spec, {})
        dtype = str(place.view.dtype).removeprefix("torch.")
        return TensorLayout(WeightSpec(name=spec.name, shape=spec.shape, dtype=dtype), {rank: place.box})


def _check_slot(model: nn.Module) -> None:
    """Raise ValueError if vLLM serves the adapter from another slot, or has forgotten it."""
    manager: Any = vars(model).get("lora_manager")
    if manager is None or list(manager.lora_index_to_id) != [ADAPTER_ID]:
        served = None if manager is None else manager.lora_index_to_id
        raise ValueError(f"vLLM's adapter slots have {served} and not the adapter of the policy")


def _place(
    spec: WeightSpec, match: re.Match[str], *, names: VllmNames, wrappers: Mapping[str, nn.Module]
) -> SlotPlace | None:
    """Return the place of one matrix; None if its layer is on other workers. Raises ValueError if there is none."""
    layer, matrix = match["layer"], match["matrix"]
    targets = names(f"{layer}.weight")
    if targets is None:
        raise ValueError(f"the model has no layer {layer} for an adapter: is it of another model?")
    if not targets:
        return None
    target = targets[0]
    wrapper: Any = wrappers.get(target.path)
    part = _slice(target)
    if len(targets) > 1 or part is None or not is_a(wrapper, "BaseLayerWithLoRA") or part >= wrapper.n_slices:
        raise ValueError(f"vLLM has no adapter slot for {layer} ({type(target.layer).__name__}); {_MERGED}")
    box = _box(wrapper, matrix, part, spec.shape)
    stacked = (wrapper.lora_a_stacked if matrix == "A" else wrapper.lora_b_stacked)[part][SLOT, 0]
    rows, columns = box.shape
    if rows > stacked.shape[0] or columns > stacked.shape[1]:
        raise ValueError(f"{spec.name} {list(spec.shape)} does not fit vLLM's slot {list(stacked.shape)}; {_MERGED}")
    return SlotPlace(wrapper, matrix, part, spec.shape, box, stacked[:rows, :columns])


def _slice(target: Target) -> int | None:
    """Return the index of a checkpoint tensor among those fused in its layer; None for several of them."""
    if target.shard in ("q", "k", "v"):
        return "qkv".index(str(target.shard))
    return target.shard if isinstance(target.shard, int) else 0 if target.shard is None else None


def _box(wrapper: Any, matrix: str, part: int, shape: tuple[int, ...]) -> Box:
    """Return the part of A or B that vLLM slices for this worker. Raises ValueError for one that is no box."""
    numbers = torch.arange(shape[0] * shape[1], device="cpu").reshape(shape)
    mine = numbers
    if wrapper.tp_size > 1:
        cut = wrapper.slice_lora_a if matrix == "A" else wrapper.slice_lora_b
        mine = cut(numbers) if wrapper.n_slices == 1 else cut(_at(part, numbers, wrapper.n_slices))[part]
    first = int(mine[0, 0])
    offset = (first // shape[1], first % shape[1])
    box = Box(offset, (int(mine.shape[0]), int(mine.shape[1])))
    if not torch.equal(numbers[box.slices()], mine):
        raise ValueError(f"vLLM slices an adapter of {type(wrapper).__name__} into several parts; {_MERGED}")
    return box


def _at(part: int, tensor: Tensor, count: int) -> list[Tensor | None]:
    return [tensor if index == part else None for index in range(count)]


@torch.no_grad()
def compare_with_vllm(places: Sequence[SlotPlace]) -> None:
    """Write numbers by vLLM's `set_lora` and compare them with what the views have; leaves zeros.

    Raises ValueError if vLLM writes an adapter elsewhere.
    """
    for wrapper in {id(place.wrapper): place.wrapper for place in places}.values():
        own = [place for place in places if place.wrapper is wrapper]
        sides: dict[str, list[Tensor | None]] = {}
        for matrix, stacked in (("A", wrapper.lora_a_stacked), ("B", wrapper.lora_b_stacked)):
            sides[matrix] = [None] * wrapper.n_slices
            for place in (one for one in own if one.matrix == matrix):
                numbers = torch.arange(math.prod(place.shape), device="cpu").reshape(place.shape) % 251 + 1
                sides[matrix][place.part] = numbers.to(stacked[place.part].dtype)
        single = wrapper.n_slices == 1
        wrapper.set_lora(SLOT, *(side[0] if single else side for side in (sides["A"], sides["B"])))
        for place in own:
            numbers = sides[place.matrix][place.part]
            assert numbers is not None, "filled above"
            if not torch.equal(numbers[place.box.slices()].to(place.view.device), place.view):
                raise ValueError(f"vLLM writes adapters of {type(wrapper).__name__} elsewhere; {_MERGED}")
        wrapper.reset_lora(SLOT)
