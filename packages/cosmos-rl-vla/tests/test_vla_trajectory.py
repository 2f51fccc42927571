"""An episode on its way, and the microbatches it becomes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cosmos_rl_core.types import Prompt, RolloutGroup, Share
from cosmos_rl_vla.config import VLASampling
from cosmos_rl_vla.policy.collate import collate
from cosmos_rl_vla.sims.pool.messages import ChunkResult
from cosmos_rl_vla.trajectory import Decision, Trajectory, padded_result

H, D = 2, 3


def decision(number, *, tokens=(7, 8)):
    return Decision(
        images=np.full((1, 4, 4, 3), number, np.uint8),
        state=np.array([number, 0], np.float32),
        tokens=np.array(tokens, np.int64),
        logprobs=np.full((H, D), -float(number + 1), np.float32),
        values=np.array([10.0 + number], np.float32),
        replay={"index": np.array([number], np.int64)},
        version=number,
        actions=np.full((H, D), number, np.float32),
    )


def result(rewards, *, valid=(1, 1), terminated=False, truncated=False, success=False):
    return ChunkResult(
        rewards=[float(reward) for reward in rewards],
        steps=sum(valid),
        terminated=terminated,
        truncated=truncated,
        success=success,
    )


def episode(*, results=None, sampling=None, last_values=None):
    results = results or [result([1, 2]), result([4, 0], valid=(1, 0), terminated=True, success=True)]
    trajectory = Trajectory(decisions=[decision(i) for i in range(len(results))], results=results)
    last_image = np.full((4, 4, 3), 99, np.uint8)
    return trajectory.rollout(sampling or VLASampling(), last_image=last_image, last_values=last_values)


def test_an_episode_that_ends_by_itself_has_no_value_after_it():
    rollout = episode()
    assert rollout.episode.values.tolist() == [10.0, 11.0, 0.0]
    assert rollout.finish_reason == "stop" and rollout.text == "success in 3 steps"
    assert rollout.media["sim_rewards"].tolist() == [3.0, 4.0]
    assert rollout.versions.tolist() == [0] * 6 + [1] * 6
    assert rollout.loss_mask.tolist() == [True] * 9 + [False] * 3
    assert rollout.media["video"][:, 0, 0, 0].tolist() == [0, 1, 99]


def test_an_episode_keeps_the_actions_that_were_executed_and_their_rewards():
    media = episode().media
    assert media["actions"].tolist() == [[0.0] * D, [0.0] * D, [1.0] * D]
    assert media["step_rewards"].tolist() == [1.0, 2.0, 4.0]
    assert media["decided_at"].tolist() == [0, 2]


def test_one_that_was_cut_off_goes_on_with_the_critics_estimate():
    rollout = episode(results=[result([1, 1], truncated=True)], last_values=np.array([5.0], np.float32))
    assert rollout.episode.values.tolist() == [10.0, 5.0]
    assert rollout.finish_reason == "length"


def test_a_chunk_cut_short_at_the_limit_was_not_executed_beyond_it():
    short = padded_result(result([3.0], valid=(1,)), H)
    assert short.rewards == [3.0, 0.0] and short.valid.tolist() == [True, False]


def test_decisions_are_dealt_into_microbatches_with_their_terms():
    rollouts = [episode(), replace(episode(), advantage=2.0)]
    group = RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=tuple(rollouts))
    batch = collate([group], microbatch_terms=3 * H * D, share=Share())
    assert [len(m.inputs["valid"]) for m in batch.microbatches] == [3, 1]
    first, second = batch.microbatches
    assert first.inputs["images"][:, 0, 0, 0, 0].tolist() == [0, 1, 0]
    assert first.inputs["replay/index"].flatten().tolist() == [0, 1, 0]
    assert first.terms.rollout_index.tolist() == [0] * 12 + [1] * 6
    assert first.terms.advantages.tolist() == [0.0] * 12 + [2.0] * 6
    assert first.terms.values.tolist() == [10.0] * 6 + [11.0] * 6 + [10.0] * 6
    assert second.terms.loss_mask.tolist() == [1, 1, 1, 0, 0, 0]
    assert (batch.num_terms, batch.num_rollouts) == (18, 2)


def test_decisions_that_are_not_trained_have_no_forward_pass():
    rollout = episode()
    second_only = replace(rollout, loss_mask=rollout.loss_mask & (rollout.episode.term_steps == 1))
    group = RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=(second_only,))
    batch = collate([group], microbatch_terms=1000, share=Share())
    (microbatch,) = batch.microbatches
    assert microbatch.inputs["replay/index"].tolist() == [[1]]


def test_every_share_makes_as_many_passes_and_the_idle_one_trains_nothing():
    group = RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=(episode(),))
    shares = [collate([group], microbatch_terms=6, share=Share(index=i, count=3)) for i in range(3)]
    assert [len(share.microbatches) for share in shares] == [1, 1, 1]
    trained = [float(share.microbatches[0].terms.loss_mask.sum()) for share in shares]
    assert sorted(trained) == [0.0, 3.0, 6.0]
    assert all(share.num_terms == 9 for share in shares)


@pytest.mark.parametrize("terms", ["action", "chunk"])
def test_other_terms_have_their_own_lengths(terms):
    rollout = episode(sampling=VLASampling(terms=terms))
    group = RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=(rollout,))
    batch = collate([group], microbatch_terms=1000, share=Share())
    assert len(batch.microbatches[0].terms.rollout_logprobs) == {"action": 4, "chunk": 2}[terms]
    assert batch.num_terms == {"action": 3, "chunk": 2}[terms]
