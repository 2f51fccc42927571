"""A policy with the encoding of rows as its tokens."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.policy.policy import CausalLMPolicy


class TextPolicy(CausalLMPolicy):
    """A `CausalLMPolicy` with the `chat` that encodes rows in supervised training."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chat: Chat,
        temperature: float = 1.0,
        compute_dtype: torch.dtype | None = None,
        setup: ModelSetup | None = None,
    ) -> None:
        super().__init__(
            model,
            tokenizer=chat.tokenizer,
            temperature=temperature,
            compute_dtype=compute_dtype,
            setup=setup,
        )
        self.chat = chat
