"""A trainable causal language model that assigns log-probabilities to response tokens.

    tokens [1, L] -> decoder, packed block-diagonal causal -> hidden[logit_index] [T] -> term_logprobs -> [T]

Prompt tokens never reach the output head, and the prompt of neighbouring rollouts goes through the decoder once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_rl_core.interfaces import MicrobatchLoss
from cosmos_rl_core.parallel.accumulate import accumulate
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_llm.linear import use_onednn
from cosmos_rl_llm.logprobs import term_logprobs
from cosmos_rl_llm.model import Head, named_weights
from cosmos_rl_llm.packing import PackedLayout, install_attention, share_prefixes

LOGITS_BYTES = 256 * 1024 * 1024


class CausalLMPolicy:
    """`interfaces.Policy` over any Hugging Face causal LM that uses transformers' AttentionInterface.

    `Microbatch.inputs`, all int64 tensors, rollouts laid end to end in one row:

    - `tokens` [L]: prompt and response of each rollout without its last token, from which nothing is predicted.
    - `positions` [L]: restart at 0 for each rollout.
    - `sequence_index` [L]: which rollout a token belongs to, non-decreasing.
    - `logit_index` [T]: place in the row whose hidden state predicts the term.
    - `labels` [T]: the term's token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        temperature: float = 1.0,
        compute_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        """Take over `model` (its attention is replaced).

        Args:
            tokenizer: saved beside the weights.
            temperature: log-probabilities are of softmax(logits / temperature); 0 (greedy) counts as 1.
            compute_dtype: run matrix products in this type (autocast) while the weights keep theirs.
            gradient_checkpointing: recompute each layer in the backward pass.
            logits_bytes: most memory for logits at a time; larger microbatches are cut into chunks of terms.
        """
        install_attention(model)
        use_onednn(model)
        if gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        _remove_dropout(model)
        model.train()
        self.module: PreTrainedModel = model
        self._tokenizer = tokenizer
        self._temperature = temperature or 1.0
        self._compute_dtype = compute_dtype
        self._logits_bytes = logits_bytes

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        """Return log-probabilities [T] float32, and where asked for entropies [T] of the whole vocabulary."""
        device = self.module.device
        inputs = {name: tensor.to(device) for name, tensor in microbatch.inputs.items()}
        hidden = self._hidden(inputs)
        logprobs, entropy = term_logprobs(
            hidden.to(self._compute_dtype or hidden.dtype),
            Head.of(self.module).cast(self._compute_dtype),
            inputs["labels"],
            temperature=self._temperature,
            with_entropy=with_entropy,
            logits_bytes=self._logits_bytes,
        )
        return PolicyOutputs(logprobs=logprobs, entropy=entropy)

    def forward_backward(self, microbatches: Sequence[Microbatch], *, loss: MicrobatchLoss, with_entropy: bool) -> None:
        accumulate(self, microbatches, loss=loss, with_entropy=with_entropy)

    def weights(self) -> dict[str, Tensor]:
        """Live tensors by checkpoint name, tied tensors once."""
        return named_weights(self.module)

    def save(self, directory: Path) -> None:
        """Write a Hugging Face directory: config, safetensors, and the tokenizer if there is one."""
        self.module.save_pretrained(directory)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(directory)

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """Hidden states that predict the terms [T, hidden]; a prefix shared with the sequence before is run once."""
        device = self.module.device
        lengths = torch.unique_consecutive(inputs["sequence_index"], return_counts=True)[1].tolist()
        rows = share_prefixes(inputs["tokens"].cpu().numpy(), lengths)
        layout = PackedLayout.of(lengths, rows=rows, device=device)
        kept = torch.from_numpy(np.unique(rows, return_index=True)[1]).to(device)
        with torch.autocast(device.type, dtype=self._compute_dtype, enabled=self._compute_dtype is not None):
            output = self.module.base_model(
                input_ids=inputs["tokens"][None, kept],
                position_ids=inputs["positions"][None, kept],
                use_cache=False,
                layout=layout,
            )
        return output.last_hidden_state[0, torch.from_numpy(rows).to(device)[inputs["logit_index"]]]


def _remove_dropout(model: nn.Module) -> None:
    """Switch dropout off for good: a term's log-probability is that of the model that generates."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
