"""An environment and a session speak in turns, and what was drawn is what the rollout trains on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from cosmos_rl_core.episodes.build import environments_of
from cosmos_rl_core.episodes.config import EnvironmentSection
from cosmos_rl_core.episodes.engine import EpisodeGenerator
from cosmos_rl_core.episodes.interfaces import Environment, Observation, Opening
from cosmos_rl_core.episodes.rewards import EnvironmentReward
from cosmos_rl_core.errors import PromptError, SampleError, UserError
from cosmos_rl_core.types import Exchange, Prompt, RolloutGroup, Sampling, ToolCall, Turn
from cosmos_rl_core.wire.payload import decode_group, encode_group

STOP = 0
PROMPT = Prompt(sample_id=3, row={"prompt": "go"}, origin="rows:4")
SAMPLING = Sampling(max_terms=100)


class Letters:
    """A continuation whose terms are characters."""

    def open(self, messages, *, tools=(), where=""):
        text = "".join(message["content"] for message in messages)
        return Opening(terms=_terms(text), text=text)

    def extend(self, turn, messages):
        return _terms("".join(message["content"] for message in messages))

    def parse(self, turn, *, tools=()):
        return replace(turn, text="".join(chr(term) for term in turn.terms if term != STOP))

    def arrays(self, branches):
        return {"prompt_tokens": branches[0][0].terms, "tokens": np.concatenate([terms for _, terms in branches])}


def _terms(text):
    return np.array([ord(letter) for letter in text], np.int32)


class Script:
    """An engine that draws given texts, a version later each time; "~" ends a turn without a stop term."""

    version = 0
    progress = 0

    def __init__(self, *texts, limit=None):
        self.texts, self.limit = list(texts), limit
        self.sessions = []

    def open(self, opening):
        self.sessions.append(ScriptedSession(self, opening))
        return self.sessions[-1]


class ScriptedSession:
    def __init__(self, engine, opening):
        self.engine, self.limit = engine, engine.limit
        self.read = opening.terms.tolist()
        self.calls = []
        self.closed = False
        self.place = 0

    async def extend(self, terms, *, sampling, seed):
        await asyncio.sleep(0)
        self.calls.append((sampling.max_terms, seed))
        self.read += terms.tolist()
        text = self.engine.texts[self.place]
        self.place += 1
        drawn = _terms(text.rstrip("~")) if text.endswith("~") else np.append(_terms(text), STOP).astype(np.int32)
        self.read += drawn.tolist()
        self.engine.version += 1
        return Turn(
            terms=drawn,
            logprobs=np.full(len(drawn), -0.5, np.float32),
            versions=np.full(len(drawn), self.engine.version, np.int32),
            finish_reason="length" if text.endswith("~") else "stop",
        )

    def close(self):
        self.closed = True


class Echo(Environment):
    """Says what it heard; "win" ends the episode, "die" raises, "hang" never answers."""

    lives: ClassVar = []
    deaths: ClassVar = 0

    async def reset(self, row):
        self.row = row
        Echo.lives.append(self)
        self.closed = False
        return Observation("!")

    async def step(self, said, turn):
        if said == "win":
            return Observation(reward=1.0, done=True, metrics={"won": 1})
        if said == "die" and Echo.deaths:
            Echo.deaths -= 1
            raise OSError("gone")
        if said == "hang":
            await asyncio.Event().wait()
        if said == "again":
            return Observation(history=[{"role": "user", "content": "new"}])
        return Observation(f"<{said}>", reward=0.25 if said == "good" else None)

    async def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def fresh():
    Echo.lives, Echo.deaths = [], 0


def generate(engine, *, num_samples=1, sampling=SAMPLING, seed=7, **keys):
    section = EnvironmentSection(name=f"{__name__}:Echo", **keys)

    async def run():
        generator = EpisodeGenerator(engine, Letters(), environments_of(section.name, {}), section)
        return await generator.generate(PROMPT, num_samples=num_samples, sampling=sampling, seed=seed)

    return asyncio.run(run())


def test_the_rollout_has_the_terms_that_the_engine_read_and_trains_on_those_it_drew():
    engine = Script("a", "good", "win")
    text, [rollout] = generate(engine)
    [session] = engine.sessions
    assert text == "go!"
    tokens = rollout.arrays["tokens"]
    assert [*rollout.arrays["prompt_tokens"], *tokens] == session.read
    assert "".join(chr(token) for token in tokens if token) == "a<a>good<good>win"
    drawn = "".join(chr(token) for token in tokens[rollout.loss_mask] if token)
    assert drawn == "agoodwin"
    assert rollout.rollout_logprobs[~rollout.loss_mask].tolist() == [0.0] * 9
    assert set(rollout.rollout_logprobs[rollout.loss_mask].tolist()) == {-0.5}
    assert session.closed and Echo.lives[0].closed
    assert rollout.finish_reason == "stop" and rollout.text == "win"


def test_versions_are_of_drawn_terms_and_steps_are_turns():
    _, [rollout] = generate(Script("a", "b", "win"))
    assert (rollout.versions.min(), rollout.versions.max()) == (1, 3)
    steps = rollout.episode.term_steps
    assert steps.tolist() == sorted(steps.tolist()) and rollout.episode.num_steps == 3
    for step in range(3):  # a turn's own terms have its version, and those before it the last drawn one's
        mine = steps == step
        assert set(rollout.versions[mine & rollout.loss_mask].tolist()) == {step + 1}
        assert set(rollout.versions[mine & ~rollout.loss_mask].tolist()) <= {step}


def test_exchanges_have_what_both_said_with_rewards_and_metrics():
    _, [rollout] = generate(Script("good", "win"))
    first, second = rollout.exchanges
    assert (first.text, first.messages[0]["content"], first.reward) == ("good", "<good>", 0.25)
    assert (second.text, second.messages, second.reward, dict(second.metrics)) == ("win", (), 1.0, {"won": 1.0})
    group = RolloutGroup(prompt=PROMPT, rollouts=(rollout,))
    assert [rewards.tolist() for rewards in EnvironmentReward()(group)] == [[0.25, 1.0]]


def test_the_last_turn_is_one_that_was_cut_or_the_last_of_max_turns():
    _, [cut] = generate(Script("a", "b~"))
    assert cut.finish_reason == "length" and [each.text for each in cut.exchanges] == ["a", "b"]
    assert cut.exchanges[-1].messages == ()
    _, [long] = generate(Script("a", "b", "c"), max_turns=2)
    assert long.finish_reason == "length" and len(long.exchanges) == 2
    assert long.loss_mask[-1]  # what the environment said last is not a part of it


def test_an_episode_that_nobody_gave_a_reward_has_none():
    _, [rollout] = generate(Script("a", "b"), max_turns=2)
    with pytest.raises(SampleError, match=r"no reward, which was cut; \[environment\] unfinished_reward"):
        EnvironmentReward()(RolloutGroup(prompt=PROMPT, rollouts=(rollout,)))
    _, [rollout] = generate(Script("a", "b"), max_turns=2, unfinished_reward=-1.0)
    assert [each.reward for each in rollout.exchanges] == [None, -1.0]


def test_limits_of_terms_are_those_of_the_turn_the_episode_and_the_model():
    engine = Script("a", "b", "win", limit=14)
    generate(engine, max_turn_tokens=9, sampling=Sampling(max_terms=12))
    # The prompt has 3 terms, which the episode's limit does not count; a turn has 2, and the answer after it 3.
    assert [most for most, _ in engine.sessions[0].calls] == [9, 14 - 3 - 2 - 3, 14 - 8 - 2 - 3]
    engine = Script("a", "b", "win", limit=20)
    generate(engine, sampling=Sampling(max_terms=12))
    assert [most for most, _ in engine.sessions[0].calls] == [12, 12 - 2 - 3, 12 - 5 - 2 - 3]
    engine = Script("a", limit=3)
    with pytest.raises(PromptError, match="the first prompt has 3 tokens"):
        generate(engine)


def test_seeds_differ_by_rollout_and_turn_and_repeat():
    def seeds():
        engine = Script("a", "win")
        generate(engine, num_samples=2)
        return sorted(seed for session in engine.sessions for _, seed in session.calls)

    assert len(set(seeds())) == 4 and seeds() == seeds()
    assert {life.row["seed"] for life in Echo.lives} == {7}


def test_a_history_that_is_rewritten_is_a_branch_of_the_same_rollout():
    _, [rollout] = generate(Branching("again", "win"))
    assert [each.branch for each in rollout.exchanges] == [0, 1]
    assert "".join(chr(token) for token in rollout.arrays["tokens"] if token) == "againwin"
    assert rollout.loss_mask.all()


class Branching(Script):
    """Its sessions go on in one script."""

    def open(self, opening):
        session = super().open(opening)
        session.place = len(self.sessions) - 1
        return session


def test_an_environment_that_fails_is_tried_again_and_then_an_error_of_the_sample():
    Echo.deaths = 1
    _, [rollout] = generate(Script("die", "win"))
    assert len(Echo.lives) == 2 and all(life.closed for life in Echo.lives)
    assert len(rollout.exchanges) == 2  # of the second try alone
    Echo.deaths = 2
    with pytest.raises(SampleError, match="failed on rows:4: step raised OSError: gone") as failed:
        generate(Script("die", "win"))
    assert not failed.value.final


class Unbuildable(Echo):
    built = 0

    def __init__(self):
        Unbuildable.built += 1
        if Unbuildable.built > 1:  # the first is built as a check, before any episode
            raise OSError("no such port")


def test_an_environment_that_cannot_be_built_is_an_error_of_the_sample():
    section = EnvironmentSection(name=f"{__name__}:Unbuildable")

    async def run():
        generator = EpisodeGenerator(Script("a"), Letters(), environments_of(section.name, {}), section)
        await generator.generate(PROMPT, num_samples=1, sampling=SAMPLING, seed=1)

    with pytest.raises(SampleError, match="cannot be built: no such port"):
        asyncio.run(run())
    assert Unbuildable.built == 3


def test_an_environment_that_hangs_is_given_up_after_its_time():
    with pytest.raises(SampleError, match=r"step took longer than \[environment\] timeout_s = 0.05"):
        generate(Script("hang"), timeout_s=0.05, retries=0)
    assert Echo.lives[0].closed


def test_a_generator_waits_while_all_episodes_wait_for_environments():
    section = EnvironmentSection(name=f"{__name__}:Echo")

    async def run():
        generator = EpisodeGenerator(Script("hang"), Letters(), environments_of(section.name, {}), section)
        assert not generator.is_waiting
        task = asyncio.create_task(generator.generate(PROMPT, num_samples=2, sampling=SAMPLING, seed=1))
        seen = []
        while len(Echo.lives) < 2 or not generator.is_waiting or not seen.count(False):
            seen.append(generator.is_waiting)  # false while a session samples
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return generator.is_waiting

    assert not asyncio.run(run())


def test_a_cancelled_group_closes_its_environments_and_sessions():
    engine = Script("hang")
    section = EnvironmentSection(name=f"{__name__}:Echo")

    async def run():
        generator = EpisodeGenerator(engine, Letters(), environments_of(section.name, {}), section)
        task = asyncio.create_task(generator.generate(PROMPT, num_samples=3, sampling=SAMPLING, seed=1))
        while sum(bool(session.calls) for session in engine.sessions) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert [life.closed for life in Echo.lives] == [True] * 3
    assert [session.closed for session in engine.sessions] == [True] * 3


def test_max_episodes_bounds_those_that_are_open():
    open_now, most = 0, 0

    class Counting(Script):
        def open(self, opening):
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            session = super().open(opening)
            close = session.close

            def closed():
                nonlocal open_now
                open_now -= 1
                close()

            session.close = closed
            return session

    generate(Counting("a", "win"), num_samples=7, max_episodes=2)
    assert (open_now, most) == (0, 2)


class Broken(Echo):
    async def reset(self, row):
        raise UserError("options.path: no such file")


def test_an_error_of_the_user_is_not_one_of_the_sample():
    section = EnvironmentSection(name=f"{__name__}:Broken")

    async def run():
        generator = EpisodeGenerator(Script("a"), Letters(), environments_of(section.name, {}), section)
        await generator.generate(PROMPT, num_samples=1, sampling=SAMPLING, seed=1)

    with pytest.raises(UserError, match=r"options\.path"):
        asyncio.run(run())


def test_exchanges_travel_with_their_group():
    _, [rollout] = generate(Script("good", "win"))
    call = ToolCall(name="add", arguments={"a": [1, {"b": None}]}, id="c1")
    rollout = replace(rollout, exchanges=(*rollout.exchanges, Exchange(text="3", calls=(call,), branch=1)))
    group = RolloutGroup(prompt=PROMPT, rollouts=(rollout,))
    received = decode_group(encode_group(group)).rollouts[0].exchanges
    assert received == rollout.exchanges
    assert isinstance(received[-1].calls[0], ToolCall)
