"""Episodes of several turns beside the bound that engine and tools set, on the torch engine.

    .venv/bin/python benchmarks/multi_turn.py [--quick]

Each episode has 4 turns of 8 sampled tokens; between them the environment answers 4 tokens after 0, 50 or 500 ms. The
engine alone samples the same turns of the same histories without an environment. The bound is the slower of the engine
alone and of the tools alone: episodes / max_episodes x turns x latency. Both sides alternate in one process, on a Qwen3
of 0.2 million parameters.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _endpoint
from _metrics import Figure, report

from cosmos_rl_core.episodes.build import Environments
from cosmos_rl_core.episodes.config import EnvironmentSection
from cosmos_rl_core.episodes.engine import EpisodeGenerator
from cosmos_rl_core.episodes.interfaces import Environment, Observation
from cosmos_rl_core.types import Prompt, Sampling, Turn
from cosmos_rl_llm import write_tiny_model
from cosmos_rl_llm.build import build_torch_engine, load_chat
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig, LLMTorchOptions
from cosmos_rl_llm.data.continuation import ChatContinuation
from cosmos_rl_llm.engines.torch.engine import TorchEngine

TURNS, SAMPLED, ANSWER = 4, 8, "<>?0"
MAX_SEQUENCES = 16
LATENCIES_S = (0.0, 0.05, 0.5)


class Slow(Environment):
    """Answers after `latency_s`."""

    latency_s = 0.0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.turns = 0
        return Observation("?")

    async def step(self, said: str, turn: Turn) -> Observation:
        self.turns += 1
        await asyncio.sleep(self.latency_s)
        return Observation(ANSWER, reward=1.0, done=self.turns == TURNS)


class FixedTurns(ChatContinuation):
    """Takes a turn of the full length for one that ended, so that all turns have the same length."""

    def parse(self, turn: Turn, *, tools: Sequence[Mapping[str, Any]] = ()) -> Turn:
        return replace(turn, finish_reason="stop")


async def engine_alone(engine: TorchEngine, continuation: FixedTurns, *, episodes: int, at_once: int) -> float:
    """Seconds of all turns without an environment."""
    places = asyncio.Semaphore(at_once)
    answer = continuation.open([{"role": "user", "content": ANSWER}]).terms

    async def one(number: int) -> None:
        async with places:
            session = engine.open(continuation.open([{"role": "user", "content": "?"}]))
            for turn in range(TURNS):
                terms = answer if turn else answer[:0]
                await session.extend(terms, sampling=Sampling(max_terms=SAMPLED), seed=97 * number + turn)
            session.close()

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(episodes)))
    return time.perf_counter() - began


async def with_environment(generator: EpisodeGenerator, *, episodes: int) -> float:
    began = time.perf_counter()
    await generator.generate(
        Prompt(sample_id=0, row={}), num_samples=episodes, sampling=Sampling(max_terms=60), seed=int(began)
    )
    return time.perf_counter() - began


async def measure(base: Path, *, rounds: int, episodes: int) -> list[Figure]:
    data = LLMDataConfig(path="unused.jsonl", chat_template="none")
    model = LLMModelConfig(path=str(base))
    engine = build_torch_engine(model, data=data, options=LLMTorchOptions(max_sequences=MAX_SEQUENCES))
    await engine.switch(0, lambda: None)
    continuation = FixedTurns(load_chat(str(base), data, max_length=None))
    figures = []
    for latency_s in LATENCIES_S:
        Slow.latency_s = latency_s
        # Enough open episodes that the engine has turns to sample while the others wait.
        at_once = MAX_SEQUENCES if not latency_s else 8 * MAX_SEQUENCES
        section = EnvironmentSection(name="slow", max_turns=TURNS, max_turn_tokens=SAMPLED, max_episodes=at_once)
        generator = EpisodeGenerator(engine, continuation, Environments(Slow, label="slow"), section)
        sides: dict[str, list[float]] = {"engine": [], "episodes": []}
        for number in range(rounds + 1):
            alone = await engine_alone(engine, continuation, episodes=episodes, at_once=at_once)
            whole = await with_environment(generator, episodes=episodes)
            if number:  # the first round warms both up
                sides["engine"].append(alone)
                sides["episodes"].append(whole)
        tools_s = episodes / at_once * TURNS * latency_s
        bound_s, took_s = max(statistics.median(sides["engine"]), tools_s), statistics.median(sides["episodes"])
        print(
            f"tools of {1000 * latency_s:g} ms: {episodes / took_s:.1f} episodes/s; engine alone "
            f"{episodes / statistics.median(sides['engine']):.1f}, tools alone "
            + (f"{episodes / tools_s:.1f}" if tools_s else "without limit")
        )
        metric = f"episodes with tools of {1000 * latency_s:g} ms"
        figures.append(Figure(metric=metric, value=bound_s / took_s, unit="of the bound", target=">= 0.9"))
    await engine.close()
    return figures


def main() -> None:
    quick = "--quick" in sys.argv
    with tempfile.TemporaryDirectory() as directory:
        base = write_tiny_model(Path(directory) / "base", characters="01234567<>?", num_layers=2, hidden_size=64)
        figures = asyncio.run(measure(base, rounds=2 if quick else 5, episodes=256 if quick else 768))
    figures += _endpoint.figures(100 if quick else 400)
    sys.exit(not report("multi_turn", figures))


if __name__ == "__main__":
    main()
