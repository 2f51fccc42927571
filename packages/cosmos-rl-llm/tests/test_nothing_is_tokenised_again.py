"""What is trained is what was sampled: episodes of six chat templates through the torch engine and the collator."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch
from chat_families import FAMILIES, tokenizer_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from cosmos_rl_core.episodes.build import environments_of
from cosmos_rl_core.episodes.config import EnvironmentSection
from cosmos_rl_core.episodes.engine import EpisodeGenerator
from cosmos_rl_core.episodes.interfaces import Environment, Observation
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling, Share
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.data.continuation import ChatContinuation
from cosmos_rl_llm.engines.torch.engine import TorchEngine


class Chatter(Environment):
    """Says a few random words four times."""

    async def reset(self, row):
        self.random = random.Random(row["seed"])
        self.turns = 0
        return Observation(self._words())

    async def step(self, said, turn):
        self.turns += 1
        await asyncio.sleep(0)
        return Observation(self._words(), reward=float(len(said)), done=self.turns == 4)

    def _words(self):
        return " ".join(self.random.choice(["one", "<2>", "{three}", "  four", "five\n"]) for _ in range(4))


class Recording:
    """An engine whose sessions note what was read and sampled."""

    version = progress = 0

    def __init__(self, engine):
        self.engine, self.sessions = engine, []

    def open(self, opening):
        self.sessions.append(RecordedSession(self.engine.open(opening), opening.terms.tolist()))
        return self.sessions[-1]


class RecordedSession:
    def __init__(self, session, read):
        self.session, self.limit = session, session.limit
        self.read, self.sampled, self.logprobs = read, [], []

    async def extend(self, terms, *, sampling, seed):
        turn = await self.session.extend(terms, sampling=sampling, seed=seed)
        self.read = [*self.read, *terms.tolist(), *turn.terms.tolist()]
        self.sampled += turn.terms.tolist()
        self.logprobs += turn.logprobs.tolist()
        return turn

    def close(self):
        self.session.close()


def model_of(tokenizer):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.02,
    )
    return Qwen3ForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_episodes_train_what_was_sampled(family, episodes=170):
    check(family, episodes=episodes)  # of six templates


@pytest.mark.parametrize("family", ["thinking"])
def test_episodes_train_what_was_sampled(family):
    check(family, episodes=8)


def check(family, *, episodes):
    template, ends, *_ = FAMILIES[family]
    tokenizer = tokenizer_of(template)
    chat = Chat(
        tokenizer=tokenizer,
        end_ids=frozenset(tokenizer.convert_tokens_to_ids(token) for token in ["</s>", *ends]),
        max_length=1024,
    )
    section = EnvironmentSection(name=f"{__name__}:Chatter", max_turns=4, max_turn_tokens=60)

    async def play():
        engine = TorchEngine(model_of(tokenizer), chat, LLMTorchOptions(max_sequences=32))
        recording = Recording(engine)
        generator = EpisodeGenerator(recording, ChatContinuation(chat), environments_of(section.name, {}), section)
        prompt = Prompt(sample_id=0, row={})
        _, rollouts = await generator.generate(prompt, num_samples=episodes, sampling=Sampling(max_terms=900), seed=11)
        await engine.close()
        return recording.sessions, rollouts

    sessions, rollouts = asyncio.run(play())
    for session, rollout in zip(sessions, rollouts, strict=True):
        tokens = rollout.arrays["tokens"]
        assert [*rollout.arrays["prompt_tokens"].tolist(), *tokens.tolist()] == session.read
        assert tokens[rollout.loss_mask].tolist() == session.sampled
        assert np.array_equal(rollout.rollout_logprobs[rollout.loss_mask], np.array(session.logprobs, np.float32))
    assert max(len(rollout.exchanges) for rollout in rollouts) > 1
    group = RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=tuple(rollouts))
    batch = collate([group], microbatch_terms=4096, share=Share())
    trained = [labels for each in batch.microbatches for labels in each.inputs["labels"][each.terms.loss_mask > 0]]
    assert sorted(map(int, trained)) == sorted(token for session in sessions for token in session.sampled)
    assert batch.num_terms == sum(len(session.sampled) for session in sessions)
