"""The publisher's side of the self-test of a path between GPUs (transports/selftest.py)."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from cosmos_rl_transfer.content.gpu import SideStream
from cosmos_rl_transfer.content.raw import Block, ByteRun
from cosmos_rl_transfer.publish.memory import StagedWeights
from cosmos_rl_transfer.publish.supply import End, Hold, Supply
from cosmos_rl_transfer.transports.base import TransportUnavailable
from cosmos_rl_transfer.transports.selftest import NUM_ROUNDS, PATTERN_BYTES, in_time
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link

_STEP = 512
"""From the bytes of one round to those of the next."""


class Pattern:
    """Random bytes on the publisher's GPU, other ones in each round: no slot has them before."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        source = np.frombuffer(os.urandom(num_bytes + NUM_ROUNDS * _STEP), np.uint8)
        side = self._side = SideStream(device)  # of its own: a copy that hangs must be before none of the weights
        with side.current():
            self._bytes = torch.from_numpy(source.copy()).pin_memory().to(device, non_blocking=True)
        side.mark().synchronize()
        parts = [source[at : at + num_bytes] for at in range(0, NUM_ROUNDS * _STEP, _STEP)]
        self._hashes = [xxhash.xxh3_64_intdigest(part.data) for part in parts]

    def write(self, number: int, out: Block) -> int:
        """Copy the bytes of a round into a slot uint8 [num_bytes] as weights are; return their hash."""
        number %= NUM_ROUNDS
        part = self._bytes[number * _STEP :][: self.num_bytes]
        if isinstance(out, Tensor):
            with self._side.current():
                out.copy_(part, non_blocking=True)
            self._side.mark().synchronize()
        else:
            np.copyto(out, self._side.to_host(part, torch.uint8).numpy())
        return self._hashes[number]


class PatternSession:
    """Answers one subscriber's requests before it joins. Its session's thread calls it."""

    def __init__(self, supply: Supply, link: Link) -> None:
        self._supply, self._link = supply, link
        self._pattern: Pattern | None = None
        self._sent: tuple[End, Hold] | None = None
        """The slot of the last pattern."""

    def answered(self, request: Any) -> bool:
        """Answer a request of the self-test; false for any other one."""
        match request:
            case m.TryTransport(transport) | m.ReadPattern(transport):
                try:
                    if isinstance(request, m.ReadPattern):
                        self._send(transport, request.round)
                    else:
                        outlet = self._supply.try_transport(transport)
                        offer = in_time(lambda: dict(outlet.offer), limit_s=self._supply.driver_s)
                        self._link.send(m.TransportOffer(offer))
                except TransportUnavailable as error:
                    self._supply.refuse(transport, error)
                    self._link.send(m.TransferRefused(str(error)))
            case m.WasRevoked(m.PATTERN):
                self._link.send(m.Revoked(self.end()))
            case _:
                self._pattern = None
                return False
        return True

    def end(self) -> bool:
        """Free the slot of the last pattern; return whether another subscriber had it meanwhile."""
        sent, self._sent = self._sent, None
        return sent is not None and not sent[0].slots.free(sent[1])

    def _send(self, transport: str, number: int) -> None:
        self.end()
        supply = self._supply
        if not (supply.between_gpus and isinstance(supply.memory, StagedWeights)):
            raise TransportUnavailable("the publisher does not offer it")
        end, outlet = supply.route(transport)
        hold = end.slots.take(self, wait=True)
        assert hold is not None, "it was waited for"
        self._sent = end, hold  # with an error until the subscriber leaves: a driver that hangs may write it later
        out = end.outlet.slots[hold.slot][: min(PATTERN_BYTES, supply.bucket_bytes)]
        write = partial(self._write, supply.memory.side.device, number, out)
        pattern_hash = in_time(write, limit_s=supply.driver_s)
        end.slots.start_reading(hold)
        runs = [ByteRun(out, 0)]
        data = m.Data(m.PATTERN, out.nbytes, pattern_hash, (), hold.slot, outlet.locate(runs))
        self._link.send(data, with_next=outlet.over_link)
        outlet.send(self._link, runs, num_bytes=out.nbytes)

    def _write(self, device: torch.device, number: int, out: Block) -> int:
        self._pattern = self._pattern or Pattern(device, out.nbytes)
        return self._pattern.write(number, out)
