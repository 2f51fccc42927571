"""Policy replicas that each have a part of a batch: together they train on what one replica with all of it does."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from cosmos_rl_core.algorithms.advantages import BatchAdvantage, with_batch_advantages
from cosmos_rl_core.observe.rollouts import write_rollouts
from cosmos_rl_core.train.batch_part import BatchPart
from cosmos_rl_core.train.batcher import Batcher
from cosmos_rl_core.types import Episode, Exchange, Prompt, Rollout, RolloutGroup, TrainBatch

COUNT = 3


class Together:
    """The replicas of this process, each in a thread."""

    def __init__(self, count):
        self._found = [b""] * count
        self._barrier = threading.Barrier(count, timeout=30)
        self.num_bytes = 0

    def at(self, place):
        return Replica(self, place)

    def gather(self, place, data):
        self._found[place] = data
        self.num_bytes += len(data)
        self._barrier.wait()
        found = list(self._found)
        self._barrier.wait()
        return found


class Replica:
    def __init__(self, together, place):
        self.place, self._together = place, together

    def gather(self, data):
        return self._together.gather(self.place, data)


TURNS = (Exchange(text="one", problem="no call", model_s=0.5, metrics={"won": 1.0}), Exchange(text="two", branch=1))


def group(sample, *, rollouts=2, terms=5, arrays=16, masked=0.3):
    random = np.random.default_rng(sample)

    def one(number):
        episode = Episode(
            term_steps=np.arange(terms, dtype=np.int32),
            values=random.random(terms + 1).astype(np.float32),
            rewards=random.random(terms).astype(np.float32),
            advantages=random.random(terms).astype(np.float32),
            returns=random.random(terms).astype(np.float32),
        )
        return Rollout(
            arrays={"tokens": random.integers(0, 1000, arrays).astype(np.int32)},
            rollout_logprobs=random.random(terms).astype(np.float32),
            versions=random.integers(3, 6, terms).astype(np.int32),
            loss_mask=random.random(terms) >= masked,
            text=f"rollout {number} of sample {sample}",
            reward=float(random.random()),
            reward_breakdown={"one": float(random.random())},
            episode=episode if sample % 2 else None,
            exchanges=TURNS if sample % 3 else (),
        )

    prompt = Prompt(sample_id=sample, row={}, origin=f"rows:{sample}")
    return RolloutGroup(prompt=prompt, rollouts=tuple(map(one, range(rollouts))), prompt_text=f"prompt {sample}")


def collate(groups):
    """A batch whose microbatches are the trained terms: (sample, rollout's reward, advantage, step of an episode)."""
    rollouts = [(each.prompt.sample_id, rollout) for each in groups for rollout in each.rollouts]
    assert all("tokens" in rollout.arrays for _, rollout in rollouts), "an outline cannot be trained on"
    terms = [
        (sample, rollout.reward, rollout.advantage, int(term))
        for sample, rollout in rollouts
        for term in np.flatnonzero(rollout.loss_mask)
    ]
    return TrainBatch(
        microbatches=tuple(terms),
        num_terms=len(terms),
        num_rollouts=sum(bool(rollout.loss_mask.any()) for _, rollout in rollouts),
    )


def centred(groups):
    """An advantage that needs all groups."""
    mean = np.concatenate(groups).mean()
    return [rewards - mean for rewards in groups]


def batcher(collate_=collate, advantage: BatchAdvantage = centred, **settings):
    return Batcher(collate_, max_staleness=2, advantages=partial(with_batch_advantages, advantage), **settings)


def in_parts(groups, **settings):
    """Return the batch of each replica, and the bytes that they exchanged."""
    together = Together(COUNT)

    def work(place):
        part = BatchPart(groups[place::COUNT], together.at(place), collate=collate, with_text=False)
        return batcher(**settings)(part.groups, step=5, part=part)

    with ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(work, range(COUNT))), together.num_bytes


@pytest.mark.parametrize("settings", [{}, {"minibatches": 3, "epochs": 2}, {"minibatches": 20}])
def test_the_parts_are_the_whole_batch_with_its_counts_and_metrics(settings):
    groups = [group(sample) for sample in range(10, 21)]
    whole = batcher(**settings)(groups, step=5)
    parts, _ = in_parts(groups, **settings)
    for number, batch in enumerate(whole.batches):
        of_parts = [part.batches[number] for part in parts]
        assert sorted(term for each in of_parts for term in each.microbatches) == sorted(batch.microbatches)
        assert {(each.num_terms, each.num_rollouts) for each in of_parts} == {(batch.num_terms, batch.num_rollouts)}
    assert all((part.metrics, part.updates) == (whole.metrics, whole.updates) for part in parts)


def test_a_replica_without_a_group_in_a_minibatch_has_one_that_trains_nothing():
    groups = [group(2 * sample, rollouts=1, masked=0.0) for sample in range(COUNT)]
    parts, _ = in_parts(groups, minibatches=3)
    batches = [part.batches for part in parts]
    assert sorted(sum(bool(each.microbatches) for each in row) for row in zip(*batches)) == [1, 1, 1]


def test_the_arrays_stay_where_they_are():
    small, large = (in_parts([group(sample, arrays=arrays) for sample in range(9)])[1] for arrays in (8, 80_000))
    assert abs(large - small) < 100  # bytes, of random numbers compressed


@pytest.mark.parametrize("with_text", [True, False])
def test_the_first_replica_can_write_all_rollouts(tmp_path, with_text):
    groups = [group(sample) for sample in range(9)]
    together = Together(COUNT)
    with ThreadPoolExecutor(COUNT) as pool:
        parts = list(
            pool.map(
                lambda place: BatchPart(groups[place::COUNT], together.at(place), collate=collate, with_text=with_text),
                range(COUNT),
            )
        )
    written = write_rollouts(tmp_path / "parts", step=0, groups=parts[0].groups).read_text()
    whole = write_rollouts(tmp_path / "whole", step=0, groups=groups).read_text()
    assert (written == whole) == with_text
    assert parts[0].groups[1].rollouts[0].text == ("rollout 0 of sample 1" if with_text else "")
    assert parts[0].groups[1].rollouts[0].exchanges[0].text == ("one" if with_text else "")
