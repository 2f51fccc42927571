"""Histories of the torch engine that grow by turns: what is kept, what is computed again, and the same numbers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cosmos_rl_core.episodes.interfaces import Opening
from cosmos_rl_core.types import Sampling
from cosmos_rl_llm.build import build_torch_engine
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig, LLMTorchOptions
from cosmos_rl_llm.engines.torch.cache import KeptTerms, WaitingTerms
from cosmos_rl_llm.tiny import write_tiny_model

SAMPLING = Sampling(max_terms=5)
DATA = LLMDataConfig(path="unused.jsonl", chat_template="none")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("sessions") / "base", num_layers=2, hidden_size=64))


@asynccontextmanager
async def engine_of(base, **options):
    engine = build_torch_engine(LLMModelConfig(path=base), data=DATA, options=LLMTorchOptions(**options))
    await engine.switch(0, lambda: None)
    try:
        yield engine
    finally:
        await engine.close()


def opening(number=0):
    return Opening(terms=np.arange(3, 8, dtype=np.int32) + number % 3, text="")


async def play(engine, number=0, *, turns=4):
    """One episode; between two turns 1, 2, ... terms are appended. Returns its history and its turns with places."""
    session = engine.open(opening(number))
    history, played = opening(number).terms.tolist(), []
    for turn in range(turns):
        appended = np.array([4, 5, 6][:turn], np.int32)
        sampled = await session.extend(appended, sampling=SAMPLING, seed=100 * number + turn)
        history += appended.tolist()
        played.append((len(history), sampled))
        history += sampled.terms.tolist()
    session.close()
    return history, played


def by_the_plain_model(base, history):
    """Log-probabilities [n - 1] of each token after the first, computed at once."""
    model = AutoModelForCausalLM.from_pretrained(base)
    tokens = torch.tensor([history])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("options", [{}, {"episode_cache_bytes": 20_000}, {"batch_invariant": True}], ids=str)
def test_turns_have_the_log_probabilities_of_the_whole_history(base, options):
    async def episodes():
        async with engine_of(base, **options) as engine:
            return await asyncio.gather(*(play(engine, number) for number in range(6)))

    for history, played in asyncio.run(episodes()):
        expected = by_the_plain_model(base, history)
        for place, turn in played:
            np.testing.assert_allclose(turn.logprobs, expected[place - 1 : place - 1 + len(turn.terms)], atol=2e-6)


def test_the_same_episodes_again_bit_for_bit(base):
    async def episodes(order):
        async with engine_of(base, batch_invariant=True, max_sequences=8) as engine:
            played = await asyncio.gather(*(play(engine, number) for number in order))
            return dict(zip(order, played, strict=True))

    first, again = asyncio.run(episodes(range(6))), asyncio.run(episodes([5, 2, 0]))
    for number, (history, played) in again.items():
        assert history == first[number][0]
        for (_, turn), (_, other) in zip(played, first[number][1], strict=True):
            assert np.array_equal(turn.logprobs, other.logprobs)


def passes(engine):
    """The lengths of all forward passes from now on."""
    lengths = []
    engine._model.base_model.register_forward_pre_hook(
        lambda module, arguments, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    return lengths


def test_a_turn_reads_only_what_is_new(base):
    async def episode(**options):
        async with engine_of(base, **options) as engine:
            lengths = passes(engine)
            _, played = await play(engine, turns=3)
            return [length for length in lengths if length > 1], played

    read, played = asyncio.run(episode())
    # The prompt has 5 tokens. Each later turn reads the last token of the turn before it, which was sampled and not yet
    # read, and the appended ones.
    assert read == [5, 1 + 1, 1 + 2]
    again, played = asyncio.run(episode(episode_cache_bytes=0))
    assert again == [place for place, _ in played]


def test_the_first_prompt_of_a_group_is_read_once(base):
    async def first_turns():
        async with engine_of(base) as engine:
            lengths = passes(engine)
            sessions = [engine.open(opening()) for _ in range(3)] + [engine.open(opening(1))]
            nothing = np.zeros(0, np.int32)
            turns = await asyncio.gather(
                *(each.extend(nothing, sampling=SAMPLING, seed=seed) for seed, each in enumerate(sessions))
            )
            return lengths[0], turns

    read, turns = asyncio.run(first_turns())
    assert read == 2 * 5  # of two prompts
    for number, turn in zip((0, 0, 0, 1), turns, strict=True):
        expected = by_the_plain_model(base, [*opening(number).terms.tolist(), *turn.terms.tolist()])
        np.testing.assert_allclose(turn.logprobs, expected[4:], atol=2e-6)


def test_episodes_that_waited_longest_are_dropped_first():
    def terms(size):
        return KeptTerms([(torch.zeros(1, size, 1), torch.zeros(1, size, 1)), None], size)

    waiting = WaitingTerms(3 * terms(4).num_bytes)
    histories = [object() for _ in range(4)]
    for history in histories[:3]:
        waiting.put(history, terms(4))
    assert waiting.take(histories[0]) is not None  # its next turn begins
    waiting.put(histories[3], terms(4))
    waiting.put(histories[0], terms(4))
    assert [waiting.take(history) is not None for history in histories] == [True, False, True, True]
    waiting.put(histories[0], terms(100))
    assert waiting.take(histories[0]) is None  # alone above the limit


def test_weights_switch_inside_of_an_episode(base):
    async def episode():
        async with engine_of(base) as engine:
            session = engine.open(opening())
            first = await session.extend(np.zeros(0, np.int32), sampling=SAMPLING, seed=1)

            def halve():
                with torch.no_grad():
                    for weight in engine.weights().values():
                        weight.mul_(0.5)

            await engine.switch(1, halve)
            second = await session.extend(np.array([4], np.int32), sampling=SAMPLING, seed=2)
            session.close()
            return first, second

    first, second = asyncio.run(episode())
    assert set(first.versions.tolist()) == {0} and set(second.versions.tolist()) == {1}


def test_sleep_forgets_and_the_next_turn_is_the_same(base):
    async def episode(*, sleeps):
        async with engine_of(base) as engine:
            session = engine.open(opening())
            turns = [await session.extend(np.zeros(0, np.int32), sampling=SAMPLING, seed=1)]
            if sleeps:
                await engine.sleep()
                await engine.wake()
            turns.append(await session.extend(np.array([4], np.int32), sampling=SAMPLING, seed=2))
            return turns

    awake, asleep = asyncio.run(episode(sleeps=False)), asyncio.run(episode(sleeps=True))
    for turn, other in zip(awake, asleep, strict=True):
        assert turn.terms.tolist() == other.terms.tolist()
        np.testing.assert_allclose(turn.logprobs, other.logprobs, atol=2e-6)


def test_a_cancelled_turn_frees_its_sequence(base):
    async def cancel():
        async with engine_of(base) as engine:
            session = engine.open(opening())
            long = Sampling(max_terms=50)
            turn = asyncio.create_task(session.extend(np.zeros(0, np.int32), sampling=long, seed=1))
            before = engine.progress
            while engine.progress == before:
                await asyncio.sleep(0)
            turn.cancel()
            await asyncio.wait([turn])
            await play(engine, turns=1)  # a round of the engine that notices
            return len(engine._batch.sequences)

    assert asyncio.run(cancel()) == 0
