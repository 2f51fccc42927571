"""The endpoint beside the engine: what a call of an agent costs over the same turn asked of the engine itself.

engine    open -> extend -> parse                 alternating, in one process, on the same chats
endpoint  the same, asked by HTTP
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from _metrics import Figure

from cosmos_rl_core.episodes.agent_config import AgentSection
from cosmos_rl_core.episodes.agents import AgentGenerator
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_core.wire.http_server import serving
from cosmos_rl_core.wire.listening import Address
from cosmos_rl_llm.build import build_torch_engine, load_chat
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig, LLMTorchOptions
from cosmos_rl_llm.data.continuation import ChatContinuation
from cosmos_rl_llm.endpoint.app import AgentApp
from cosmos_rl_llm.tiny import write_tiny_model

TERMS = 8
"""Tokens of a turn."""
_SAMPLING = Sampling(max_terms=TERMS)
_TOKEN = "benchmark"


async def overhead_ms(calls: int) -> dict[str, float]:
    """Return medians in milliseconds: "engine" and "endpoint" a call, and "overhead", of the differences of pairs."""
    with TemporaryDirectory() as directory:
        base = write_tiny_model(Path(directory) / "base", num_layers=2, hidden_size=64)
        model = LLMModelConfig(path=str(base))
        data = LLMDataConfig(path="none", chat_template="none")
        engine = build_torch_engine(model, data=data, options=LLMTorchOptions())
        await engine.switch(0, lambda: None)
        continuation = ChatContinuation(load_chat(str(base), data, max_length=None))
        try:
            return await _measured(engine, continuation, calls)
        finally:
            await engine.close()


async def _measured(engine: Any, continuation: ChatContinuation, calls: int) -> dict[str, float]:
    agents = AgentGenerator(engine, continuation, AgentSection(max_episodes=calls + 1), needs_reward=True)
    app = AgentApp(agents, decode=continuation.decode, model="tiny", token=_TOKEN)
    async with (
        serving(app.asgi, Address(host="127.0.0.1"), allow_remote=False, log=print) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        agents.base_url = f"{url}/v1"
        prompt = Prompt(sample_id=0, row={})
        group = asyncio.create_task(agents.generate(prompt, num_samples=calls + 1, sampling=_SAMPLING, seed=0))
        pairs = []
        for call in range(calls + 1):
            rollout = await agents.take(wait_s=10)
            assert rollout is not None
            messages = [{"role": "user", "content": f"{call}+{call}="}]

            async def by_http(messages: Any = messages, key: str = rollout.key) -> None:
                body = {"model": "tiny", "messages": messages}
                reply = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
                assert reply.status_code == 200 and reply.json()["token_ids"]

            async def directly(messages: Any = messages, seed: int = call) -> None:
                session = engine.open(continuation.open(messages))
                turn = await session.extend(np.zeros(0, np.int32), sampling=_SAMPLING, seed=seed)
                continuation.parse(turn)
                session.close()

            sides = {"engine": directly, "endpoint": by_http}
            order = list(sides) if call % 2 else list(reversed(sides))
            pairs.append({name: await _timed(sides[name]) for name in order})
            rollout.end(0.0)
        await group
    pairs = pairs[1:]  # the first of both compiles and connects
    medians = {name: statistics.median(pair[name] for pair in pairs) for name in ("engine", "endpoint")}
    return {**medians, "overhead": statistics.median(pair["endpoint"] - pair["engine"] for pair in pairs)}


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await work()
    return 1000 * (time.perf_counter() - began)


def figures(calls: int = 400) -> list[Figure]:
    """Return the figure of the endpoint."""
    medians = asyncio.run(overhead_ms(calls))
    note = (
        f"endpoint: {TERMS} tokens a turn, {calls} pairs, alternating; medians: engine {medians['engine']:.2f} ms, "
        f"endpoint {medians['endpoint']:.2f} ms with httpx as the client"
    )
    metric = "endpoint: time of a call over that of the engine called directly"
    return [Figure(metric=metric, value=medians["overhead"], unit="ms", target="<= 5", note=note)]


if __name__ == "__main__":
    for figure in figures():
        print(figure)
