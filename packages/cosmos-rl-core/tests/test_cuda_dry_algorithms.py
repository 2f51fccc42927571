"""Algorithms on a pretend CUDA device compute the values of the CPU; the thread of an engine sets its GPU."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.algorithms.table import TABLE
from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.rollout.engine_thread import EngineRequest, ThreadedEngine
from cosmos_rl_core.types import PolicyOutputs, TermBatch, TrainBatch
from doubles.pretend_cuda import pretend_cuda

pytestmark = pytest.mark.cuda_dry

TERMS, ROLLOUTS = 24, 4
VARIANTS = [(name, {}) for name in sorted(TABLE)]
VARIANTS += [("grpo", {"kl_coef": 0.1, "entropy_coef": 0.01}), ("dapo", {"old_logprobs": "policy"})]
VARIANTS += [("grpo", {"kl_coef": 0.1, "kl_unbiased": True, "sequence_mask_delta": 0.1})]


def loss_of(config, device):
    """The loss of random terms and its gradient by log-probability, on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def noise():
        return 0.1 * torch.randn(TERMS, generator=generator)

    rollout_logprobs = noise() - 1
    terms = to_device(
        TermBatch(
            rollout_logprobs=rollout_logprobs,
            advantages=noise(),
            loss_mask=(torch.arange(TERMS) % 5 > 0).float(),
            rollout_index=torch.arange(ROLLOUTS).repeat_interleave(TERMS // ROLLOUTS),
            num_rollouts=ROLLOUTS,
            ref_logprobs=rollout_logprobs + noise(),
            old_logprobs=rollout_logprobs + noise(),
            values=noise(),
            returns=noise(),
            preference=torch.tensor([1.0, -1.0, 1.0, -1.0]),
            ref_sums=(TERMS // ROLLOUTS) * (noise()[:ROLLOUTS] - 1),
            baseline=torch.tensor(0.1),
        ),
        device,
    )
    logprobs = (rollout_logprobs + noise()).to(device).requires_grad_()
    values, entropy = (noise().to(device).requires_grad_() for _ in range(2))
    objective = build_objective(config, max_terms=TERMS)
    losses, metrics = objective(PolicyOutputs(logprobs=logprobs, values=values, entropy=entropy), terms)
    counts = TrainBatch(microbatches=(), num_terms=TERMS, num_rollouts=ROLLOUTS)
    weights = objective.term_weights(terms)
    total = sum(part.coef * (weights * part.values).sum() for part in losses) / objective.normalizer(counts)
    total.backward()
    assert all(metric.device == logprobs.device for metric in metrics.values())
    return total.detach().cpu(), logprobs.grad.cpu()


@pytest.mark.parametrize(("name", "keys"), VARIANTS, ids=lambda value: str(value))
def test_an_objective_mixes_no_devices(name, keys):
    config = AlgorithmConfig(name=name, **keys)
    loss, grad = loss_of(config, torch.device("cpu"))
    with pretend_cuda() as record:
        torch.cuda.set_device(0)
        loss_there, grad_there = loss_of(config, torch.device("cuda", 0))
    assert torch.equal(loss, loss_there)
    assert torch.equal(grad, grad_there)
    assert not record.mismatches, record


@dataclass(eq=False, slots=True, kw_only=True)
class Doubled(EngineRequest):
    number: torch.Tensor


class Doubling(ThreadedEngine[Doubled]):
    def __init__(self):
        super().__init__("double")

    def weights(self):
        return {}

    async def generate(self, prompt, *, num_samples, sampling, seed):
        raise NotImplementedError

    def _is_busy(self):
        return False

    def _work(self):
        while self._waiting:
            request = self._waiting.popleft()
            request.number = (2 * request.number).cpu()
            request.finish()


def test_the_thread_of_an_engine_has_the_gpu_of_the_thread_that_builds_it():
    async def doubled():
        engine = Doubling()
        request = Doubled(number=torch.ones(3, device="cuda"))
        await engine._ask(request)
        await engine.close()
        return request.number

    with pretend_cuda() as record:
        assert asyncio.run(doubled()).tolist() == [2.0, 2.0, 2.0]
    assert record.synchronisations.total() == 1
    assert not record.stray, record
