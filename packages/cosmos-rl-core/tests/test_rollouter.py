"""One prompt becomes one scored group with advantages."""

import asyncio
import itertools
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from cosmos_rl_core.algorithms.advantages import group_mean
from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.rules import GroupRules, group_rules, has_signal, most_varied
from cosmos_rl_core.errors import PromptError, SampleError
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.rollout.rollouter import Requests, Rollouter, request_seed
from cosmos_rl_core.types import Prompt, Rollout, Sampling

PROMPT = Prompt(sample_id=5, row={"question": "?"}, origin="train.jsonl:3")
SAMPLING = Sampling(max_terms=8)
EVAL_SAMPLING = Sampling(max_terms=4, temperature=0.0)


@dataclass
class ScriptedEngine:
    """Answers with the lengths it was given; a rollout of the longest length counts as cut off."""

    lengths: tuple[int, ...] = (1, 2, 3)
    version: int = 4
    progress: int = 0
    asked: list[tuple] = field(default_factory=list)

    def weights(self):
        return {}

    async def generate(self, prompt, *, num_samples, sampling, seed):
        if not self.lengths:
            raise PromptError(f"{prompt.origin} is too long")
        self.asked.append((prompt.sample_id, num_samples, sampling, seed))
        return f"<{prompt.row['question']}>", [self._rollout(n) for n in self.lengths[:num_samples]]

    def _rollout(self, length):
        return Rollout(
            arrays={},
            rollout_logprobs=np.full(length, -0.5, np.float32),
            versions=np.full(length, self.version, np.int32),
            loss_mask=np.ones(length, np.bool_),
            finish_reason="length" if length >= 8 else "stop",
        )

    async def switch(self, version, apply):
        raise AssertionError("a rollouter never switches weights")

    async def close(self):
        pass


def length(group):
    return [r.num_terms for r in group.rollouts]


def rollouter(
    engine,
    *,
    function=length,
    group_size=3,
    seed=0,
    tokens=None,
    recorder=None,
    long=None,
    log=print,
    started=None,
    **rules,
):
    return Rollouter(
        engine,
        rubric=Rubric([WeightedReward(name="length", weight=2.0, function=function)]),
        rules=GroupRules(**{"advantage": group_mean, "tokens": tokens, **rules}),
        requests=Requests(
            group_size=group_size,
            num_started=started,
            sampling=SAMPLING,
            eval_sampling=EVAL_SAMPLING,
            seed=seed,
            long=long,
        ),
        recorders=(recorder, None),
        log=log,
    )


def run(engine, **keys):
    return asyncio.run(rollouter(engine, **keys).run(PROMPT))


def test_a_group_is_scored_and_given_advantages():
    group = run(ScriptedEngine())
    assert (group.prompt, group.prompt_text) == (PROMPT, "<?>")
    assert [r.reward for r in group.rollouts] == [2.0, 4.0, 6.0]
    assert [r.reward_breakdown for r in group.rollouts] == [{"length": 1.0}, {"length": 2.0}, {"length": 3.0}]
    assert [r.advantage for r in group.rollouts] == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("wants", [False, True])
def test_a_thread_saves_a_group_that_the_recorder_wants(wants):
    saved = []

    class Recorder:
        of_rollouts = False

        def wants(self, step, group):
            assert threading.current_thread() is threading.main_thread()
            return wants

        def save(self, step, group):
            saved.append((step, group.prompt.sample_id, threading.current_thread() is threading.main_thread()))

    group = run(ScriptedEngine(), recorder=Recorder())
    assert saved == ([(group.max_policy_version, group.prompt.sample_id, False)] if wants else [])


LONG = Prompt(sample_id=0, row={"question": "!" * 99}, origin="a prompt of 99 tokens"), Sampling(max_terms=2)


def test_the_rollouts_of_the_long_prompt_are_those_of_the_first_weights():
    engine = ScriptedEngine()

    async def work():
        worker = rollouter(engine, long=LONG)
        first = await asyncio.gather(worker.rollouts_to_compare(), worker.rollouts_to_compare())
        engine.version += 1
        return first, await worker.rollouts_to_compare()

    (first, second), later = asyncio.run(work())
    assert first is second and first.prompt is LONG[0] and first.num_terms == 6
    assert later is None
    assert [sampling for _, _, sampling, _ in engine.asked].count(LONG[1]) == 1


def test_a_cancelled_group_leaves_the_long_prompt_to_the_next():
    class Waiting(ScriptedEngine):
        async def generate(self, prompt, **keys):
            if prompt is LONG[0] and not self.asked_long.is_set():
                self.asked_long.set()
                await asyncio.Event().wait()
            return await super().generate(prompt, **keys)

    async def work():
        engine = Waiting()
        engine.asked_long = asyncio.Event()
        worker = rollouter(engine, long=LONG)
        cancelled = asyncio.create_task(worker.rollouts_to_compare())
        await engine.asked_long.wait()
        cancelled.cancel()
        return await worker.rollouts_to_compare()

    assert asyncio.run(work()).prompt == LONG[0]


def test_an_engine_that_cannot_answer_the_long_prompt_has_a_line_in_the_log():
    lines = []
    worker = rollouter(ScriptedEngine(), long=(Prompt(sample_id=0, row={}), SAMPLING), log=lines.append)
    assert asyncio.run(worker.rollouts_to_compare()) is None
    assert lines == ["engine and policy are not compared at the start: KeyError: 'question'"]


def test_the_engine_is_asked_for_a_whole_group_under_the_training_sampling():
    engine = ScriptedEngine()
    run(engine)
    assert engine.asked == [(5, 3, SAMPLING, request_seed(0, stream=0, sample_id=5))]


def test_a_group_without_signal_is_set_aside_for_good():
    with pytest.raises(SampleError) as caught:
        run(ScriptedEngine((2, 2, 2)), keep=has_signal)
    assert caught.value.reason.startswith("filtered:")
    assert caught.value.final


def test_without_the_filter_it_is_kept_with_advantages_of_zero():
    assert [r.advantage for r in run(ScriptedEngine((2, 2, 2))).rollouts] == [0.0, 0.0, 0.0]


def test_shaping_comes_before_the_advantage_and_sees_lengths_and_truncation():
    seen = []

    def shape(rewards, lengths, truncated):
        seen.append((rewards.tolist(), lengths.tolist(), truncated.tolist()))
        return rewards - 10.0 * truncated

    group = run(ScriptedEngine((1, 8)), group_size=2, shape_reward=shape)
    assert seen == [([2.0, 16.0], [1, 8], [False, True])]
    assert [r.reward for r in group.rollouts] == [2.0, 6.0]
    assert [r.advantage for r in group.rollouts] == [-2.0, 2.0]
    assert [r.reward_breakdown["length"] for r in group.rollouts] == [1.0, 8.0]


def test_the_filter_sees_rewards_before_shaping():
    def shape(rewards, lengths, truncated):
        return rewards + lengths

    def same(group):
        return [1.0] * len(group.rollouts)

    with pytest.raises(SampleError, match="filtered:"):
        run(ScriptedEngine((1, 2, 3)), function=same, keep=has_signal, shape_reward=shape)


def test_a_shared_prefix_is_masked_by_the_rewards_after_shaping():
    def same(group):
        return [1.0] * len(group.rollouts)

    def shorter(rewards, lengths, truncated):
        return rewards - lengths

    def counted(rollout):
        return np.arange(rollout.num_terms)

    keys = {"function": same, "group_size": 2, "tokens": counted, "mask_prefix_terms": 1}
    group = run(ScriptedEngine((2, 3)), shape_reward=shorter, **keys)
    assert [r.loss_mask.tolist() for r in group.rollouts] == [[True, True], [False, False, True]]
    assert [r.advantage for r in group.rollouts] == [0.5, -0.5]
    assert all(r.loss_mask.all() for r in run(ScriptedEngine((2, 3)), **keys).rollouts)  # equal rewards


def test_rollouts_that_are_not_selected_train_nothing():
    group = run(ScriptedEngine(), advantage=lambda rewards: (rewards == rewards.max()).astype(float), selects=True)
    assert [r.loss_mask.any() for r in group.rollouts] == [False, False, True]
    assert [r.reward for r in group.rollouts] == [2.0, 4.0, 6.0]


def test_evaluation_draws_one_rollout_under_its_own_sampling_and_seed():
    engine = ScriptedEngine((3, 3, 3))
    group = asyncio.run(rollouter(engine, keep=has_signal).evaluate(PROMPT))
    assert engine.asked == [(5, 1, EVAL_SAMPLING, request_seed(0, stream=1, sample_id=5))]
    assert [(r.reward, r.advantage) for r in group.rollouts] == [(6.0, 0.0)]


def test_a_prompt_the_engine_refuses_is_an_error_of_the_sample():
    with pytest.raises(PromptError, match=r"train.jsonl:3 is too long"):
        run(ScriptedEngine(()))


def test_a_seed_depends_on_run_stream_and_sample_and_on_nothing_else():
    seeds = {
        (run_seed, stream, sample): request_seed(run_seed, stream=stream, sample_id=sample)
        for run_seed in (0, 1)
        for stream in (0, 1)
        for sample in (0, 1, 2, 10**9)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    engines = ScriptedEngine(version=0), ScriptedEngine(version=7)
    for engine in engines:
        run(engine, seed=1)
    assert engines[0].asked == engines[1].asked
    assert engines[0].asked[0][-1] == request_seed(1, stream=0, sample_id=5)


def test_advantages_that_wait_for_the_other_groups_of_the_step_are_not_shown_as_numbers():
    group = run(ScriptedEngine(), waits_for_step=True)
    assert [r.reward for r in group.rollouts] == [2.0, 4.0, 6.0]
    assert np.isnan([r.advantage for r in group.rollouts]).all()


@pytest.mark.parametrize(
    ("keys", "waits"),
    [({"name": "grpo"}, False), ({"name": "grpo", "advantage": "global_std"}, True), ({"advantage": "gae"}, True)],
)
def test_which_advantages_wait(keys, waits):
    assert group_rules(AlgorithmConfig.model_validate(keys), max_terms=8).waits_for_step is waits


def test_rollouts_that_were_cut_off_are_compared_and_not_trained_on():
    group = run(ScriptedEngine(lengths=(1, 8, 3)), mask_truncated=True)
    assert [r.loss_mask.any() for r in group.rollouts] == [True, False, True]
    assert [r.advantage for r in group.rollouts] == [-6.0, 8.0, -2.0]  # around 8, the mean of 2, 16 and 6


def test_the_rollouts_with_the_most_varied_rewards_are_compared_alone():
    group = run(ScriptedEngine(lengths=(3, 1, 4, 6, 7)), group_size=5, num_trained=3)  # rewards 6, 2, 8, 12, 14
    assert [r.loss_mask.any() for r in group.rollouts] == [False, True, False, True, True]
    assert [r.reward for r in group.rollouts] == [6.0, 2.0, 8.0, 12.0, 14.0]
    np.testing.assert_allclose([r.advantage for r in group.rollouts], [0, 2 - 28 / 3, 0, 12 - 28 / 3, 14 - 28 / 3])


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_has_the_largest_variance_of_all(seed):
    rewards = np.random.default_rng(seed).integers(0, 4, 8).astype(float)
    for count in (2, 3, 5):
        best = max(np.var(rewards[list(chosen)]) for chosen in itertools.combinations(range(8), count))
        assert np.var(rewards[most_varied(rewards, count)]) == pytest.approx(best)


def test_the_keys_of_left_out_rollouts_reach_the_rules():
    config = AlgorithmConfig(name="grpo", mask_truncated=True, max_variance_rollouts=2)
    rules = group_rules(config, max_terms=8)
    assert (rules.mask_truncated, rules.num_trained) == (True, 2)


class Race(ScriptedEngine):
    """Each request ends when it is let go, in the order of `order`; 8 terms never end."""

    def __init__(self, order, *, fails=None):
        super().__init__()
        self.order, self.fails, self.cancelled = order, fails, []

    async def generate(self, prompt, *, num_samples, sampling, seed):
        assert num_samples == 1
        number = len(self.asked)
        self.asked.append((prompt.sample_id, num_samples, sampling, seed))
        try:
            for _ in range(self.order[number]):
                await asyncio.sleep(0)  # a turn of the loop
            if number == self.fails:
                raise PromptError("no picture")
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        return "<?>", [self._rollout(1 + number)]


def test_the_first_rollouts_that_end_are_the_group_and_the_others_are_cancelled():
    engine = Race([900, 20, 40, 900, 10])
    group = run(engine, started=5)
    assert [rollout.num_terms for rollout in group.rollouts] == [2, 3, 5]  # in the order of their numbers
    assert sorted(engine.cancelled) == [0, 3]
    assert len({seed for *_, seed in engine.asked}) == 5
    assert [rollout.advantage for rollout in group.rollouts] == pytest.approx(2 * np.array([2, 3, 5]) - 2 * 10 / 3)


def test_of_rollouts_that_end_at_once_the_earlier_ones_are_taken():
    engine = Race([5, 5, 5, 5, 5])
    assert [rollout.num_terms for rollout in run(engine, started=5).rollouts] == [1, 2, 3]


def test_an_error_of_one_ends_all_that_were_started():
    engine = Race([900, 900, 10, 900], fails=2)
    with pytest.raises(PromptError, match="no picture"):
        run(engine, started=4)
    assert sorted(engine.cancelled) == [0, 1, 3]


def test_a_group_that_is_cancelled_leaves_no_rollout_behind():
    engine = Race([900] * 4)

    async def cancel():
        task = asyncio.create_task(rollouter(engine, started=4).run(PROMPT))
        while len(engine.asked) < 4:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancel())
    assert sorted(engine.cancelled) == [0, 1, 2, 3]


def test_an_evaluation_starts_one():
    engine = ScriptedEngine()
    asyncio.run(rollouter(engine, started=5).evaluate(PROMPT))
    assert [num for _, num, *_ in engine.asked] == [1]
