"""A trainable causal language model that assigns log-probabilities to response tokens.

    tokens [1, L] -> decoder, packed block-diagonal causal -> hidden[logit_index] [T] -> term_logprobs -> [T]

Prompt tokens never reach the output head, and the prompt of neighbouring rollouts goes through the decoder once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from cosmos_rl_core.checkpoint.weights_name import MERGED
from cosmos_rl_core.interfaces import Reference
from cosmos_rl_core.parallel.axes.fsdp import reshard
from cosmos_rl_core.parallel.lora import (
    MergedWeights,
    ScaledAdapters,
    adapter_weights,
    whole_weights,
    write_adapter_config,
)
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.train.policy_base import PolicyBase
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.model.causal_lm import named_weights, trained_weights
from cosmos_rl_llm.policy.context import TokenShard
from cosmos_rl_llm.policy.parallelize import parallelize
from cosmos_rl_llm.policy.probe import runs_unpacked
from cosmos_rl_llm.policy.routing import ExpertLoad
from cosmos_rl_llm.policy.token_model import PLAIN, TermModel, TermOptions, outputs_of

M = TypeVar("M", bound=nn.Module)


class LanguagePolicy(PolicyBase[M]):
    """The weights, metrics and files of a policy, whether it is one `TermModel` or the stages of a pipeline."""

    def __init__(
        self, module: M, model: PreTrainedModel, options: TermOptions, *, chat: Chat | None, setup: ModelSetup
    ) -> None:
        """module: spread over its ranks already. model: what it has of the transformers model."""
        super().__init__(module, reduce_once=setup.parallel.reduce_once)
        self._model, self._mesh, self._vision = model, setup.mesh, options.vision
        self._load = ExpertLoad(model)
        kind = {"scaled": ScaledAdapters, "merged": MergedWeights}.get(setup.sent_adapters)
        self._adapters = kind(model) if kind is not None and adapter_weights(model) else None
        self.chat = chat
        """Encodes rows in supervised training; its tokenizer is saved with the weights."""

    def metrics(self) -> Mapping[str, float]:
        """Load of the experts since the last call, over the layers of all stages; empty without experts."""
        return self._load.take(self._mesh)

    def weights(self) -> dict[str, Tensor]:
        """This rank's live tensors by checkpoint name, tied tensors once."""
        return named_weights(self._model)

    def rollout_weights(self) -> dict[str, Tensor]:
        """`weights` without frozen parts; adapters in the form that engines take."""
        return trained_weights(self._model) if self._adapters is None else self._adapters.weights()

    def before_publish(self) -> None:
        """Scale or merge the adapters again for engines that take them so."""
        if self._adapters is not None:
            self._adapters.merge()

    def save_config(self, directory: Path) -> None:
        """Write the files that load a model except weights: configuration, that of adapters, tokenizer, processing.

        adapter_config.json makes transformers load the base model, unless there is a config.json beside it; that of the
        merged model is therefore in merged/. The generation's is written as it is, also where transformers warns of it.
        """
        model = self._model
        if adapter_weights(model):
            write_adapter_config(model, directory)
            model.config.save_pretrained(directory / MERGED)
        else:
            model.config.save_pretrained(directory)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.to_json_file(directory / "generation_config.json")
        if self.chat is not None:
            self.chat.tokenizer.save_pretrained(directory)
        for name, text in ({} if self._vision is None else self._vision.files).items():
            (directory / name).write_text(text, encoding="utf-8")


class CausalLMPolicy(LanguagePolicy[TermModel]):
    """`interfaces.Policy` over any Hugging Face causal LM that uses transformers' AttentionInterface.

    `Microbatch.inputs`, all int64 tensors, rollouts concatenated in one row:

    - `tokens` [L]: prompt and response of each rollout without its last token, from which nothing is predicted.
    - `positions` [L]: restart at 0 for each rollout.
    - `sequence_index` [L]: index of the token's rollout, non-decreasing.
    - `logit_index` [T]: index in the row of the hidden state that predicts the term.
    - `labels` [T]: the term's token.
    - `routes` [L, layers, k], optional: experts of each token in all layers; zeros for layers without experts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: TermOptions = PLAIN,
        *,
        chat: Chat | None = None,
        setup: ModelSetup | None = None,
    ) -> None:
        """Take over `model` (its attention is replaced), and shard it over the ranks of `setup`.

        setup: the mesh and the memory options; None: one process without memory options.
        """
        setup = setup or ModelSetup()
        module = TermModel(
            model,
            options,
            mesh=setup.mesh,
            sequence_parallel=setup.parallel.sequence_parallel,
            unpacked=runs_unpacked(model, compute_dtype=options.compute_dtype, mesh=setup.mesh),
        )
        parallelize(module, setup)
        super().__init__(module, model, options, chat=chat, setup=setup)

    def _outputs(self, microbatch: Microbatch, *, with_entropy: bool) -> PolicyOutputs:
        """Log-probabilities [T] float32, and with `with_entropy` entropies [T] over the whole vocabulary."""
        row = self.module.row(microbatch.inputs, teacher=microbatch.terms.teacher)
        return outputs_of(self.module(None, row, with_entropy))

    @property
    def last_stage(self) -> TermModel:
        """The module with the output head."""
        return self.module

    def term_states(self, microbatch: Microbatch) -> tuple[TokenShard, Tensor]:
        """Return this rank's part of the row, and the hidden states of its terms [t, H]; for `returns_hidden`."""
        row = self.module.row(microbatch.inputs)
        hidden = self.module(None, row)
        reshard(self.module)
        return row, hidden

    def reference(self) -> Reference | None:
        """The policy without its adapters; None where weights are trained in full too, or without adapters."""
        return None if whole_weights(self._model) else super().reference()
