"""The comparison of engine and policy at the start: its value, over ranks, and its consequences."""

import math

import numpy as np
import pytest
import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.train.comparison import EngineComparison
from cosmos_rl_core.types import Microbatch, PolicyOutputs, Prompt, Rollout, RolloutGroup, Share, TermBatch, TrainBatch
from cosmos_rl_core.weight_sync import SyncSection
from doubles.ranks import run_ranks

ENGINE = -0.5
"""Log-probability of each term under the engine."""


class Constant:
    """A policy that gives every term the same log-probability."""

    def __init__(self, logprob):
        self._logprob = logprob
        self.module = torch.nn.Module()

    def forward(self, microbatch):
        assert not torch.is_grad_enabled()
        return PolicyOutputs(logprobs=torch.full_like(microbatch.terms.rollout_logprobs, self._logprob))


def group_of(*lengths, version=3):
    rollouts = [
        Rollout(
            arrays={},
            rollout_logprobs=np.full(length, ENGINE, np.float32),
            versions=np.full(length, version, np.int32),
            loss_mask=np.ones(length, bool),
        )
        for length in lengths
    ]
    prompt = Prompt(sample_id=0, row={}, origin="a prompt of 99 tokens")
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def collate(groups, share):
    """Return a microbatch for each rollout of the share. One term of each is masked: it is not trained on."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    microbatches = [
        Microbatch(
            inputs={},
            terms=TermBatch(
                rollout_logprobs=torch.tensor([*rollout.rollout_logprobs, 100.0]),
                advantages=torch.zeros(rollout.num_terms + 1),
                loss_mask=torch.tensor([1.0] * rollout.num_terms + [0.0]),
                rollout_index=torch.zeros(rollout.num_terms + 1, dtype=torch.int64),
                num_rollouts=1,
            ),
        )
        for rollout in rollouts[share.index :: share.count]
    ]
    num_terms = sum(rollout.num_terms for rollout in rollouts)
    return TrainBatch(microbatches=tuple(microbatches), num_terms=num_terms, num_rollouts=len(rollouts))


def compare(logprob, groups, *, step=3, share=None, mesh=None):
    lines, warnings = [], []
    comparison = EngineComparison(
        Constant(logprob),
        collate=lambda groups: collate(groups, share or Share()),
        mesh=mesh,
        tolerance=0.1,
        sync=SyncSection(),
        log=lines.append,
        warn=warnings.append,
    )
    return comparison(groups, step=step), lines, warnings


CARRIED = [None, group_of(2, 4)]


def test_a_small_difference_is_a_line_of_the_log():
    metrics, lines, warnings = compare(ENGINE - 0.05, CARRIED)
    assert metrics == {"start_mismatch": pytest.approx(0.05)}
    assert lines == ["engine and policy differ by 0.05 nats a term, over 6 terms after a prompt of 99 tokens"]
    assert warnings == []


def test_a_difference_above_the_tolerance_is_a_warning():
    metrics, lines, (warning,) = compare(ENGINE + 0.2, CARRIED)
    assert metrics == {"start_mismatch": pytest.approx(0.2)}
    assert warning.startswith(f"{lines[0]}, and rounding explains 0.1: ")


@pytest.mark.parametrize("logprob", [ENGINE - 1.5, math.nan, -math.inf])
def test_a_gross_difference_ends_the_run(logprob):
    with pytest.raises(UserError, match="over 6 terms after a prompt of 99 tokens: what the engine samples is not"):
        compare(logprob, CARRIED)


@pytest.mark.parametrize("version", [2, 4])
def test_rollouts_of_other_weights_are_not_compared(version):
    assert compare(-9.0, [group_of(2, version=version)]) == ({}, [], [])


def test_without_rollouts_nothing_is_compared():
    assert compare(-9.0, [None]) == ({}, [], [])


def measure(rank, world_size):
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=world_size), device=torch.device("cpu"))
    metrics, _, _ = compare(ENGINE - 0.05 * (rank + 1), CARRIED, share=mesh.share, mesh=mesh)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def test_all_ranks_have_the_mean_over_the_terms_of_all():
    for metrics in run_ranks(measure, 2):  # 2 terms at the first rank, 4 at the second
        assert float(metrics["start_mismatch"]) == pytest.approx((2 * 0.05 + 4 * 0.1) / 6)
