"""Splits a causal language model into the stages of a pipeline.

    whole        embed_tokens  layers.0  layers.1  layers.2  layers.3  norm  lm_head
    stage 0      embed_tokens  layers.0  layers.1     -         -       -      -
    stage 1           -           -         -      layers.2  layers.3  norm  lm_head

A part of another stage becomes a `PassThrough`, so that weight names and layer numbers are those of the whole model.
`parallel.stages.cut_layers` assigns layers to stages. With a tied head the last stage also has `embed_tokens`, under
its own name, and uses it only as the head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.stages import cut_layers, num_stages


class PassThrough(nn.Module):
    """Replaces a part of another stage: returns its input hidden states."""

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the output head is the embedding's matrix."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def cut_model(model: PreTrainedModel, *, section: ParallelSection, stage: int) -> list[PreTrainedModel]:
    """Reduce `model`, in place, to the parts of rank `stage` of the pipeline; return its stages in order.

    The stages share the modules of `model`: a change of a layer affects all models that contain it.

    Raises:
        UserError: the model has fewer layers than there are stages, or its family cannot be split.
    """
    count = num_stages(section)
    mine = range(stage, count, section.pp)
    parts = _parts(model, count)
    for name, holders in parts.items():
        if not holders.intersection(mine):
            model.set_submodule(name, PassThrough())
    if len(mine) == 1:
        return [model]
    return [_view(model, parts, index) for index in mine]


def _view(model: PreTrainedModel, parts: Mapping[str, set[int]], stage: int) -> PreTrainedModel:
    """A model that shares everything with `model`, but passes through the parts of its other stages."""
    layers = model.base_model.get_submodule("layers")
    shared = [model.config, *model.children(), *model.base_model.children(), *layers.children()]
    copied = {id(model.base_model), id(layers)}
    done: dict[int, object] = {id(one): one for one in shared if id(one) not in copied}
    for name, holders in parts.items():
        if stage not in holders:
            done[id(model.get_submodule(name))] = PassThrough()
    return copy.deepcopy(model, done)  # entries of `done` count as copied


def _parts(model: PreTrainedModel, num_stages: int) -> dict[str, set[int]]:
    """Name of each part with weights -> its stages, in the order of transformers' plan."""
    decoder, prefix = model.base_model, model.base_model_prefix
    plan = list(model.config.get_text_config().base_model_pp_plan or ())
    weighty = [name for name, child in decoder.named_children() if any(True for _ in child.parameters())]
    if "layers" not in plan or not set(weighty) <= set(plan):
        raise UserError(
            f"[policy.parallel] pp: transformers has no pipeline plan for all parts of {type(model).__name__} "
            f"({', '.join(weighty)}); set pp = 1"
        )
    last, at = num_stages - 1, plan.index("layers")
    parts = {f"{prefix}.{name}": {0} for name in plan[:at]}
    num_layers = len(list(decoder.get_submodule("layers").children()))
    for stage, layers in enumerate(cut_layers(num_layers, num_stages)):
        parts |= {f"{prefix}.layers.{i}": {stage} for i in layers}
    parts |= {f"{prefix}.{name}": {last} for name in plan[at + 1 :]}
    names = {id(module): name for name, module in model.named_modules()}
    if is_tied(model):
        parts[names[id(model.get_input_embeddings())]].add(last)
    parts[names[id(model.get_output_embeddings())]] = {last}
    return parts
