"""A causal language model with its layers on several ranks: the policy of a recipe with pp above 1.

microbatch -> Row, the same in every stage
Row.tokens -> first stage -> hidden [1, l, H] -> ... -> last stage -> log-probabilities [T] -> loss

The model is split into stages:

    whole        embed_tokens  layers.0  layers.1  layers.2  layers.3  norm  lm_head
    stage 0      embed_tokens  layers.0  layers.1     -         -       -      -
    stage 1           -           -         -      layers.2  layers.3  norm  lm_head

A part of another stage becomes a `PassThrough`, so that weight names and layer numbers are those of the whole model.
`parallel.stages.cut_layers` assigns layers to stages. With a tied head the last stage also has `embed_tokens`, under
its own name, and uses it only as the head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import MicrobatchLoss
from cosmos_rl_core.parallel.axes.fsdp import reshard
from cosmos_rl_core.parallel.axes.tied import tied_gradients
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.pipeline import Pipeline, PolicyStage
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.parallel.stages import cut_layers, num_stages
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.model.causal_lm import language_model
from cosmos_rl_llm.policy.context import TokenShard
from cosmos_rl_llm.policy.parallelize import parallelize
from cosmos_rl_llm.policy.policy import LanguagePolicy
from cosmos_rl_llm.policy.probe import runs_unpacked
from cosmos_rl_llm.policy.token_model import PLAIN, TermModel, TermOptions, outputs_of

_LEFT_OUT = {"qwen3_vl_text": ("embed_tokens", "layers", "norm")}
"""By model_type: plans missing in transformers, in order."""


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
    decoder = language_model(model)
    layers = decoder.get_submodule("layers")
    holders = (model, model.base_model, decoder, layers)
    shared = [model.config, *(child for holder in holders for child in holder.children())]
    copied = {id(holder) for holder in holders}
    done: dict[int, object] = {id(one): one for one in shared if id(one) not in copied}
    for name, holders in parts.items():
        if stage not in holders:
            done[id(model.get_submodule(name))] = PassThrough()
    return copy.deepcopy(model, done)  # entries of `done` count as copied


def _parts(model: PreTrainedModel, num_stages: int) -> dict[str, set[int]]:
    """Name of each part with weights -> its stages, in the order of transformers' plan."""
    decoder = language_model(model)
    names = {id(module): name for name, module in model.named_modules()}
    prefix, config = names[id(decoder)], model.config.get_text_config()
    plan = list(config.base_model_pp_plan or _LEFT_OUT.get(config.model_type, ()))
    weighty = [name for name, child in decoder.named_children() if any(True for _ in child.parameters())]
    if "layers" not in plan or not set(weighty) <= set(plan):
        raise UserError(
            f"[policy.parallel] pp: transformers has no pipeline plan for all parts of {type(model).__name__} "
            f"({', '.join(weighty)}); set pp = 1"
        )
    last, at = num_stages - 1, plan.index("layers")
    beside = [name for name, child in model.base_model.named_children() if decoder not in (child, model.base_model)]
    parts = {f"{model.base_model_prefix}.{name}": {0} for name in beside}  # the vision tower
    parts |= {f"{prefix}.{name}": {0} for name in plan[:at]}
    num_layers = len(list(decoder.get_submodule("layers").children()))
    check_deepstack(model.config, layers=len(cut_layers(num_layers, num_stages)[0]))
    for stage, layers in enumerate(cut_layers(num_layers, num_stages)):
        parts |= {f"{prefix}.layers.{i}": {stage} for i in layers}
    parts |= {f"{prefix}.{name}": {last} for name in plan[at + 1 :]}
    if is_tied(model):
        parts[names[id(model.get_input_embeddings())]].add(last)
    parts[names[id(model.get_output_embeddings())]] = {last}
    return parts


def check_deepstack(config: PreTrainedConfig, *, layers: int) -> None:
    """Raise UserError if features of the vision tower go into more layers than the first stage has."""
    deep = len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", ()))
    if deep > layers:
        raise UserError(
            f"[policy.parallel] pp: the vision tower's features go into the first {deep} layers, and the first stage "
            f"has {layers}; lower pp or stages_per_rank"
        )


@dataclass(frozen=True, slots=True)
class TermStage(PolicyStage):
    """A `TermModel` as a stage of a core `Pipeline`."""

    module: TermModel

    def prepare(self, microbatch: Microbatch) -> TokenShard:
        return self.module.row(microbatch.inputs, teacher=microbatch.terms.teacher)

    def hidden_shape(self, inputs: TokenShard) -> tuple[int, ...]:
        axis = self.module.axis
        length = inputs.positions.shape[-1]
        if axis is not None and axis.sequence:
            length //= axis.size
        return (1, length, self.module.config.get_text_config().hidden_size)

    def __call__(self, hidden: Tensor | None, inputs: TokenShard, *, with_entropy: bool) -> Tensor | PolicyOutputs:
        passed = self.module(hidden, inputs, with_entropy)
        if not self.module.last:
            return passed
        if self.module.returns_hidden:
            return PolicyOutputs(logprobs=passed.new_zeros(len(passed)), tensors={"hidden": passed})
        return outputs_of(passed)


class PipelinedPolicy(LanguagePolicy[PreTrainedModel]):
    """`interfaces.Policy` like `CausalLMPolicy`, over this rank's stages of the model.

    `module` contains this rank's parts, under the names of the whole model; a tied matrix is the embedding's on both
    its stages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: TermOptions = PLAIN,
        *,
        chat: Chat | None = None,
        setup: ModelSetup,
    ) -> None:
        """Take over the whole `model`, keep the parts of this rank's stages, and shard them over the ranks of `setup`.

        setup: with a mesh whose axis pp is above 1.

        Raises UserError for a model that cannot be split or sharded according to `setup`, or whose log-probabilities
        would differ from those of transformers.
        """
        mesh, section, compute_dtype = setup.mesh, setup.parallel, options.compute_dtype
        assert mesh is not None and section.pp > 1
        self._ranks = mesh
        self._tied = is_tied(model) and mesh.stage in (0, section.pp - 1)
        unpacked = runs_unpacked(model, compute_dtype=compute_dtype, mesh=mesh)
        self._stages: list[TermStage] = []
        for place, stage in enumerate(cut_model(model, section=section, stage=mesh.stage)):
            index = mesh.stage + place * section.pp
            terms = TermModel(
                stage,
                options,
                mesh=mesh,
                sequence_parallel=section.sequence_parallel,
                unpacked=unpacked,
                first=index == 0,
                last=index == num_stages(section) - 1,
            )
            parallelize(terms, setup)
            self._stages.append(TermStage(terms))
        dtype = compute_dtype or next(model.parameters()).dtype
        self._pipeline = Pipeline(self._stages, section=section, mesh=mesh, hidden_dtype=dtype)
        super().__init__(model, model, options, chat=chat, setup=setup)

    @property
    def last_stage(self) -> TermModel | None:
        """The module with the output head; None on the ranks before the last stage."""
        return self._stages[-1].module if self._pipeline.is_last else None

    def term_states(self, microbatch: Microbatch) -> tuple[TokenShard, Tensor] | None:
        """Like `CausalLMPolicy.term_states`; None on the ranks before the last stage."""
        outputs = self._forward(microbatch, with_entropy=False)
        return None if outputs is None else (self._stages[-1].prepare(microbatch), outputs.tensors["hidden"])

    def _forward(self, microbatch: Microbatch, *, with_entropy: bool) -> PolicyOutputs | None:
        outputs = self._pipeline.forward(microbatch, with_entropy=with_entropy)
        for stage in self._stages:
            reshard(stage.module)  # no backward pass follows to reshard it
        return outputs

    def _outputs(self, microbatch: Microbatch, *, with_entropy: bool) -> PolicyOutputs:
        """Return log-probabilities [T] float32 without gradient; zeros on the ranks before the last stage."""
        outputs = self._forward(microbatch, with_entropy=with_entropy)
        if outputs is not None:
            return outputs
        nothing = torch.zeros(len(microbatch.inputs["labels"]), device=self._ranks.device)
        return PolicyOutputs(logprobs=nothing, entropy=nothing if with_entropy else None)

    def forward_backward(self, microbatches: Sequence[Microbatch], *, loss: MicrobatchLoss, with_entropy: bool) -> None:
        """Add the gradients of `loss` over each microbatch; those of a tied matrix are summed over both its stages."""
        with tied_gradients(self._tied_parameters(), mesh=self._ranks):
            self._pipeline.forward_backward(microbatches, loss=loss, with_entropy=with_entropy)

    def second_copies(self) -> Sequence[nn.Parameter]:
        """The embedding's matrix on the last stage, if it is the head; the first stage counts its gradient."""
        return self._tied_parameters() if self._pipeline.is_last else ()

    def _tied_parameters(self) -> Sequence[nn.Parameter]:
        if not self._tied:
            return ()
        return (self.module.get_input_embeddings().get_parameter("weight"),)
