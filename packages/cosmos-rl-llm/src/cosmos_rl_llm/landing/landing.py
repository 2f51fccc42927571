"""A live vLLM model as the target of weight transfers.

    landing = landing_of(model, specs, vllm_config=..., rank=...)     in a worker, after loading
    Subscriber(..., landing.views, manifest=..., rank=...)            writes the views, the engine paused
    landing.settle()                                                  after each commit, still paused

A view is a part of a live parameter wherever vLLM left it as it was loaded. A layer that vLLM repacked or quantised is
kept in host memory as it was before that, and `settle` lets vLLM process it again. That is so for

    quantised layers   weights quantised by the sender with their scales, or whole ones that vLLM quantises itself
    packed layers      all of vLLM's CPU kernels, and those of experts other than Triton's

Of the quantised ones vLLM can process `fp8_channel` on any CPU: the tests do. It needs a GPU (or AMX) for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.landing.chart import Chart, How, chart_of
from cosmos_rl_llm.landing.names import is_a
from cosmos_rl_llm.landing.place import Place
from cosmos_rl_llm.landing.reload import load_whole, reload_layers
from cosmos_rl_llm.landing.twin import acting_as, twin
from cosmos_rl_transfer.layout.manifest import Box, Manifest, TensorLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KEPT_EXPERTS = ("TRITON", "BATCHED_TRITON")
"""Kernels of unquantised experts that read the weights as they were loaded."""
_UNPROCESSED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


def landing_of(
    model: nn.Module, specs: Sequence[WeightSpec], *, vllm_config: VllmConfig, rank: int, how: How = "table"
) -> Landing:
    """Find where the tensors of a checkpoint land in a loaded model.

    `specs` are what will be delivered, by checkpoint name; `rank` is this worker's in its replica. Builds the model
    once more without memory. Raises ValueError if the delivered tensors cannot make up the model.
    """
    return Landing(model, chart_of(twin(vllm_config), specs, how=how), vllm_config=vllm_config, rank=rank)


def manifest_for(vllm_config: VllmConfig, specs: Sequence[WeightSpec], *, how: How = "table") -> Manifest:
    """Describe what all ranks of a replica need, in a process without workers: rank = pp_rank * tp_size + tp_rank."""
    parallel = vllm_config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if parallel.data_parallel_size > 1:
        raise ValueError("a replica is one engine: set data_parallel_size to 1 and run more replicas")
    parts = []
    for rank in range(tp * pp):
        with acting_as(rank, tp=tp, pp=pp):
            parts.append(Manifest(chart_of(twin(vllm_config), specs, how=how).layouts(rank)))
    return replica_manifest(parts)


def replica_manifest(parts: Iterable[Manifest]) -> Manifest:
    """Join what the ranks of a replica need, each of which names the tensors of all in the same order.

    The dtype of a tensor is that of a rank that needs it: the others do not know it.
    """
    return Manifest(tuple(_joined(layouts) for layouts in zip(*(part.layouts for part in parts), strict=True)))


def _joined(layouts: Sequence[TensorLayout]) -> TensorLayout:
    held = [layout for layout in layouts if layout.boxes]
    boxes = {rank: box for layout in held for rank, box in layout.boxes.items()}
    return TensorLayout((held or layouts)[0].spec, boxes)


class Landing:
    """What one worker needs of each version, where it is written, and what makes it take effect."""

    def __init__(self, model: nn.Module, chart: Chart, *, vllm_config: VllmConfig, rank: int) -> None:
        self._model = model
        self._chart = chart
        self._config = vllm_config
        self._live = dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))
        self.manifest = Manifest(chart.layouts(rank))
        """This rank's boxes, every tensor named; specs have the dtypes of the engine. For `replica_manifest`."""
        self.reloaded = self._reasons()
        """By name, why a tensor is not written straight into a live parameter."""
        self.scattered = tuple(name for name in chart.specs if chart.is_scattered(name))
        """Tensors whose parts lie apart: the least box with all of them is taken in host memory and copied from it."""
        self.untouched = self._untouched()
        """Parameters that no tensor lands in: they keep the values they were loaded with."""
        self._check()
        self._staged: dict[str, Tensor] = {}
        """Parameters of reloaded layers as vLLM creates them, in host memory."""
        self._derived: list[Any] = [layer for layer in model.modules() if is_a(layer, "MLAAttention")]
        """Layers that keep products of other layers' weights: kv_b_proj, split and transposed."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """(place in the model, where what belongs there was written)"""
        self.views = {name: self._view(name, box) for name in chart.specs if (box := chart.box(name))}
        """By name, the memory a box is written to, shaped like it; tensors of other ranks are left out."""

    def settle(self) -> None:
        """Make the engine compute with what was written to the views. Call after each commit, before resuming."""
        from vllm.config import set_current_vllm_config

        model_config = self._config.model_config
        with torch.no_grad(), set_current_vllm_config(self._config):
            for copy, original in self._copies:
                copy.copy_(original)
            if self._chart.refused:
                load_whole(self._model, self._whole(), model_config=model_config)
            reload_layers(self._model, self._staged, model_config=model_config)
            for layer in self._derived:
                layer.process_weights_after_loading(model_config.dtype)

    def _view(self, name: str, box: Box) -> Tensor:
        if self._chart.refused:
            return torch.zeros(box.shape, dtype=self._dtype(name), device="cpu")
        first, *others = places = [place for place in self._chart.places[name] if place.box.numel]
        if name not in self.scattered:
            view = first.view(self._memory(first))
            self._copies += [(place.view(self._memory(place)), view) for place in others]
            return view
        view = torch.zeros(box.shape, dtype=self._dtype(name), device="cpu")
        self._copies += [(p.view(self._memory(p)), view[p.box.within(box).slices()]) for p in places]
        return view

    def _memory(self, place: Place) -> Tensor:
        """The parameter a place is part of: the live one, or the one kept for reloading its layer."""
        if place.name not in self.reloaded:
            return self._live[place.parameter]
        if place.parameter not in self._staged:
            shape, strides = self._chart.strides[place.parameter]
            made = torch.empty_strided(shape, strides, dtype=self._dtype(place.name), device="cpu")
            self._staged[place.parameter] = made.zero_()
        return self._staged[place.parameter]

    def _dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self._chart.specs[name].dtype)

    def _reasons(self) -> dict[str, str]:
        """Find the tensors that have no live view; a layer with one is reloaded as a whole."""
        reasons = dict(self._chart.refused)
        if reasons:  # where they land is not known: every layer goes through the loader
            why = f"{next(iter(reasons))} must go through the loader, in which layer is not known"
            return reasons | {name: why for name, found in self._chart.places.items() if found and name not in reasons}
        layers: dict[str, str] = {}
        for places in self._chart.places.values():
            for place in places:
                if why := self._why_not_live(place):
                    layers.setdefault(_layer(place), f"{place.parameter}: {why}")
        for name, places in self._chart.places.items():
            if found := [layers[_layer(place)] for place in places if _layer(place) in layers]:
                reasons[name] = found[0]
        return reasons

    def _why_not_live(self, place: Place) -> str | None:
        live = self._live.get(place.parameter)
        layer = self._model.get_submodule(_layer(place))
        method: Any = getattr(layer, "quant_method", None)
        if method is not None and not any(is_a(method, name) for name in _UNPROCESSED):
            return f"{type(method).__name__} processes it after loading"
        if live is None or (tuple(live.shape), live.stride()) != self._chart.strides[place.parameter]:
            return "vLLM keeps it in another layout"
        if live.dtype != self._dtype(place.name):
            return f"vLLM keeps it as {live.dtype}"
        backend = getattr(method, "unquantized_backend", None)
        if backend is not None and backend.name not in _KEPT_EXPERTS:
            return f"{backend.value} kernels keep experts in another layout"
        if vars(layer).get("cpu_linear", F.linear) is not F.linear:
            return "vLLM computes with a packed copy on CPU"
        return None

    def _untouched(self) -> tuple[str, ...]:
        landed = {place.parameter for places in self._chart.places.values() for place in places}
        return tuple(n for n, _ in self._model.named_parameters() if n in self._chart.strides and n not in landed)

    def _check(self) -> None:
        """Raise ValueError if two tensors share memory in the engine, or a layer would be reloaded in part."""
        owners: dict[tuple[int, int], str] = {}
        for places in self._chart.places.values():
            for place in places:
                live = self._live.get(place.parameter)
                if live is None or not live.numel():
                    continue
                owner = owners.setdefault((live.untyped_storage()._cdata, int(live.storage_offset())), place.parameter)
                if owner != place.parameter:
                    raise ValueError(
                        f"{place.parameter} and {owner} share memory in the engine but are trained apart: the engine "
                        "found them equal when it loaded them; set tie_word_embeddings in the model's config.json"
                    )
        reloaded = {_layer(place) for name in self.reloaded for place in self._chart.places.get(name, ())}
        for name in self.untouched:
            if name.rpartition(".")[0] in reloaded:
                raise ValueError(f"{name} is not among the delivered tensors, and its layer can only be loaded whole")

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of which the box this rank needs is filled: the loader cuts it out again."""
        for name in self.reloaded:
            whole = torch.zeros(self._chart.specs[name].shape, dtype=self._dtype(name), device="cpu")
            if (box := self._chart.box(name)) is not None:
                whole[box.slices()] = self.views[name]
            yield name, whole


def _layer(place: Place) -> str:
    return place.parameter.rpartition(".")[0]
