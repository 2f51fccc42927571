"""A worker process of the reward server: one reward, built once, which serves requests over an inherited socket.

It may use another Python interpreter than the server, whose environment has cosmos-rl-core and the reward's
dependencies; besides the reward it imports msgspec and numpy.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import end_with, inherited_socket
from cosmos_rl_core.reward.cosmos_rl_body import read_request
from cosmos_rl_core.reward.service.messages import (
    Answer,
    Ask,
    Item,
    Ready,
    Refused,
    Result,
    ToWorker,
    receive_descriptors,
)
from cosmos_rl_core.reward.service.served import Scores, Served
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.blocking import BlockingConnection

MAX_ERROR_CHARS = 2000
_MAX_VARIANTS = 8
"""Number of cached instances of the reward with options of requests, besides the one with the server's options."""


class Worker:
    """Turns requests into results.

    answer = worker.answer(ask, descriptors)
    """

    def __init__(self, name: str, *, label: str, options: dict[str, Any]) -> None:
        """Build the reward. Raises UserError if that fails."""
        self._name = name
        self._label = label
        self._options = options
        self._served = Served(name, label=label, options=options)
        self._variants: dict[bytes, Served] = {}

    def answer(self, ask: Ask, descriptors: Sequence[int]) -> Answer:
        """Score the items in one batch, items with their own options separately. Closes the descriptors."""
        start = time.perf_counter()
        results: list[Result] = [Result()] * len(ask.items)
        together: dict[int, tuple[Served, list[int], list[list[RolloutGroup]]]] = {}
        for i, (item, descriptor) in enumerate(zip(ask.items, descriptors, strict=True)):
            try:
                served, groups = self._read(item, descriptor)
            except Exception as error:  # an error of this request only
                results[i] = Result(error=f"{self._label}: {error}"[:MAX_ERROR_CHARS])
                continue
            _, indices, found = together.setdefault(id(served), (served, [], []))
            indices.append(i)
            found.append(groups)
        for served, indices, requests in together.values():
            scored = served.score([group for groups in requests for group in groups])
            for i, groups in zip(indices, requests):
                results[i] = _joined(scored[: len(groups)])
                del scored[: len(groups)]
        return Answer(results=results, seconds=time.perf_counter() - start)

    def _read(self, item: Item, descriptor: int) -> tuple[Served, list[RolloutGroup]]:
        try:
            # a private mapping: the reward may write into its arrays without effect on others
            buffer = mmap.mmap(descriptor, item.num_bytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        request = read_request(buffer)
        return self._with(request.header.rewards[item.reward].options), request.read_groups(buffer)

    def _with(self, options: dict[str, Any]) -> Served:
        """Return the reward with a request's options merged into the server's."""
        if not options:
            return self._served
        key = msgspec.json.encode(options, order="deterministic")
        if key not in self._variants:
            while len(self._variants) >= _MAX_VARIANTS:
                del self._variants[next(iter(self._variants))]
            self._variants[key] = Served(self._name, label=self._label, options={**self._options, **options})
        return self._variants[key]


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
        worker = Worker(build.name, label=build.label, options=build.options)
    except UserError as error:
        server.send(Refused(reason=str(error)))
        sys.exit(2)
    server.send(Ready())
    while descriptors := receive_descriptors(inherited):
        server.send(worker.answer(server.receive(), descriptors))


if __name__ == "__main__":
    main()
