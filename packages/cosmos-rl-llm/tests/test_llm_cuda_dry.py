"""The torch engine keeps the promises of its interface on a pretend CUDA device, and mixes no devices there."""

import asyncio

import numpy as np
import pytest
import torch

from cosmos_rl_core.testing.conformance import ENGINE_CHECKS
from cosmos_rl_core.testing.pretend_cuda import pretend_cuda
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from cosmos_rl_llm.model.causal_lm import make_model

pytestmark = pytest.mark.cuda_dry

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


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_torch_engine(check):
    model = make_model(CONFIG, dtype=torch.float32, seed=0)

    def make_engine():
        return TorchEngine(
            model.to("cuda"),
            encode=lambda prompt: np.array(prompt.row["tokens"], np.int32),
            decode=lambda tokens: " ".join(map(str, tokens)),
            stop_ids=[1],
            max_sequences=8,
        )

    with pretend_cuda() as record:
        torch.cuda.set_device(0)
        prompt = Prompt(sample_id=0, row={"tokens": [3, 4, 5, 6]})
        asyncio.run(check(make_engine, prompt, Sampling(max_terms=12)))
    assert record.synchronisations, "the engine was not on the device"
    assert not record.mismatches, record
    assert not record.stray, record
