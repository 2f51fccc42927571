"""A worker process of the reward server: one reward, built once, asked over a socket that it inherited.

    python -m cosmos_rl_core.reward.service.worker --descriptor 7 --name wfm:brightness --label brightness \
        --options '{}'

It may run under another interpreter than the server, in an environment that holds cosmos-rl-core and what the reward
needs; it imports msgspec and numpy beside the reward.
"""

from __future__ import annotations

import argparse
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.reward.cosmos_rl_body import read_request
from cosmos_rl_core.reward.service.frames import Answer, Ask, Item, Ready, Refused, Result, WorkerEnd
from cosmos_rl_core.reward.service.served import Scores, Served
from cosmos_rl_core.types import RolloutGroup

MAX_ERROR_CHARS = 2000
_MAX_VARIANTS = 8
"""Instances of the reward with options of requests that are kept, beside the one with the server's."""


class Worker:
    """Turns requests into results.

    answer = worker.answer(ask, descriptors)
    """

    def __init__(self, name: str, *, label: str, options: dict[str, Any]) -> None:
        """Build the reward. Raises UserError where it cannot be."""
        self._name = name
        self._label = label
        self._options = options
        self._served = Served(name, label=label, options=options)
        self._variants: dict[bytes, Served] = {}

    def answer(self, ask: Ask, descriptors: Sequence[int]) -> Answer:
        """Score the items together, those with options of their own apart. Closes the descriptors."""
        start = time.perf_counter()
        results: list[Result] = [Result()] * len(ask.items)
        together: dict[int, tuple[Served, list[int], list[list[RolloutGroup]]]] = {}
        for i, (item, descriptor) in enumerate(zip(ask.items, descriptors, strict=True)):
            try:
                served, groups = self._read(item, descriptor)
            except Exception as error:  # whatever is wrong with this request is its own
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
            # a private mapping: the reward may write into its arrays, and nobody else sees it
            buffer = mmap.mmap(descriptor, item.num_bytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        request = read_request(buffer)
        return self._with(request.header.rewards[item.reward].options), request.read_groups(buffer)

    def _with(self, options: dict[str, Any]) -> Served:
        """The reward with options of a request on top of the server's."""
        if not options:
            return self._served
        key = msgspec.json.encode(options, order="deterministic")
        if key not in self._variants:
            while len(self._variants) >= _MAX_VARIANTS:
                del self._variants[next(iter(self._variants))]
            self._variants[key] = Served(self._name, label=self._label, options={**self._options, **options})
        return self._variants[key]


def _joined(scored: Sequence[Scores | str]) -> Result:
    """The result of a request from those of its groups."""
    scores: Scores = {}
    for one in scored:
        if isinstance(one, str):
            return Result(error=one[:MAX_ERROR_CHARS])
        for name, values in one.items():
            scores.setdefault(name, []).extend(values)
    return Result(scores=scores)


def main() -> None:
    arguments = parse()
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole terminal; the server decides who stops
        signal.signal(number, signal.SIG_IGN)
    channel = WorkerEnd(socket.socket(fileno=arguments.descriptor))
    try:
        worker = Worker(arguments.name, label=arguments.label, options=msgspec.json.decode(arguments.options))
    except UserError as error:
        channel.send(Refused(reason=str(error)))
        sys.exit(2)
    channel.send(Ready())
    while (received := channel.receive()) is not None:
        channel.send(worker.answer(*received))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one worker of a Cosmos-RL reward server")
    parser.add_argument("--descriptor", type=int, required=True, help="the inherited socket")
    parser.add_argument("--name", required=True, help='the reward, such as "module:attribute"')
    parser.add_argument("--label", required=True, help="what its scores are called")
    parser.add_argument("--options", default="{}", help="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
