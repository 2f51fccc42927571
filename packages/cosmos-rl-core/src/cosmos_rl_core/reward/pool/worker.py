"""A worker process of the reward server: one reward, built once, which serves requests over an inherited socket.

It may use another Python interpreter than the server, whose environment has cosmos-rl-core and the reward's
dependencies; besides the reward it imports msgspec and numpy. The socket also carries descriptors:

    server -> worker    Build
    worker -> server    RewardReady, or ChildFailed and the end
    server -> worker    one descriptor per item, after one byte; then Ask
    worker -> server    RewardAnswer, with one result per item

One Ask is outstanding at a time. A worker of `reward.processes` builds what an item names.
"""

from __future__ import annotations

import asyncio
import faulthandler
import mmap
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cosmos_rl_core.connected_process import ChildFailed, receive_descriptors
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.processes import GRACE_S, end_with, inherited_socket
from cosmos_rl_core.reward.build import build_by_name
from cosmos_rl_core.reward.request import read_request
from cosmos_rl_core.reward.values import checked_steps, checked_values, failure, is_async, place
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.payload import decode_group

OF_ITEMS = "*"
"""Name in a Build of a worker whose items name their rewards."""


class Build(msgspec.Struct, frozen=True, tag=True):
    """Build a reward."""

    name: str
    """Such as "module:attribute", or OF_ITEMS."""
    label: str
    """Name of its scores."""
    options: dict[str, Any]


class RewardReady(msgspec.Struct, frozen=True, tag=True):
    """The reward is built."""


class RewardItem(msgspec.Struct, frozen=True):
    """One request."""

    num_bytes: int
    """Size of its body."""
    reward: int = 0
    """Index of the requested reward in the header, which has its options."""
    own: Build | None = None
    """The reward of a body that is an encoded group, without a header."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Request to score items."""

    items: list[RewardItem]
    timeout_s: float = 0.0
    """The worker ends itself GRACE_S after this time, also in code that never returns to Python; 0: it does not."""


class Result(msgspec.Struct, frozen=True):
    """One request's scores, or the error."""

    scores: dict[str, list[float]] = {}
    """Scores by the reward's name, or by "reward.part". One value per sample."""
    error: str = ""
    is_final: bool = False
    """Whether an item with `own` would fail again."""
    steps: list[list[float]] = []
    """Of an item with `own`: for each rollout the rewards of its steps, or one."""


class RewardAnswer(msgspec.Struct, frozen=True, tag=True):
    """Results in the order of the items."""

    results: list[Result]
    seconds: float
    """Duration of the scoring."""


ToWorker = Build | Ask
FromWorker = RewardReady | RewardAnswer | ChildFailed


Scores = dict[str, list[float]]
"""Scores by the reward's name, or by "reward.part"; one finite float per rollout."""


class Served:
    """A reward with its options, and an event loop for async rewards.

    scores = served.score([group, group, ...])          # one Scores per group, or the error as text
    """

    def __init__(self, build: Build) -> None:
        """Build the reward. Raises UserError like `build_by_name`."""
        self._label = build.label
        self._reward = build_by_name(build.name, build.options)
        self._runner = asyncio.Runner()

    def score(self, groups: Sequence[RolloutGroup]) -> list[Scores | str]:
        """Return each group's scores or its error; a failed group does not affect the others."""
        try:
            values = self._values(groups)
            if len(values) != len(groups):
                raise SampleError(f"{self._label} returned {len(values)} results for {len(groups)} groups")
        except Exception as error:  # user code may raise anything; it is reported as an error
            if len(groups) > 1:
                return [scored for group in groups for scored in self.score([group])]
            return [(error if isinstance(error, SampleError) else failure(error, where=self._label)).reason]
        return [self._checked(value, group) for value, group in zip(values, groups, strict=True)]

    def steps(self, group: RolloutGroup) -> list[list[float]]:
        """Return for each rollout the rewards of its steps, or one. Raises SampleError as a rubric does."""
        where = place(self._label, group)
        try:
            (values,) = self._values([group])
        except (Exception, SystemExit) as error:  # user code may raise anything; it is reported as an error
            raise failure(error, where=where) from error
        return [steps.tolist() for steps in checked_steps(values, rollouts=group.rollouts, where=where)]

    def _values(self, groups: Sequence[RolloutGroup]) -> Sequence[Any]:
        if (score_groups := getattr(self._reward, "score_groups", None)) is not None:
            return score_groups(
                groups
            )  # one call for the batch, as of a network; groups may differ in sizes and shapes
        if is_async(self._reward):
            return self._runner.run(_gathered(self._reward, groups))
        return [self._reward(group) for group in groups]

    def _checked(self, values: Any, group: RolloutGroup) -> Scores | str:
        size = len(group.rollouts)
        parts = values if isinstance(values, Mapping) else {"": values}
        try:
            named = {f"{self._label}.{part}" if part else self._label: column for part, column in parts.items()}
            return {name: checked_values(column, expected=size, where=name) for name, column in named.items()}
        except SampleError as error:
            return error.reason


async def _gathered(reward: Any, groups: Sequence[RolloutGroup]) -> Sequence[Any]:
    return await asyncio.gather(*(reward(group) for group in groups))


MAX_ERROR_CHARS = 2000
_MAX_VARIANTS = 8
"""Number of cached instances of the reward with options of requests, besides the one with the server's options."""


class Worker:
    """Turns requests into results.

    answer = worker.answer(ask, descriptors)
    """

    def __init__(self, build: Build) -> None:
        """Build the reward. Raises UserError if that fails."""
        self._build = build
        self._served = None if build.name == OF_ITEMS else Served(build)
        self._variants: dict[bytes, Served] = {}

    def answer(self, ask: Ask, descriptors: Sequence[int]) -> RewardAnswer:
        """Score the items in one batch, items with their own options separately. Closes the descriptors."""
        start = time.perf_counter()
        results: list[Result] = [Result()] * len(ask.items)
        together: dict[int, tuple[Served, list[int], list[list[RolloutGroup]]]] = {}
        for i, (item, descriptor) in enumerate(zip(ask.items, descriptors, strict=True)):
            try:
                buffer = _mapped(item, descriptor)
                if item.own is not None:
                    results[i] = self._own_result(item.own, buffer)
                    continue
                served, groups = self._read(item, buffer)
            except Exception as error:  # an error of this request only
                results[i] = Result(error=f"{self._build.label}: {error}"[:MAX_ERROR_CHARS])
                continue
            _, indices, batched = together.setdefault(id(served), (served, [], []))
            indices.append(i)
            batched.append(groups)
        for served, indices, requests in together.values():
            scored = served.score([group for groups in requests for group in groups])
            for i, groups in zip(indices, requests):
                results[i] = _joined(scored[: len(groups)])
                del scored[: len(groups)]
        return RewardAnswer(results=results, seconds=time.perf_counter() - start)

    def _read(self, item: RewardItem, buffer: mmap.mmap) -> tuple[Served, list[RolloutGroup]]:
        request = read_request(buffer)
        options = request.header.rewards[item.reward].options
        build = msgspec.structs.replace(self._build, options={**self._build.options, **options})
        return self._variant(build) if options or not self._served else self._served, request.read_groups(buffer)

    def _own_result(self, build: Build, buffer: mmap.mmap) -> Result:
        try:
            return Result(steps=self._variant(build).steps(decode_group(memoryview(buffer))))
        except UserError as error:
            return Result(error=str(error)[:MAX_ERROR_CHARS], is_final=True)
        except SampleError as error:
            return Result(error=error.reason[:MAX_ERROR_CHARS], is_final=error.final)

    def _variant(self, build: Build) -> Served:
        """Return a reward with options of its own, built once. Raises UserError."""
        key = msgspec.json.encode(build, order="deterministic")
        if key not in self._variants:
            while len(self._variants) >= _MAX_VARIANTS:
                del self._variants[next(iter(self._variants))]
            self._variants[key] = Served(build)
        return self._variants[key]


def _mapped(item: RewardItem, descriptor: int) -> mmap.mmap:
    """Map the item's body and close the descriptor."""
    try:
        # a private mapping: the reward may write into its arrays without effect on others
        return mmap.mmap(descriptor, item.num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def _joined(scored: Sequence[Scores | str]) -> Result:
    """Combine the results of a request's groups."""
    scores: Scores = {}
    for one in scored:
        if isinstance(one, str):
            return Result(error=one[:MAX_ERROR_CHARS])
        for name, values in one.items():
            scores.setdefault(name, []).extend(values)
    return Result(scores=scores)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach all processes of the terminal; the server decides
        signal.signal(number, signal.SIG_IGN)
    inherited = inherited_socket()
    end_with(inherited)
    server = BlockingConnection(inherited, decode=ToWorker)
    build = server.receive()
    try:
        worker = Worker(build)
    except UserError as error:
        server.send(ChildFailed(reason=str(error), user=True))
        sys.exit(2)
    server.send(RewardReady())
    while descriptors := receive_descriptors(inherited):
        ask = server.receive()
        if ask.timeout_s:  # a thread of C, which needs no lock: a search of `re` keeps it until its end
            faulthandler.dump_traceback_later(ask.timeout_s + GRACE_S, exit=True)
        answer = worker.answer(ask, descriptors)
        faulthandler.cancel_dump_traceback_later()
        server.send(answer)


if __name__ == "__main__":
    main()
