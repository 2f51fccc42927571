"""A torch engine with a tiny random model and a prompt for it."""

import numpy as np
import torch

from cosmos_rl_core.types import Prompt
from cosmos_rl_llm.data.chat import Encoded
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


def tiny_model():
    return make_model(CONFIG, dtype=torch.float32, seed=0)


def make_engine(model=None):
    return TorchEngine(
        model or tiny_model(),
        encode=lambda prompt: Encoded(text="", tokens=np.array(prompt.row["tokens"], np.int32)),
        decode=lambda tokens: " ".join(map(str, tokens)),
        stop_ids=[1],
        max_sequences=8,
    )
