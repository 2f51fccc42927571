"""The rollout of an agent that keeps its own history and sends all of it with each call.

    messages of a call --equal to those of a branch--> continuation.extend(the new ones) -> the branch's session
                       --equal up to an earlier turn--> a new branch, opened with the recorded terms up to there
                       --not equal--------------------> a new branch, opened with the messages

A call that its client repeats gets the answer of the first one. A call that nobody waits for any more is cancelled, and
what it sampled is not trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cosmos_rl_core.episodes.history import EpisodeHistory
from cosmos_rl_core.episodes.interfaces import Continuation, HoldsSessions, Message, Opening, Session
from cosmos_rl_core.errors import PromptError, SampleError
from cosmos_rl_core.types import Prompt, Rollout, Sampling, Turn

Tools = Sequence[Mapping[str, Any]]
_NOTHING = np.zeros(0, np.int32)


class RequestRefused(Exception):
    """A request that an agent has to correct."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def has_ended(id: str, rest: str = "") -> RequestRefused:
    """Return the error of a request for a rollout that has ended."""
    return RequestRefused(409, "rollout_ended", f"rollout {id} has ended{rest}; POST /rollouts for another one")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """A request of an agent for a turn."""

    messages: Sequence[Message]
    """The whole history. Arguments of tool calls are objects, and contents texts."""
    tools: Tools = ()
    max_terms: int | None = None
    """Of the answer."""
    request_id: str = ""
    """A call with the same one and the same messages is the same call; empty: unknown."""
    is_retry: bool = False
    """Whether its client has sent it before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """A turn, as its client gets it."""

    turn: Turn
    prompt: np.ndarray
    """[prompt] int32: all terms before it."""


@dataclass(frozen=True, slots=True)
class _Point:
    """The end of a turn in a branch."""

    num_messages: int
    terms: np.ndarray
    """All terms up to here."""
    turn: Turn


@dataclass(eq=False, slots=True, kw_only=True)
class _Branch:
    """A history in the engine."""

    opening: Opening
    session: Session
    tools: Tools
    number: int = -1
    """In the record; -1 before its first turn."""
    messages: list[Message] = field(default_factory=list)
    points: list[_Point] = field(default_factory=list)
    last: tuple[int, float] = (-1, 0.0)
    """Number and time of its last turn."""
    is_usable: bool = True
    """Whether its session can draw the next turn: nobody else does, and no draw of it was cancelled."""


@dataclass(eq=False, slots=True)
class _Pending:
    """A call, and the task that answers it."""

    call: AgentCall
    task: asyncio.Task[AgentAnswer]
    waiters: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether it has no answer and will get none."""
        if self.task.cancelling() or self.task.cancelled():
            return True
        return self.task.done() and self.task.exception() is not None


class AgentRollout:
    """One rollout of an agent, from its start to its end.

    answer = await rollout.answer(call)                 # any number, also at the same time; raises RequestRefused
    rollout.end(reward=1.0)
    reward = await rollout.ended()                      # raises SampleError
    trained = rollout.record()
    """

    def __init__(
        self,
        prompt: Prompt,
        *,
        engine: HoldsSessions,
        continuation: Continuation,
        sampling: Sampling,
        seed: int,
        is_foreign: Callable[[AgentCall, AgentRollout], bool] = lambda call, rollout: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """is_foreign: whether the messages of a call are those of another rollout."""
        self.id = secrets.token_hex(8)
        self.key = f"sk-{self.id}-{secrets.token_urlsafe(24)}"
        """Proves that a request is of this rollout's agent."""
        self.prompt = prompt
        self.taken = asyncio.Event()
        """Set once an agent has it."""
        self._engine, self._continuation = engine, continuation
        self.sampling, self._seed = sampling, seed
        self._is_foreign, self._clock = is_foreign, clock
        self._history = EpisodeHistory()
        self._branches: list[_Branch] = []
        self._calls: list[_Pending] = []
        self._over: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self._over.done()

    @property
    def is_drawing(self) -> bool:
        """Whether a call waits for the engine."""
        return any(not pending.task.done() for pending in self._calls)

    @property
    def num_turns(self) -> int:
        return len(self._history.exchanges)

    async def answer(self, call: AgentCall) -> AgentAnswer:
        """Draw the model's answer to a call. Raises RequestRefused, and what the engine raises."""
        if self.is_over:
            raise has_ended(self.id)
        pending = self._repeated(call)
        if pending is None:
            task = asyncio.create_task(self._draw(call, number=len(self._calls)), name=f"answer {self.id}")
            self._calls.append(pending := _Pending(call, task))
        pending.waiters += 1
        try:
            return await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            if self.is_over:  # by another request, while this one was answered
                raise has_ended(self.id, " before there was an answer") from None
            raise
        finally:
            pending.waiters -= 1
            if not pending.waiters and not pending.task.done():
                pending.task.cancel()

    def end(self, reward: float | None = None, *, problem: str = "") -> None:
        """End it. reward: None for rewards of the recipe alone. problem: why it is no rollout; it is then dropped.

        Raises RequestRefused if it has ended, or if the reward is not finite.
        """
        if self.is_over:
            raise has_ended(self.id, " already; its reward stays")
        if reward is not None and not math.isfinite(reward):
            raise RequestRefused(400, "invalid_reward", f"the reward is {reward}; send a finite number")
        if problem:
            self._over.set_exception(SampleError(problem))
            self._over.exception()  # it may be dropped before anybody waits for it
        else:
            self._over.set_result(reward)
        self._cancel_calls()

    async def ended(self) -> float | None:
        """Wait for the end and return its reward. Raises SampleError, and what the engine has raised."""
        return await asyncio.shield(self._over)

    def record(self) -> tuple[str, Rollout]:
        """Return the first prompt's text and the rollout, once it has ended. Raises SampleError without a turn."""
        if not self._history.exchanges:
            raise SampleError("the agent ended its rollout before the model had said anything")
        self._history.answer(self.num_turns - 1, reward=self._over.result())
        newest = max(self._branches, key=lambda branch: branch.last[0])
        rollout = self._history.rollout(self._continuation, finish_reason=newest.points[-1].turn.finish_reason)
        return self._branches[0].opening.text, rollout

    def close(self) -> None:
        """Forget it in the engine."""
        if not self.is_over:
            self._over.cancel()
        self._cancel_calls()
        for branch in self._branches:
            branch.session.close()

    def says(self, call: AgentCall) -> bool:
        """Whether a call continues what the model sampled in this rollout."""
        return self._continued(call) is not None

    def _cancel_calls(self) -> None:
        for pending in self._calls:
            pending.task.cancel()

    def _repeated(self, call: AgentCall) -> _Pending | None:
        """Return the earlier call that this one repeats."""
        for pending in reversed(self._calls):
            is_same = call.is_retry or (call.request_id and call.request_id == pending.call.request_id)
            if is_same and not pending.has_failed and _same_chat(call, pending.call):
                return pending
        return None

    async def _draw(self, call: AgentCall, *, number: int) -> AgentAnswer:
        branch, appended, before = self._branch_for(call)
        branch.is_usable = False
        try:
            sampling = replace(self.sampling, max_terms=self._room(branch, appended, before, call.max_terms))
            began = self._clock()
            turn = await branch.session.extend(appended, sampling=sampling, seed=_seed(self._seed, number))
        except PromptError as error:
            branch.session.close()
            raise RequestRefused(400, "context_length_exceeded", error.reason) from error
        except BaseException as error:
            branch.session.close()
            if not isinstance(error, (RequestRefused, asyncio.CancelledError)) and not self.is_over:
                self._over.set_exception(error)
                self._over.exception()
            raise
        turn = self._with_ids(self._continuation.parse(turn, tools=call.tools), number)
        self._add(branch, call, appended, turn, before=before, model_s=self._clock() - began)
        return AgentAnswer(turn=turn, prompt=before)

    def _add(
        self, branch: _Branch, call: AgentCall, appended: np.ndarray, turn: Turn, *, before: np.ndarray, model_s: float
    ) -> None:
        """Record a turn."""
        if branch.number < 0:
            branch.number = self._history.begin(branch.opening)
            self._branches.append(branch)
        else:
            last, ended_at = branch.last
            new = call.messages[branch.points[-1].num_messages :]
            self._history.answer(last, new, environment_s=max(0.0, self._clock() - model_s - ended_at))
        number = self._history.add(branch.number, appended, turn, model_s=model_s)
        branch.messages = [*call.messages, said(turn)]
        branch.points.append(_Point(len(branch.messages), np.concatenate([before, turn.terms]), turn))
        branch.last = number, self._clock()
        branch.is_usable = True

    def _branch_for(self, call: AgentCall) -> tuple[_Branch, np.ndarray, np.ndarray]:
        """Return the branch that answers a call, the terms to append to it, and all terms that the turn follows."""
        continued = self._continued(call)
        try:
            if continued is not None:
                branch, point = continued
                appended = self._continuation.extend(point.turn, call.messages[point.num_messages :])
                terms = np.concatenate([point.terms, appended])
                if branch.is_usable and point is branch.points[-1]:
                    return branch, appended, terms
                opening = replace(branch.opening, terms=terms)
            else:
                if self._is_foreign(call, self):
                    raise RequestRefused(400, "other_rollout", "these messages are the history of another rollout")
                where = self.prompt.origin or f"prompt {self.prompt.sample_id}"
                opening = self._continuation.open(call.messages, tools=call.tools, where=where)
            session = self._engine.open(opening)
        except PromptError as error:
            raise RequestRefused(400, "invalid_messages", error.reason) from error
        return _Branch(opening=opening, session=session, tools=call.tools), _NOTHING, opening.terms

    def _continued(self, call: AgentCall) -> tuple[_Branch, _Point] | None:
        """Return the turn that a call continues: that after the most messages, rather one at the end of a branch.

        A turn that was cut has no end: what follows it is another history.
        """
        best: tuple[tuple[int, bool], tuple[_Branch, _Point]] | None = None
        for branch in self._branches:
            if list(branch.tools) != list(call.tools):
                continue
            common = _num_equal(branch.messages, call.messages)
            for point in branch.points:
                if point.num_messages > min(common, len(call.messages) - 1) or point.turn.finish_reason != "stop":
                    continue
                rank = point.num_messages, branch.is_usable and point is branch.points[-1]
                if best is None or rank > best[0]:
                    best = rank, (branch, point)
        return None if best is None else best[1]

    def _room(self, branch: _Branch, appended: np.ndarray, before: np.ndarray, most: int | None) -> int:
        """Return the maximum terms of the next turn. Raises RequestRefused where none is left."""
        longest, limit = self.sampling.max_terms, branch.session.limit
        if most is not None and most > longest:
            raise RequestRefused(
                400,
                "max_tokens_too_large",
                f"max_tokens = {most} is more than [rollout.sampling] max_tokens = {longest} of a whole "
                "rollout; ask for fewer, or raise it in the recipe",
            )
        later = sum(len(other.opening.terms) for other in self._branches if other.number > 0)
        opened = len(branch.opening.terms) if branch.number < 0 and self._branches else 0
        left = longest - self._history.num_terms - later - opened - len(appended)
        if left < 1:
            raise RequestRefused(
                400,
                "context_length_exceeded",
                f"nothing is left of [rollout.sampling] max_tokens = {longest}, which counts all after the first "
                "prompt; end the rollout, or raise it in the recipe",
            )
        if limit is not None and limit - len(before) < 1:
            raise RequestRefused(
                400,
                "context_length_exceeded",
                f"the history has {len(before)} tokens, and the model reads at most {limit}; shorten it",
            )
        return min(left, most or left, left if limit is None else limit - len(before))

    def _with_ids(self, turn: Turn, number: int) -> Turn:
        """Name the calls of a turn as far as the model has not. Mistral's templates take names of nine letters."""

        def name(place: int) -> str:
            return hashlib.blake2b(f"{self._seed} {number} {place}".encode(), digest_size=5).hexdigest()[:9]

        calls = tuple(replace(call, id=call.id or name(place)) for place, call in enumerate(turn.calls))
        return replace(turn, calls=calls)


def said(turn: Turn) -> dict[str, Any]:
    """Return a turn as the message that a client appends to its history."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in turn.calls
        ]
    return message


def _identity(message: Message) -> tuple[Any, ...]:
    """Return the parts that are equal in equal messages; names of calls are the client's to choose."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message["role"], message.get("content") or "", calls


def _num_equal(messages: Sequence[Message], others: Sequence[Message]) -> int:
    """Number of equal messages at the beginning of two chats."""
    pairs: Iterable[tuple[Message, Message]] = zip(messages, others)
    for number, (one, other) in enumerate(pairs):
        if _identity(one) != _identity(other):
            return number
    return min(len(messages), len(others))


def _same_chat(call: AgentCall, other: AgentCall) -> bool:
    return (
        len(call.messages) == len(other.messages) == _num_equal(call.messages, other.messages)
        and list(call.tools) == list(other.tools)
        and call.max_terms == other.max_terms
    )


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
