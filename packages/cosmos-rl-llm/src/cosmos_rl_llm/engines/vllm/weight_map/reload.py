"""Weight updates of layers that vLLM repacks or quantises after loading, by vLLM's own layerwise reload.

It restores a layer's parameters as they were created, fills them, processes them as after loading, and copies the
result into the tensors used by kernels and captured graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cosmos_rl_llm.engines.vllm.weight_map.names import is_a

if TYPE_CHECKING:
    from vllm.config import ModelConfig


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
