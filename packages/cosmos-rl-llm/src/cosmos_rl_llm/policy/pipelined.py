"""A causal language model with its layers on several ranks: the policy of a recipe with pp above 1.

microbatch -> Row, the same in every stage
Row.tokens -> first stage -> hidden [1, l, H] -> ... -> last stage -> log-probabilities [T] -> loss
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cosmos_rl_core.interfaces import MicrobatchLoss
from cosmos_rl_core.parallel.axes.fsdp import reshard
from cosmos_rl_core.parallel.axes.tied import tied_gradients
from cosmos_rl_core.parallel.estimate import LOGITS_BYTES
from cosmos_rl_core.parallel.pipeline import Pipeline
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.parallel.stages import num_stages
from cosmos_rl_core.train.policy_base import PolicyBase
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.model.causal_lm import named_weights
from cosmos_rl_llm.policy.lora import write_config
from cosmos_rl_llm.policy.parallelize import parallelize
from cosmos_rl_llm.policy.probe import runs_unpacked
from cosmos_rl_llm.policy.routing import ExpertLoad
from cosmos_rl_llm.policy.stages import cut_model, is_tied
from cosmos_rl_llm.policy.token_model import Row, TermModel


@dataclass(frozen=True, slots=True)
class TermStage:
    """A `TermModel` as a stage of a core `Pipeline`."""

    module: TermModel

    def prepare(self, microbatch: Microbatch) -> Row:
        return self.module.row({name: tensor.to(self.module.device) for name, tensor in microbatch.inputs.items()})

    def hidden_shape(self, inputs: Row) -> tuple[int, ...]:
        axis = self.module.axis
        length = inputs.tokens.shape[1]
        if axis is not None and axis.sequence:
            length //= axis.size
        return (1, length, self.module.config.get_text_config().hidden_size)

    def __call__(self, hidden: Tensor | None, inputs: Row, *, with_entropy: bool) -> Tensor | PolicyOutputs:
        passed = self.module(hidden, inputs, with_entropy)
        return PolicyOutputs(logprobs=passed[0], entropy=passed[1]) if self.module.last else passed


class PipelinedPolicy(PolicyBase[PreTrainedModel]):
    """`interfaces.Policy` like `TextPolicy`, over this rank's stages of the model.

    `module` contains this rank's parts, under the names of the whole model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        setup: ModelSetup,
        chat: Chat | None = None,
        temperature: float = 1.0,
        compute_dtype: torch.dtype | None = None,
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        """Take over the whole `model`, keep the parts of this rank's stages, and shard them over the ranks of `setup`.

        Args:
            setup: with a mesh whose axis pp is above 1.
            chat: the encoder of rows in supervised training.
            temperature: log-probabilities are of softmax(logits / temperature); 0 (greedy) counts as 1.
            compute_dtype: dtype of matrix products; the weights keep theirs.
            logits_bytes: maximum memory for logits at a time; larger microbatches are split into chunks of terms.

        Raises UserError for a model that cannot be split or sharded according to `setup`, or whose log-probabilities
        would differ from those of transformers.
        """
        mesh, section = setup.mesh, setup.parallel
        assert mesh is not None and section.pp > 1
        self._tied = is_tied(model) and mesh.stage in (0, section.pp - 1)
        unpacked = runs_unpacked(model, compute_dtype=compute_dtype, mesh=mesh)
        self._stages: list[TermStage] = []
        for place, stage in enumerate(cut_model(model, section=section, stage=mesh.stage)):
            index = mesh.stage + place * section.pp
            terms = TermModel(
                stage,
                temperature=temperature,
                compute_dtype=compute_dtype,
                logits_bytes=logits_bytes,
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
        super().__init__(model)
        self._mesh = mesh
        self._load = ExpertLoad(model)
        self.chat = chat

    def _outputs(self, microbatch: Microbatch, *, with_entropy: bool) -> PolicyOutputs:
        """Return log-probabilities [T] float32 without gradient; zeros on the ranks before the last stage."""
        outputs = self._pipeline.forward(microbatch, with_entropy=with_entropy)
        for stage in self._stages:
            reshard(stage.module)  # no backward pass follows to reshard it
        if outputs is not None:
            return outputs
        nothing = torch.zeros(len(microbatch.inputs["labels"]), device=self._mesh.device)
        return PolicyOutputs(logprobs=nothing, entropy=nothing if with_entropy else None)

    def forward_backward(self, microbatches: Sequence[Microbatch], *, loss: MicrobatchLoss, with_entropy: bool) -> None:
        """Add the gradients of `loss` over each microbatch; those of a tied matrix are summed over both its stages."""
        with tied_gradients(self._tied_parameters(), mesh=self._mesh):
            self._pipeline.forward_backward(microbatches, loss=loss, with_entropy=with_entropy)

    def second_copies(self) -> Sequence[nn.Parameter]:
        """The embedding's matrix on the last stage, if it is the head; the first stage counts its gradient."""
        return self._tied_parameters() if self._pipeline.is_last else ()

    def metrics(self) -> Mapping[str, float]:
        """Load of the experts since the last call, over the layers of all stages; empty without experts."""
        return self._load.take(self._mesh)

    def weights(self) -> dict[str, Tensor]:
        """This rank's live tensors by checkpoint name; a tied matrix is the embedding's on both its stages."""
        return named_weights(self.module)

    def save_config(self, directory: Path) -> None:
        """Write the configuration of the whole model, and the tokenizer if there is one."""
        write_config(self.module, directory, tokenizer=None if self.chat is None else self.chat.tokenizer)

    def _tied_parameters(self) -> Sequence[nn.Parameter]:
        if not self._tied:
            return ()
        return (self.module.get_input_embeddings().get_parameter("weight"),)
