"""A live vLLM model as the target of weight transfers.

    landing = landing_of(model, specs, vllm_config=..., rank=...)     in a worker, after loading
    Subscriber(..., landing.views, manifest=..., rank=...)            writes the views, the engine paused
    landing.settle()                                                  after each commit, still paused

A view is a part of a live parameter if vLLM left it as loaded. The unprocessed parameters of a layer that vLLM repacked
or quantised are kept in host memory, and `settle` makes vLLM process them again. This applies to

    quantised layers   weights quantised by the sender with their scales, or whole ones that vLLM quantises itself
    packed layers      all of vLLM's CPU kernels, and those of experts other than Triton's

On any CPU vLLM can process only `fp8_channel` of the quantised ones (used in the tests); others need a GPU or AMX.

`settle` uses vLLM's own layerwise reload, which restores a layer's parameters as they were created, fills them,
processes them as after loading, and copies the result into the tensors used by kernels and captured graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.weight_map.chart import Chart, chart_of
from cosmos_rl_llm.engines.vllm.weight_map.names import is_a
from cosmos_rl_llm.engines.vllm.weight_map.region import LandingRegion
from cosmos_rl_llm.engines.vllm.weight_map.twin import twin
from cosmos_rl_transfer import Box, Manifest, TensorLayout

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def reload_layers(model: nn.Module, parameters: Mapping[str, Tensor], *, model_config: ModelConfig) -> None:
    """Process the layers that own `parameters` again; `parameters` must contain all parameters of such a layer.

    They are by qualified name and as vLLM creates them, before processing.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in parameters.items():
        path, _, attribute = name.rpartition(".")
        layers.setdefault(path, {})[attribute] = tensor
    for path, tensors in layers.items():
        layer = model.get_submodule(path)
        _reload(layer, tensors, model_config)
        for other in _tied(model, layer):
            other.quant_method.process_weights_after_loading(other)


def _tied(model: nn.Module, layer: nn.Module) -> list[Any]:
    """Return the other layers that use a parameter of `layer`: an output layer with the embedding's weight."""
    own = {id(parameter) for parameter in layer.parameters(recurse=False)}
    others = (other for other in model.modules() if other is not layer and is_a(other, "VocabParallelEmbedding"))
    return [other for other in others if own & {id(parameter) for parameter in other.parameters(recurse=False)}]


def _reload(layer: nn.Module, tensors: Mapping[str, Tensor], model_config: ModelConfig) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    _forget_packing(layer)
    initialize_layerwise_reload(layer)
    empty: dict[str, Any] = {name: p for name in tensors if (p := layer.get_parameter(name)).is_meta}
    loaders = {name: parameter.weight_loader.__wrapped__ for name, parameter in empty.items()}
    for parameter in empty.values():
        parameter.weight_loader = default_weight_loader  # the tensors are already sharded
    initialize_online_processing(layer)
    for name in tensors.keys() - empty.keys():  # vLLM does not move biases
        layer.get_parameter(name).data.copy_(tensors[name])
    for name, parameter in empty.items():
        parameter.weight_loader(parameter, tensors[name])
    finalize_layerwise_reload(layer, model_config)
    for name, parameter in empty.items():
        parameter.weight_loader = loaders[name]  # vLLM keeps them for the next reload


def _forget_packing(layer: nn.Module) -> None:
    """Reset CPU experts so that they are packed again, which vLLM does only when it creates their kernel."""
    method: Any = getattr(layer, "quant_method", None)
    backend = getattr(method, "unquantized_backend", None)
    if backend is not None and backend.name == "CPU":
        method.moe_kernel = None


def load_whole(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, model_config: ModelConfig) -> None:
    """Pass a whole checkpoint through the model's loader and process every layer again."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    for layer in model.modules():
        _forget_packing(layer)
    initialize_layerwise_reload(model)
    loader: Any = model
    loader.load_weights(tensors)
    finalize_layerwise_reload(model, model_config)


_KEPT_EXPERTS = ("TRITON", "BATCHED_TRITON")
"""Kernels of unquantised experts that use the weights as loaded."""
_UNPROCESSED = (
    "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "_GateLinearMethod",
    "PlainLinear", "PlainEmbedding",
)  # fmt: skip
"""Classes whose processing after loading does not change a parameter, except for the packing that is checked."""
_COPIES = ("_cpu_unpacked_conv_weight", "_bf16x3_weight")
"""Attributes with repacked weights of layers: convolutions on CPU, routers on AMD GPUs."""
_PROCESS = "process_weights_after_loading"


def landing_of(model: nn.Module, specs: Sequence[WeightSpec], *, vllm_config: VllmConfig, rank: int) -> Landing:
    """Map the tensors of a checkpoint to a loaded model.

    `specs` are the delivered tensors, by checkpoint name; `rank` is this worker's in its replica. Builds the model once
    more without memory. Raises ValueError if the delivered tensors are insufficient for the model.
    """
    return Landing(model, chart_of(twin(vllm_config), specs), vllm_config=vllm_config, rank=rank)


def replica_manifest(parts: Iterable[Manifest]) -> Manifest:
    """Join the manifests of a replica's ranks, each with the tensors of all ranks in the same order.

    The dtype of a tensor is taken from a rank that needs it; other ranks do not have the engine's dtype.
    """
    return Manifest(tuple(_joined(layouts) for layouts in zip(*(part.layouts for part in parts), strict=True)))


def _joined(layouts: Sequence[TensorLayout]) -> TensorLayout:
    with_boxes = [layout for layout in layouts if layout.boxes]
    boxes = {rank: box for layout in with_boxes for rank, box in layout.boxes.items()}
    return TensorLayout((with_boxes or layouts)[0].spec, boxes)


class Landing:
    """One worker's parts of each version, their destinations, and the processing after a commit."""

    def __init__(self, model: nn.Module, chart: Chart, *, vllm_config: VllmConfig, rank: int) -> None:
        self._model = model
        self._chart = chart
        self._config = vllm_config
        self._live = dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))
        self.manifest = Manifest(chart.layouts(rank))
        """This rank's boxes, with all tensors listed; specs have the dtypes of the engine. For `replica_manifest`."""
        self._moved = self._layers_not_live()
        """By layer, why none of its parameters can be written in place."""
        self._refused = chart.refused | self._computed_elsewhere()
        """By tensor, why all tensors must go through the loader: its place in the live model is unknown."""
        self.reloaded = self._reasons()
        """By name, why a tensor is not written directly into a live parameter."""
        self.scattered = tuple(name for name in chart.specs if chart.is_scattered(name))
        """Tensors whose parts lie apart: the least box with all of them is taken in host memory and copied from it."""
        self.untouched = self._untouched()
        """Parameters that no tensor lands in: they keep the values they were loaded with."""
        self._check()
        self._staged: dict[str, Tensor] = {}
        """Parameters of reloaded layers as vLLM creates them, in host memory."""
        self._derived = [derived for layer in model.modules() if (derived := _kept_by_attention(layer)) is not None]
        """Layers that keep copies or products of others' weights: kv_b_proj split and transposed, sinks in float32."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """(place in the model, where what belongs there was written)"""
        self.views = {name: self._view(name, box) for name in chart.specs if (box := chart.box(name))}
        """By name, the memory a box is written to, shaped like it; tensors of other ranks are left out."""
        self._stage_blanks()

    def settle(self) -> None:
        """Make the engine compute with what was written to the views. Call after each commit, before resuming."""
        from vllm.config import set_current_vllm_config

        model_config = self._config.model_config
        with torch.no_grad(), set_current_vllm_config(self._config):
            for copy, original in self._copies:
                copy.copy_(original)
            if self._refused:
                load_whole(self._model, self._whole_tensors(), model_config=model_config)
            elif self._chart.computed:
                loader: Any = self._model
                loader.load_weights((name, self.views[name]) for name in self._chart.computed)
            reload_layers(self._model, self._staged, model_config=model_config)
            for kept in self._derived:
                kept.process_weights_after_loading(model_config.dtype)

    def _view(self, name: str, box: Box) -> Tensor:
        if self._refused or name in self._chart.computed:
            return torch.zeros(box.shape, dtype=self._dtype(name), device="cpu")
        first, *others = places = [place for place in self._chart.places[name] if place.box.numel]
        if name not in self.scattered:
            view = first.view(self._memory(first))
            self._copies += [(place.view(self._memory(place)), view) for place in others]
            return view
        view = torch.zeros(box.shape, dtype=self._dtype(name), device="cpu")
        self._copies += [(p.view(self._memory(p)), view[p.box.within(box).slices()]) for p in places]
        return view

    def _stage_blanks(self) -> None:
        """Keep zeros for the parts that this rank's loader zeroes: a layer is reloaded with all its parameters."""
        for places in () if self._refused else self._chart.places.values():
            for place in places:
                if not place.box.numel and _layer(place.parameter) in self._moved:
                    self._memory(place)

    def _memory(self, place: LandingRegion) -> Tensor:
        """The parameter of a place: the live one, or the one kept for reloading its layer."""
        if place.name not in self.reloaded:
            return self._live[place.parameter]
        if place.parameter not in self._staged:
            shape, strides = self._chart.strides[place.parameter]
            memory = torch.empty_strided(shape, strides, dtype=self._dtype(place.name), device="cpu")
            self._staged[place.parameter] = memory.zero_()
        return self._staged[place.parameter]

    def _dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self._chart.specs[name].dtype)

    def _layers_not_live(self) -> dict[str, str]:
        """Find the layers that are reloaded whole, because of at least one of their parameters."""
        layers: dict[str, str] = {}
        for places in self._chart.places.values():
            for place in places:
                if why := self._why_not_live(place):
                    layers.setdefault(_layer(place.parameter), f"{place.parameter}: {why}")
        return layers

    def _computed_elsewhere(self) -> dict[str, str]:
        """Find the tensors from which the loader computes a parameter that is not live in its original form."""
        reasons = {}
        for name, parameters in self._chart.computed.items():
            for parameter in parameters:
                why = self._moved.get(_layer(parameter)) or self._why_changed(parameter)
                if why is not None:
                    reasons[name] = why
        return reasons

    def _reasons(self) -> dict[str, str]:
        """Find the tensors that have no live view."""
        computed = {name: f"the loader computes {', '.join(p)}" for name, p in self._chart.computed.items()}
        landing = {name: [_layer(place.parameter) for place in places] for name, places in self._chart.places.items()}
        if self._refused:  # places unknown: every layer goes through the loader
            why = f"{next(iter(self._refused))} must go through the loader, and its layer is unknown"
            return {name: why for name, layers in landing.items() if layers} | computed | self._refused
        moved = {
            name: [self._moved[layer] for layer in layers if layer in self._moved] for name, layers in landing.items()
        }
        return {name: whys[0] for name, whys in moved.items() if whys} | computed

    def _why_changed(self, parameter: str) -> str | None:
        live = self._live.get(parameter)
        if live is None or (tuple(live.shape), live.stride()) != self._chart.strides[parameter]:
            return "vLLM keeps it in another layout"
        return None

    def _why_not_live(self, place: LandingRegion) -> str | None:
        layer = self._model.get_submodule(_layer(place.parameter))
        method: Any = getattr(layer, "quant_method", None)
        if method is not None and _definer(method) not in _UNPROCESSED:
            return f"{type(method).__name__} processes it after loading"
        if why := self._why_changed(place.parameter):
            return why
        if (live := self._live[place.parameter]).dtype != self._dtype(place.name):
            return f"vLLM keeps it as {live.dtype}"
        backend = getattr(method, "unquantized_backend", None)
        if backend is not None and backend.name not in _KEPT_EXPERTS:
            return f"{backend.value} kernels keep experts in another layout"
        if vars(layer).get("cpu_linear", F.linear) is not F.linear:
            return "vLLM computes with a packed copy on CPU"
        if any(getattr(layer, copy, None) is not None for copy in _COPIES):
            return "vLLM computes with a packed copy"
        return None

    def _untouched(self) -> tuple[str, ...]:
        landed = {place.parameter for places in self._chart.places.values() for place in places}
        landed |= {parameter for parameters in self._chart.computed.values() for parameter in parameters}
        return tuple(n for n, _ in self._model.named_parameters() if n in self._chart.strides and n not in landed)

    def _check(self) -> None:
        """Raise ValueError if new weights would not update every tensor that vLLM uses."""
        if _definer(self._model) is not None:
            raise ValueError(
                f"{type(self._model).__name__} computes values from its weights after loading, which new weights "
                'would not update; set rollout.engine = "torch"'
            )
        self._check_shared()
        reloaded = {_layer(place.parameter) for name in self.reloaded for place in self._chart.places.get(name, ())}
        for name in self.untouched:
            if _layer(name) in reloaded:
                raise ValueError(
                    f"{name} is not among the delivered tensors, and its layer can only be loaded whole; "
                    'set rollout.engine = "torch"'
                )
        for buffer, parameter in self._chart.aliases.items():
            if _memory_of(self._live[buffer]) != _memory_of(self._live[parameter]):
                raise ValueError(
                    f"vLLM packed {parameter} for the kernels of this CPU and also uses {buffer}, which new weights "
                    'would not update; set rollout.options.dtype = "float32", or rollout.engine = "torch"'
                )

    def _check_shared(self) -> None:
        """Raise ValueError if two tensors share memory in the engine."""
        owners: dict[tuple[int, int], str] = {}
        for places in self._chart.places.values():
            for place in places:
                live = self._live.get(place.parameter)
                if live is None or not live.numel():
                    continue
                owner = owners.setdefault((_memory_of(live), int(live.storage_offset())), place.parameter)
                if owner != place.parameter:
                    raise ValueError(
                        f"{place.parameter} and {owner} share memory in the engine but are trained separately: they "
                        "were equal when the engine loaded them; set tie_word_embeddings in the model's config.json"
                    )

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors with only this rank's box filled: the loader slices it again."""
        for name in self.reloaded:
            tensor = torch.zeros(self._chart.specs[name].shape, dtype=self._dtype(name), device="cpu")
            if (box := self._chart.box(name)) is not None:
                tensor[box.slices()] = self.views[name]
            yield name, tensor


def _kept_by_attention(layer: nn.Module) -> Any:
    """Return the object that can reprocess an attention layer's weights at any time: the layer or its kernels.

    Never a plain layer itself, which would lose the scales of its keys and values.
    """
    is_attention = is_a(layer, "AttentionLayerBase") or is_a(layer, "MMEncoderAttention")
    if not is_attention or (definer := _definer(layer)) is None:
        return None
    if definer != "Attention":
        return layer
    kernels: Any = getattr(layer, "impl", None)
    return kernels if _definer(kernels) not in (None, "AttentionImplBase") else None


def _definer(value: object) -> str | None:
    """Return the name of the class that defines how `value` processes weights after loading."""
    return next((kind.__name__ for kind in type(value).__mro__ if _PROCESS in vars(kind)), None)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]
