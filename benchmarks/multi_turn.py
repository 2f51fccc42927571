"""Episodes of several turns beside the bound that engine and tools set, on the torch engine.

    .venv/bin/python benchmarks/multi_turn.py [--quick] [--trl-only]

Each episode has 4 turns of 8 sampled tokens; between them the environment answers 4 tokens after 0, 50 or 500 ms. The
engine alone samples the same turns of the same histories without an environment. The bound is the slower of the engine
alone and of the tools alone: episodes / max_episodes x turns x latency. Both sides alternate in one process, on a Qwen3
of 0.2 million parameters.

Beside TRL: 8 prompts x 8 episodes, in which a Qwen3 of 0.8 million parameters calls a tool in three turns and answers
in the fourth; a short training has made it know them by heart (_trl_tools.py). GRPOTrainer's tool loop generates them
with transformers in its own environment, ours with `EpisodeGenerator`, `ToolEnvironment` and the torch engine. Both
read the same model, prompts and tool, sample at temperature 1, have all 64 episodes open at once and the same number of
threads, and alternate. Generation alone is timed. Other turns or another number of tokens on one side are an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _endpoint
import torch
from _metrics import Figure, report
from _peer_env import TRL, peer_python
from _trl_tools import BOOKS, GROUP_SIZE, MAX_TOKENS, Batch, Library, asked, read_page
from _trl_tools import TURNS as TOOL_TURNS
from _watch import CommandFailed
from transformers.utils import get_json_schema

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
from cosmos_rl_llm.tools.environment import ToolEnvironment

HERE = Path(__file__).resolve().parent
TRL_ROOT = HERE.parent / ".cache" / "trl"
TRL_LATENCIES_S = (0.0, 0.05)
TRL_TARGET = ">= 2"
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
            episodes_s = await with_environment(generator, episodes=episodes)
            if number:  # the first round warms both up
                sides["engine"].append(alone)
                sides["episodes"].append(episodes_s)
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


class Reader(ToolEnvironment):
    """Shows the model the tool in the words of TRL, so that both sides have the same prompts."""

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        observation = await super().reset(row)
        self.tools = [get_json_schema(read_page)]
        return observation


class OurTools:
    """Our side beside TRL."""

    def __init__(self, model: Path) -> None:
        data = LLMDataConfig(path="unused.jsonl")
        episodes = GROUP_SIZE * len(BOOKS)
        options = LLMTorchOptions(max_sequences=episodes)
        self.engine = build_torch_engine(LLMModelConfig(path=str(model)), data=data, options=options)
        self._generator = EpisodeGenerator(
            self.engine,
            ChatContinuation(load_chat(str(model), data, max_length=None)),
            Environments(lambda: Reader(functions=["_trl_tools:read_page"]), label="tools"),
            EnvironmentSection(name="tools", max_turns=TOOL_TURNS, max_episodes=episodes),
        )
        self._seed = 0

    async def batch(self, latency_s: float) -> Batch:
        """Generate all prompts with the samples of each."""
        Library.latency_s = latency_s
        self._seed += 1
        sampling = Sampling(max_terms=MAX_TOKENS)
        prompts = [Prompt(sample_id=number, row={"prompt": asked(book)}) for number, book in enumerate(BOOKS)]
        began, cpu_began = time.perf_counter(), time.process_time()
        groups = await asyncio.gather(
            *(
                self._generator.generate(
                    prompt, num_samples=GROUP_SIZE, sampling=sampling, seed=len(BOOKS) * self._seed + number
                )
                for number, prompt in enumerate(prompts)
            )
        )
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        rollouts = [rollout for _, group in groups for rollout in group]
        return Batch(
            seconds=seconds,
            cpu_s=cpu_s,
            episodes=len(rollouts),
            turns=sum(len(rollout.exchanges) for rollout in rollouts),
            tokens=sum(len(rollout.arrays["prompt_tokens"]) + rollout.num_terms for rollout in rollouts),
            sampled=sum(int(rollout.loss_mask.sum()) for rollout in rollouts),
        )


class TrlTools:
    """TRL's side: a process in its own environment, which writes the model of both."""

    def __init__(self, python: Path, model: Path, log: Path) -> None:
        command = [str(python), str(HERE / "_trl_tools.py"), str(model), "--threads", str(torch.get_num_threads())]
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "HF_HUB_OFFLINE": "1"}
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def ready(self) -> None:
        """Return once the model is written. Raises CommandFailed."""
        self._line()

    def batch(self, latency_s: float) -> Batch:
        """Generate all prompts with the samples of each. Raises CommandFailed."""
        assert self._process.stdin is not None
        print(latency_s, file=self._process.stdin, flush=True)
        return Batch(**json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
        raise CommandFailed(f"TRL's side ended with {self._process.wait()}:\n{end}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


async def alternate(ours: OurTools, trl: TrlTools, latency_s: float, *, rounds: int) -> Figure:
    """Let both sides generate by turns. Raises CommandFailed where they did other work."""
    batches: dict[str, list[Batch]] = {"TRL": [], "ours": []}
    for number in range(rounds + 1):
        theirs, own = trl.batch(latency_s), await ours.batch(latency_s)
        counts = [(one.episodes, one.turns, one.tokens, one.sampled) for one in (theirs, own)]
        if counts[0] != counts[1] or own.turns != TOOL_TURNS * own.episodes:
            raise CommandFailed(
                f"TRL's and our episodes, turns, tokens and sampled tokens: {counts[0]} and {counts[1]}"
            )
        if number:  # the first round warms both up
            batches["TRL"].append(theirs)
            batches["ours"].append(own)
    seconds = {side: statistics.median(one.seconds for one in each) for side, each in batches.items()}
    print(
        f"beside TRL, a tool of {1000 * latency_s:g} ms, {own.sampled / own.turns:.1f} sampled tokens a turn, "
        f"{own.tokens / own.episodes:.0f} tokens an episode; tokens that TRL trains on and did not sample: "
        f"{sum(one.changed for one in batches['TRL'])} of {sum(one.sampled for one in batches['TRL'])}"
    )
    for side, each in batches.items():
        print(
            f"  {side}: {own.episodes / seconds[side]:.1f} episodes/s, batches of "
            f"{' '.join(f'{one.seconds:.2f}' for one in each)} s, "
            f"{statistics.median(one.cpu_s for one in each):.2f} s of the CPU"
        )
    return Figure(metric=_beside(latency_s), value=seconds["TRL"] / seconds["ours"], unit="x", target=TRL_TARGET)


def _beside(latency_s: float) -> str:
    return f"episodes/s with a tool of {1000 * latency_s:g} ms, ours / TRL"


async def beside_trl(python: Path, base: Path, *, rounds: int) -> list[Figure]:
    model = base / "reader"
    model.mkdir()
    trl = TrlTools(python, model, base / "trl.log")
    try:
        trl.ready()
        ours = OurTools(model)
        await ours.engine.switch(0, lambda: None)
        figures = [await alternate(ours, trl, latency_s, rounds=rounds) for latency_s in TRL_LATENCIES_S]
        await ours.engine.close()
    finally:
        trl.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and episodes")
    parser.add_argument("--trl-only", action="store_true", help="only the comparison with TRL")
    given = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as directory:
        if not given.trl_only:
            base = write_tiny_model(Path(directory) / "base", characters="01234567<>?", num_layers=2, hidden_size=64)
            rounds, episodes = (2, 256) if given.quick else (5, 768)
            figures += asyncio.run(measure(base, rounds=rounds, episodes=episodes))
            figures += _endpoint.figures(100 if given.quick else 400)
        python = peer_python(TRL, TRL_ROOT)
        if isinstance(python, str):
            unmeasured = Figure(metric="", value=math.nan, unit="x", note=python)
            figures += [replace(unmeasured, metric=_beside(latency_s)) for latency_s in TRL_LATENCIES_S]
        else:
            try:
                figures += asyncio.run(beside_trl(python, Path(directory), rounds=2 if given.quick else 5))
            except CommandFailed as error:
                sys.exit(f"beside TRL: {error}")
    report("multi_turn", figures)


if __name__ == "__main__":
    main()
