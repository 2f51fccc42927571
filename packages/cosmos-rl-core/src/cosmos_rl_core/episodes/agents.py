"""Rollouts that agents of their own play through an endpoint.

    prompt -> num_samples rollouts, each with an id and a key -> [agent] command, or POST /rollouts
           -> calls of the model (agent_rollout.py) -> done -> the group

consumes   rows; ends of rollouts
produces   the rollouts of a prompt, as an engine does
waits for  agents: no rollout is taken, or none ends, until [agent] timeout_s
"""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from cosmos_rl_core.episodes.agent_config import AgentSection
from cosmos_rl_core.episodes.agent_process import AgentCommand
from cosmos_rl_core.episodes.agent_rollout import AgentCall, AgentRollout, RequestRefused, has_ended
from cosmos_rl_core.episodes.interfaces import Continuation, HoldsSessions
from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.types import Prompt, Rollout, Sampling

UNTAKEN_S = 30.0
"""Seconds without an agent after which it is reported that rows wait."""
_NUM_ENDED = 4096
"""Keys of ended rollouts that are remembered, to explain what comes late."""


def endpoint_token(run_token: bytes) -> str:
    """Return the token with which agents ask for rows. It is no token of the run: agents are no workers."""
    return hmac.digest(run_token, b"agent endpoint", "sha256").hex()


class AgentGenerator:
    """Generates the rollouts of a prompt with agents.

    text, rollouts = await agents.generate(prompt, num_samples=8, sampling=sampling, seed=7)
    rollout = agents.find(key)                          # of a request; raises RequestRefused
    rollout = await agents.take(wait_s=30)              # for an agent that asks for a row
    """

    def __init__(
        self,
        engine: HoldsSessions,
        continuation: Continuation,
        section: AgentSection,
        *,
        needs_reward: bool,
        report: Callable[[str, str], None] = lambda complaint, detail: None,
    ) -> None:
        """needs_reward: whether agents alone give rewards. report: receives a complaint and its detail. Raises
        UserError for a command that is not installed."""
        self._engine, self.continuation = engine, continuation
        self._section, self.needs_reward, self._report = section, needs_reward, report
        self.base_url = ""
        """Of the endpoint, known once it is served: before the first prompt."""
        self._command = AgentCommand(section.command, rewards_itself=needs_reward) if section.command else None
        self._free = asyncio.Semaphore(section.max_episodes)
        self._live: dict[str, AgentRollout] = {}
        """By id."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Ids, the oldest first."""
        self._untaken: asyncio.Queue[AgentRollout] = asyncio.Queue()

    @property
    def is_waiting(self) -> bool:
        """Whether all rollouts wait for agents, and none for the engine."""
        return bool(self._live) and not any(rollout.is_drawing for rollout in self._live.values())

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Sampling, seed: int
    ) -> tuple[str, list[Rollout]]:
        """Return the first prompt of the first rollout, and one rollout of each agent.

        Raises SampleError if a rollout fails once more than [agent] retries.
        """
        samples = [
            asyncio.create_task(self._sample(prompt, number, sampling=sampling, seed=seed), name=f"agent {number}")
            for number in range(num_samples)
        ]
        try:
            played = await asyncio.gather(*samples)
        finally:
            for sample in samples:
                sample.cancel()
            await asyncio.gather(*samples, return_exceptions=True)
        return played[0][0], [rollout for _, rollout in played]

    def find(self, key: str, *, id: str = "") -> AgentRollout:
        """Return the live rollout of a key; or of an id, for a request that proved itself. Raises RequestRefused."""
        id = id or key.removeprefix("sk-").partition("-")[0]
        rollout = self._live.get(id)
        if rollout is not None and (not key or hmac.compare_digest(rollout.key.encode(), key.encode())):
            return rollout
        if rollout is None and id in self._ended:
            raise has_ended(id)
        raise RequestRefused(401, "invalid_api_key", "the API key is of no rollout; use that of the row")

    async def take(self, *, wait_s: float) -> AgentRollout | None:
        """Return a rollout that no agent has, as soon as there is one; None after `wait_s`. Raises RequestRefused."""
        if self._command is not None:
            raise RequestRefused(409, "has_command", "[agent] command plays all rollouts of this run")
        try:
            async with asyncio.timeout(wait_s):
                while (rollout := await self._untaken.get()).is_over:
                    pass
        except TimeoutError:
            return None
        rollout.taken.set()
        return rollout

    def close(self) -> None:
        """End the command's programs, once nothing is generated any more."""
        if self._command is not None:
            self._command.close()

    async def _sample(self, prompt: Prompt, number: int, *, sampling: Sampling, seed: int) -> tuple[str, Rollout]:
        """Play one rollout, again as often as it fails and [agent] retries allow."""
        for attempt in range(self._section.retries + 1):
            own = np.random.SeedSequence([seed, number, attempt]).generate_state(1, np.uint64)[0]
            try:
                return await self._play(prompt, sampling=sampling, seed=int(own >> 1))
            except SampleError as error:
                if error.final or attempt == self._section.retries:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _play(self, prompt: Prompt, *, sampling: Sampling, seed: int) -> tuple[str, Rollout]:
        async with self._free:
            rollout = AgentRollout(
                prompt,
                engine=self._engine,
                continuation=self.continuation,
                sampling=sampling,
                seed=seed,
                is_foreign=self._is_foreign,
            )
            self._live[rollout.id] = rollout
            try:
                await (self._offer(rollout) if self._command is None else self._run(rollout))
                return rollout.record()
            finally:
                del self._live[rollout.id]
                self._ended[rollout.id] = None
                while len(self._ended) > _NUM_ENDED:
                    self._ended.popitem(last=False)
                rollout.close()

    async def _run(self, rollout: AgentRollout) -> None:
        assert self._command is not None
        try:
            async with asyncio.timeout(self._section.timeout_s):
                await self._command.play(rollout, base_url=self.base_url)
        except TimeoutError:
            raise self._too_long(rollout) from None

    async def _offer(self, rollout: AgentRollout) -> None:
        """Wait until an agent has taken the rollout, as long as that takes, and has ended it."""
        loop = asyncio.get_running_loop()
        complaint = "rows wait for an agent: start one that asks for them with POST /rollouts"
        reporting = loop.call_later(UNTAKEN_S, self._report, complaint, f" at {self.base_url.removesuffix('/v1')}")
        try:
            self._untaken.put_nowait(rollout)
            await rollout.taken.wait()
        finally:
            reporting.cancel()
        try:
            async with asyncio.timeout(self._section.timeout_s):
                await rollout.ended()
        except TimeoutError:
            raise self._too_long(rollout) from None

    def _too_long(self, rollout: AgentRollout) -> SampleError:
        return SampleError(
            f"the agent did not end its rollout within [agent] timeout_s = {self._section.timeout_s:g} "
            f"({rollout.num_turns} turns so far)"
        )

    def _is_foreign(self, call: AgentCall, asking: AgentRollout) -> bool:
        return any(other.says(call) for other in self._live.values() if other is not asking)
