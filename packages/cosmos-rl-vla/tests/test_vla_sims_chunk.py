"""A chunk by hand: rewards, what was executed, and how it ended."""

import math

import numpy as np
import pytest
from vla_fixtures import run_chunk

from cosmos_rl_vla.sims.base import SimulatorError, Stepped
from cosmos_rl_vla.sims.pool.worker import run_chunks


class Script:
    """A simulator that gives what is written down, and remembers the actions."""

    def __init__(self, *steps):
        self.steps = list(steps)
        self.actions = []

    def __call__(self, action):
        self.actions.append(action.tolist())
        return self.steps[len(self.actions) - 1]


def stepped(reward=0.0, *, terminated=False, truncated=False, success=False):
    return Stepped(reward=reward, terminated=terminated, truncated=truncated, success=success)


def actions(horizon):
    return np.arange(horizon, dtype=np.float32)[:, None]


def test_a_chunk_without_an_end_is_executed_whole():
    script = Script(stepped(1.0), stepped(2.0), stepped(0.5))
    result = run_chunk(script, actions(3))
    assert result.rewards == [1.0, 2.0, 0.5]
    assert result.valid.tolist() == [True, True, True]
    assert (result.steps, result.done, result.success) == (3, False, False)
    assert script.actions == [[0.0], [1.0], [2.0]]


def test_nothing_is_executed_after_the_end():
    script = Script(stepped(1.0), stepped(5.0, terminated=True, success=True))
    result = run_chunk(script, actions(4))
    assert len(script.actions) == 2
    assert result.rewards == [1.0, 5.0, 0.0, 0.0]
    assert result.valid.tolist() == [True, True, False, False]
    assert (result.terminated, result.truncated, result.success, result.done) == (True, False, True, True)


def test_truncation_is_not_termination():
    result = run_chunk(Script(stepped(), stepped(truncated=True)), actions(3))
    assert (result.terminated, result.truncated, result.done, result.steps) == (False, True, True, 2)


def test_an_episode_that_ends_by_itself_at_the_limit_is_terminated():
    result = run_chunk(Script(stepped(terminated=True, truncated=True)), actions(1))
    assert (result.terminated, result.truncated) == (True, False)


def test_success_counts_although_the_episode_goes_on():
    result = run_chunk(Script(stepped(success=True), stepped()), actions(2))
    assert result.success and not result.done


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_an_error(reward):
    with pytest.raises(SimulatorError, match="reward is"):
        run_chunk(Script(stepped(), stepped(reward)), actions(2))


def test_side_by_side_slots_give_what_each_gives_alone():
    scripts = {
        4: [stepped(1.0), stepped(2.0, terminated=True, success=True)],
        7: [stepped(3.0), stepped(4.0), stepped(5.0)],
        9: [stepped(6.0, truncated=True)],
    }
    taken = dict.fromkeys(scripts, 0)

    def step(slots, actions):
        assert len(actions) == len(slots)
        steps = []
        for slot in slots:
            steps.append(scripts[slot][taken[slot]])
            taken[slot] += 1
        return steps

    together = run_chunks(step, [4, 7, 9], np.zeros((3, 3, 1), np.float32))
    assert taken == {4: 2, 7: 3, 9: 1}
    for slot, result in zip(scripts, together):
        alone = run_chunk(Script(*scripts[slot]), actions(3))
        assert result.rewards == alone.rewards
        assert result.valid.tolist() == alone.valid.tolist()
        assert (result.terminated, result.truncated, result.success) == (
            alone.terminated,
            alone.truncated,
            alone.success,
        )


def test_a_slot_that_breaks_leaves_the_others_running():
    def step(slots, actions):
        return [SimulatorError("diverged") if slot == 1 else stepped(1.0) for slot in slots]

    good, bad = run_chunks(step, [0, 1], np.zeros((2, 3, 1), np.float32))
    assert good.steps == 3
    assert isinstance(bad, SimulatorError)
