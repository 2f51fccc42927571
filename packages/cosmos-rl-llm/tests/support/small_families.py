"""Small models of families of transformers, and their log-probabilities one sequence at a time."""

import numpy as np
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cosmos_rl_core.types import Share
from cosmos_rl_llm.data.collate import TrainSequence, pack_batch
from cosmos_rl_llm.model.miniature import miniature
from cosmos_rl_llm.policy.probe import plain_logprobs


def small(kind, **values):
    values = {"num_key_value_heads": 8, **values} if kind == "nemotron" else values
    config = type(AutoConfig.for_model(kind))(**values)
    return miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def sample(prompt, tokens):
    zeros = np.zeros(len(tokens), np.float32)
    return TrainSequence(prompt_tokens=prompt, tokens=tokens, logprobs=zeros, loss_mask=zeros == 0, advantage=1.0)


def packed(given):
    (microbatch,) = pack_batch(given, microbatch_terms=10**6, share=Share(), metrics={}).microbatches
    return microbatch


def one_at_a_time(model, given):
    model.eval()
    return torch.cat([plain_logprobs(model, each.prompt_tokens, each.tokens) for each in given])


def gradients(model, logprobs):
    logprobs.mul(torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
