"""A step's terms of the highest entropy, over all ranks and replicas; the entropy coefficient after a step."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.train.learner import FrozenModels, PolicyLearner, smallest_of_share
from cosmos_rl_core.types import Microbatch, PolicyOutputs, StepResult, TermBatch, TrainBatch, TrainStep


def alone(counts):
    return counts


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 5, 101, 4097])
def test_the_share_is_that_at_or_above_the_quantile(count, share):
    values = torch.rand(count, generator=torch.Generator().manual_seed(count)) * 3
    values[: count // 3] = 0.0
    values[count // 3 : count // 2] = values[-1]
    kept = values >= smallest_of_share(values, share, sum_counts=alone)
    assert kept.tolist() == (values >= torch.quantile(values, 1 - share)).tolist()


def test_by_hand():
    values = torch.tensor([0.5, 0.1, 0.4, 0.2, 0.3])
    assert smallest_of_share(values, 0.4, sum_counts=alone) == torch.tensor(0.4).item()  # 2 of 5


def test_ranks_agree_and_find_what_one_rank_finds():
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    parts = values.split([700, 0, 299, 1])
    barrier, counted = threading.Barrier(len(parts)), [torch.zeros(256)] * len(parts)
    found = [0.0] * len(parts)

    def rank(place):
        def sum_counts(counts):
            counted[place] = counts
            barrier.wait()
            total = torch.stack(list(counted)).sum(0)
            barrier.wait()
            return total

        found[place] = smallest_of_share(parts[place], 0.2, sum_counts=sum_counts)

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [smallest_of_share(values, 0.2, sum_counts=alone)] * len(parts)


class EntropyPolicy:
    """Its entropies are the microbatch's inputs."""

    def forward(self, microbatch, *, with_entropy=False):
        assert with_entropy
        entropy = microbatch.inputs["entropy"]
        return PolicyOutputs(logprobs=torch.zeros_like(entropy), entropy=entropy)


class RecordingTrainer:
    """Keeps the microbatches that it is given, and reports `metrics`."""

    mesh, version, policy = None, 0, EntropyPolicy()

    def __init__(self, objective, metrics=None, *, skipped=False):
        self.objective, self.given = objective, []
        self._result = StepResult(policy_version=1, metrics=metrics or {}, skipped=skipped)

    def begin(self, batch):
        pass

    def forward_backward(self, microbatches):
        self.given += microbatches

    def optim_step(self, *, last=True):
        return self._result


class TwoReplicas:
    """The other replica has counted `others`, a round each."""

    def __init__(self, others):
        self._others = iter(others)

    def gather(self, data):
        return [data, next(self._others)]


def microbatch(entropies, mask):
    entropy = torch.tensor(entropies)
    terms = TermBatch(
        rollout_logprobs=torch.zeros(len(entropy)),
        advantages=torch.ones(len(entropy)),
        loss_mask=torch.tensor(mask, dtype=torch.float32),
        rollout_index=torch.zeros(len(entropy), dtype=torch.int64),
        num_rollouts=1,
    )
    return Microbatch(inputs={"entropy": entropy}, terms=terms)


def batch(*microbatches):
    terms = sum(int(each.terms.loss_mask.sum()) for each in microbatches)
    return TrainBatch(microbatches=microbatches, num_terms=terms, num_rollouts=1)


def objective(**keys):
    return build_objective(AlgorithmConfig(name="grpo", **keys), max_terms=4)


def learner(trainer, compute):
    return PolicyLearner(
        trainer,
        publisher=None,
        frozen=FrozenModels(),
        compute=compute,
        timeline=Timeline("test"),
        max_skipped_steps=1,
    )


def test_the_quantile_is_over_all_minibatches_of_the_step_and_trained_terms_alone():
    trainer = RecordingTrainer(objective(top_entropy=0.5))
    first, second = batch(microbatch([0.1, 9.0, 0.2], [1, 0, 1])), batch(microbatch([0.3, 0.4], [1, 1]))
    with ThreadPoolExecutor(1) as compute:
        made = learner(trainer, compute)
        asyncio.run(made.forward_backward(TrainStep(batches=(first, second), updates=(0, 1))))
        asyncio.run(made.optim_step())
    marked = [(each.terms.high_entropy * each.terms.loss_mask).tolist() for each in trainer.given]
    assert marked == [[0, 0, 0], [1, 1]]  # of 0.1, 0.2, 0.3, 0.4


def test_the_quantile_is_over_all_policy_replicas():
    theirs, rounds = torch.tensor([0.5, 0.6]), []
    smallest_of_share(  # the rounds that the other replica counts
        torch.tensor([0.1, 0.7]), 0.5, sum_counts=lambda counts: rounds_of(counts, theirs, rounds)
    )
    trainer = RecordingTrainer(objective(top_entropy=0.5))
    with ThreadPoolExecutor(1) as compute:
        made = learner(trainer, compute)
        made.replicas = TwoReplicas(rounds)
        asyncio.run(made.forward_backward(TrainStep(batches=(batch(microbatch([0.1, 0.7], [1, 1])),))))
    assert [each.terms.high_entropy.tolist() for each in trainer.given] == [[0.0, 1.0]]  # 0.6 and 0.7 of all four


def rounds_of(counts, theirs, rounds):
    """The sum with the other replica's counts of this round, which share the bytes above those that are counted."""
    shift = (24, 16, 8, 0)[len(rounds)]
    bits, target = theirs.view(torch.int32), torch.tensor(0.6).view(torch.int32)
    inside = bits[(bits >> shift) >> 8 == (target >> shift) >> 8] if shift < 24 else bits
    other = torch.bincount((inside >> shift) & 255, minlength=256)
    rounds.append(other.numpy().tobytes())
    return counts + other


@pytest.mark.parametrize(("skipped", "expected"), [(False, (0.005, 1.0)), (True, (0.0, 0.0))])
def test_the_entropy_coefficient_moves_with_each_step_that_changes_the_weights(skipped, expected):
    trainer = RecordingTrainer(objective(entropy_target=0.4), {"entropy": 0.3}, skipped=skipped)
    with ThreadPoolExecutor(1) as compute:
        made = learner(trainer, compute)
        asyncio.run(made.forward_backward(TrainStep(batches=(batch(microbatch([0.3], [1])),))))
        asyncio.run(made.optim_step())
    assert trainer.objective.state == expected


def test_a_step_without_trained_terms_keeps_the_coefficient():
    trainer = RecordingTrainer(objective(entropy_target=0.4, top_entropy=0.5), {})
    with ThreadPoolExecutor(1) as compute:
        made = learner(trainer, compute)
        asyncio.run(made.forward_backward(TrainStep(batches=(batch(),))))
        asyncio.run(made.optim_step())
    assert (trainer.objective.state, trainer.given) == ((0.0, 0.0), [])
