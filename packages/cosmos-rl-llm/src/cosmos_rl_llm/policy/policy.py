"""A trainable causal language model that assigns log-probabilities to response tokens.

    tokens [1, L] -> decoder, packed block-diagonal causal -> hidden[logit_index] [T] -> term_logprobs -> [T]

Prompt tokens never reach the output head, and the prompt of neighbouring rollouts goes through the decoder once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_rl_core.interfaces import Reference
from cosmos_rl_core.parallel.axes.fsdp import reshard
from cosmos_rl_core.parallel.device import memory_of
from cosmos_rl_core.parallel.lora import whole_weights
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.estimate import logits_budget
from cosmos_rl_core.train.policy_base import PolicyBase
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.media.item import VisionFamily
from cosmos_rl_llm.model.causal_lm import named_weights, trained_weights
from cosmos_rl_llm.policy.lora import write_config
from cosmos_rl_llm.policy.parallelize import parallelize
from cosmos_rl_llm.policy.probe import runs_unpacked
from cosmos_rl_llm.policy.routing import ExpertLoad
from cosmos_rl_llm.policy.token_model import TermModel, TokenShard, outputs_of
from cosmos_rl_llm.policy.truncation import Truncation


class CausalLMPolicy(PolicyBase[TermModel]):
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
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        temperature: float = 1.0,
        truncation: Truncation | None = None,
        compute_dtype: torch.dtype | None = None,
        setup: ModelSetup | None = None,
        logits_bytes: int | None = None,
        vision: VisionFamily | None = None,
    ) -> None:
        """Take over `model` (its attention is replaced), and shard it over the ranks of `setup`.

        Args:
            tokenizer: saved with the weights.
            temperature: log-probabilities are of softmax(logits / temperature); 0 (greedy) counts as 1.
            truncation: top-k, top-p and repetition penalty of the rollouts: log-probabilities are of what is sampled.
            compute_dtype: dtype of matrix products; the weights keep theirs.
            setup: the mesh and the memory options; None: one process without memory options.
            logits_bytes: maximum memory for logits at a time; larger microbatches are split into chunks of terms. None:
                by the memory of the device.
            vision: family of a vision-language model; None: rows have text alone.
        """
        setup = setup or ModelSetup()
        module = TermModel(
            model,
            temperature=temperature,
            truncation=truncation,
            compute_dtype=compute_dtype,
            logits_bytes=logits_bytes or logits_budget(memory_of(setup.device)),
            mesh=setup.mesh,
            sequence_parallel=setup.parallel.sequence_parallel,
            unpacked=runs_unpacked(model, compute_dtype=compute_dtype, mesh=setup.mesh),
            vision=vision,
        )
        parallelize(module, setup)
        super().__init__(module, reduce_once=setup.parallel.reduce_once)
        self._load = ExpertLoad(model)
        self._tokenizer = tokenizer

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

    def metrics(self) -> Mapping[str, float]:
        """Load of the experts since the last call; empty without experts."""
        return self._load.take(self.module.mesh)

    def weights(self) -> dict[str, Tensor]:
        """Live tensors by checkpoint name, tied tensors once."""
        return named_weights(self.module.causal_lm)

    def rollout_weights(self) -> dict[str, Tensor]:
        """`weights` without frozen parts."""
        return trained_weights(self.module.causal_lm)

    def reference(self) -> Reference | None:
        """The policy without its adapters; None where weights are trained in full too, or without adapters."""
        return None if whole_weights(self.module.causal_lm) else super().reference()

    def save_config(self, directory: Path) -> None:
        """Write the configuration, the tokenizer if there is one, and the processing of pictures."""
        write_config(self.module.causal_lm, directory, tokenizer=self._tokenizer, vision=self.module.vision)


class TextPolicy(CausalLMPolicy):
    """A `CausalLMPolicy` with the `chat` that encodes rows in supervised training."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chat: Chat,
        temperature: float = 1.0,
        truncation: Truncation | None = None,
        compute_dtype: torch.dtype | None = None,
        setup: ModelSetup | None = None,
    ) -> None:
        super().__init__(
            model,
            tokenizer=chat.tokenizer,
            temperature=temperature,
            truncation=truncation,
            compute_dtype=compute_dtype,
            setup=setup,
            vision=None if chat.vision is None else chat.vision.family,
        )
        self.chat = chat
