"""Vision-language models on a pretend CUDA device: values of the CPU, and waits that do not grow with the tower."""

from importlib import metadata

import numpy as np
import pytest
import torch

from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.types import Share
from cosmos_rl_llm.data.collate import TrainSequence, pack_batch
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions
from doubles.pretend_cuda import pretend_cuda

pytest.importorskip("PIL")

from tiny_vision import NAMES, WORDS, family_of, make, picture, prompt

pytestmark = pytest.mark.cuda_dry

SPLIT = 0 if metadata.version("transformers").startswith("5.19.") else 1
"""From 5.20 on, transformers splits the features of these families by row, and reads the pictures of each row."""
WAITS = {"qwen3_vl": 3, "qwen3_vl_moe": 3, "qwen2_vl": 1, "qwen2_5_vl": 1, "idefics3": 4 + SPLIT, "smolvlm": 8 + SPLIT}
"""Of a forward and a backward pass, in transformers' code: a check of the number of placeholders, and masked rows."""


def microbatch(family, directory):
    random = np.random.default_rng(3)
    made = []
    for items in ([family.image(picture(32, 40, seed=0))], [], [family.image(picture(20, 33, seed=1))]):
        tokens, view = prompt(items, family, directory)
        response = random.integers(len(WORDS), 64, 5).astype(np.int32)
        made.append(
            TrainSequence(
                prompt_tokens=tokens,
                tokens=response,
                logprobs=np.zeros(5, np.float32),
                loss_mask=np.ones(5, bool),
                advantage=1.0,
                view=view,
            )
        )
    [found] = pack_batch(made, microbatch_terms=10_000, share=Share(), metrics={}).microbatches
    return found


def trained(policy, microbatch):
    """Log-probabilities and gradients of one microbatch."""
    outputs = policy.forward(microbatch, with_entropy=True)
    terms = to_device(microbatch.terms, outputs.logprobs.device)
    ((outputs.logprobs - terms.rollout_logprobs) * terms.loss_mask).sum().backward()
    return outputs.logprobs, [p.grad for p in policy.module.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", NAMES)
def test_a_microbatch_with_pictures(name, tmp_path, monkeypatch):
    monkeypatch.setattr("cosmos_rl_llm.policy.kernels.available", lambda device: {"flash"})  # flex needs a real GPU
    family = family_of(make(name), tmp_path)
    rows = microbatch(family, tmp_path)
    with pretend_cuda() as record:
        model = make(name).to("cuda")
        model.tie_weights()  # the pretend GPU's `to` makes two of a tied matrix
        policy = CausalLMPolicy(model, TermOptions(vision=family))
        record.clear()
        found, gradients = trained(policy, rows)
    wanted, right = trained(CausalLMPolicy(make(name), TermOptions(vision=family)), rows)
    torch.testing.assert_close(found.held, wanted, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(gradients, right, strict=True):
        torch.testing.assert_close(mine.held, theirs, rtol=1e-3, atol=1e-5)
    assert not record.mismatches, record
    assert not record.math_attention, record
    waits = record.synchronisations + record.uploads
    waits = {place: count for place, count in waits.items() if "_grouped_mm in torch.float32" not in place}
    assert sum(waits.values()) <= WAITS.get(name, 2), waits
