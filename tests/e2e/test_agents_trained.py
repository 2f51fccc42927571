"""Agents written for OpenAI's packages, unchanged, are trained: on the tokens drawn for them, and no others."""

import asyncio
import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import openai
import pytest
import torch
from endpoint_service import (
    PROMPT,
    CallsContinuation,
    Recording,
    endpoint,
    make_chat,
    tiny_model,
)

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import RolloutGroup, Sampling, Share, ToolCall
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from cosmos_rl_llm.model.causal_lm import named_weights
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
agents = pytest.importorskip("agents", reason="openai-agents is not installed")

GROUP = 8
VOWELS = "aeiouAEIOU"


class HashCalls(CallsContinuation):
    """A turn with "#" calls the tool `look`: what a random model draws often enough to learn it."""

    def parse(self, turn, *, tools=()):
        turn = super().parse(turn)
        text, sign, _ = turn.text.partition("#")
        return (
            replace(turn, text=text, calls=(ToolCall(name="look", arguments={"at": len(text)}),))
            if tools and sign
            else turn
        )


async def openai_client(row):
    """Two questions, the second streamed; the reward counts vowels."""
    client = openai.AsyncOpenAI(base_url=row.base_url, api_key=row.key, max_retries=0)
    messages: list = [{"role": "user", "content": "say"}]
    first = await client.chat.completions.create(model="policy", messages=messages, max_tokens=100, logprobs=True)
    [choice] = first.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == first.usage.completion_tokens
    if choice.finish_reason == "length":  # it has no end that a second question could follow
        await client.close()
        return 0.0
    messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
    stream = await client.chat.completions.create(
        model="policy", messages=messages, max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    parts = [chunk async for chunk in stream]
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    await client.close()
    return sum(letter in VOWELS for letter in text + (choice.message.content or "")) / 50


async def openai_client_with_tools(row):
    """Call the tool that the model asks for, and answer it."""
    client = openai.AsyncOpenAI(base_url=row.base_url, api_key=row.key, max_retries=0)
    tools: list = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages: list = [{"role": "user", "content": "say"}]
    calls = 0
    while calls < 3:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=100)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls or answer.choices[0].finish_reason == "length":
            break
        calls += 1
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "seen"} for c in message.tool_calls]
    await client.close()
    return calls / 3


async def agents_framework(row):
    """An agent of the package openai-agents, which speaks the Responses interface."""
    looked = []

    @agents.function_tool
    def look(at: int) -> str:
        """Look at a place."""
        looked.append(at)
        return "seen"

    client = openai.AsyncOpenAI(base_url=row.base_url, api_key=row.key, max_retries=0)
    agent = agents.Agent(
        name="looker",
        instructions="look around",
        tools=[look],
        model=agents.OpenAIResponsesModel(model="policy", openai_client=client),
        model_settings=agents.ModelSettings(max_tokens=100),
    )
    try:
        result = agents.Runner.run_streamed(agent, "say", max_turns=3)
        async for _ in result.stream_events():
            pass
    except (agents.MaxTurnsExceeded, agents.ModelBehaviorError):  # the last one where a turn was cut
        pass
    await client.close()
    return min(len(looked), 3) / 3


class Row:
    """What an agent gets: where the endpoint is, and its key."""

    def __init__(self, service, rollout):
        self.base_url, self.key = service.agents.base_url, rollout.key


async def train(agent, *, steps):
    """Yield after each step the group, what the engine drew for it, and the step's metrics."""
    chat = make_chat(letters="\n #" + "".join(sorted(set("usertoolsassistantsystemlookcallseensayagainaround"))))
    model = tiny_model(chat)
    policy = CausalLMPolicy(copy.deepcopy(model), TermOptions())
    engine = TorchEngine(model, chat, LLMTorchOptions(max_sequences=16))
    trainer = Trainer(
        policy,
        objective=build_objective(AlgorithmConfig.model_validate({"name": "grpo"}), max_terms=800),
        optimizer=build_optimizer(
            "adamw", policy.module, learning_rate=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0
        ),
        lr_factor=lambda step: 1.0,
        max_grad_norm=1.0,
    )
    recording, results = Recording(engine), []
    async with endpoint(recording, chat=chat, continuation=HashCalls(chat), retries=0) as service:
        for step in range(steps):
            generating = asyncio.create_task(
                service.agents.generate(PROMPT, num_samples=GROUP, sampling=Sampling(max_terms=800), seed=step)
            )

            async def play():
                rollout = await service.agents.take(wait_s=20)
                rollout.end(await agent(Row(service, rollout)))

            await asyncio.gather(*(play() for _ in range(GROUP)))
            _, rollouts = await generating
            rewards = [rollout.exchanges[-1].reward for rollout in rollouts]
            rollouts = [replace(r, advantage=reward - np.mean(rewards)) for r, reward in zip(rollouts, rewards)]
            batch = collate(
                [RolloutGroup(prompt=PROMPT, rollouts=tuple(rollouts))], microbatch_terms=4096, share=Share()
            )
            trainer.begin(batch)
            with torch.no_grad():
                logprobs = [policy.forward(part).logprobs.numpy() for part in batch.microbatches]
            trainer.forward_backward(batch.microbatches)
            trainer.optim_step()
            results.append((rollouts, recording.drawn[:], batch, np.concatenate(logprobs), np.mean(rewards)))
            recording.drawn.clear()
            await engine.switch(step + 1, partial(_copy, named_weights(policy.module), engine.weights()))
    await engine.close()
    return results


@torch.no_grad()
def _copy(weights, live):
    for name, tensor in live.items():
        tensor.copy_(weights[name])


def drawn_of(rollout) -> Iterator[tuple[list[int], list[int]]]:
    """Yield of each turn all tokens before it and its own, from the arrays that are trained on."""
    tokens, mask = rollout.arrays["tokens"], rollout.loss_mask
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    for begin, end in edges.reshape(-1, 2):
        yield [*rollout.arrays["prompt_tokens"].tolist(), *tokens[:begin].tolist()], tokens[begin:end].tolist()


@pytest.mark.parametrize(
    "agent", [openai_client, openai_client_with_tools, agents_framework], ids=["openai", "openai-tools", "agents"]
)
def test_an_unchanged_agent_is_trained_on_the_tokens_that_were_drawn_for_it(agent):
    results = asyncio.run(train(agent, steps=4))
    for step, (rollouts, drawn, batch, logprobs, _) in enumerate(results):
        assert "branch_lengths" not in rollouts[0].arrays
        trained = [(before, terms) for rollout in rollouts for before, terms in drawn_of(rollout)]
        assert sorted(trained) == sorted((before, terms) for before, terms, _ in drawn)
        assert all((rollout.versions == step).all() for rollout in rollouts)
        sampled = np.concatenate([part.terms.rollout_logprobs.numpy() for part in batch.microbatches])
        mask = np.concatenate([part.terms.loss_mask.numpy() for part in batch.microbatches]).astype(bool)
        np.testing.assert_allclose(logprobs[mask], sampled[mask], atol=1e-4)
