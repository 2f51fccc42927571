"""A torch engine with a tiny random model and a prompt for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cosmos_rl_core.types import Prompt
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.chat import Chat, Encoded
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from cosmos_rl_llm.model.causal_lm import make_model

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
PROMPT = Prompt(sample_id=0, row={"tokens": [3, 4, 5, 6]})


def tokens_of(row: Mapping[str, Any]) -> Encoded:
    return Encoded(text="", tokens=np.array(row["tokens"], np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChat(Chat):
    """Prompts whose rows have tokens, and responses as numbers of tokens: "<3><1>"."""

    tokenizer: Any = None
    end_ids: frozenset[int] = frozenset()
    encoded: Callable[[Mapping[str, Any]], Encoded] = tokens_of
    """Encodes a row."""

    def encode_prompt(self, row: Mapping[str, Any], *, where: str = "") -> Encoded:
        return self.encoded(row)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return "".join(f"<{token}>" for token in tokens)

    def decode_prompt(self, tokens: Sequence[int] | np.ndarray) -> str:
        return self.decode(tokens)


def tiny_model():
    return make_model(CONFIG, dtype=torch.float32, seed=0)


def make_engine(model=None):
    return TorchEngine(model or tiny_model(), TokenChat(end_ids=frozenset({1})), LLMTorchOptions(max_sequences=8))
