"""The groups on their way from rollout to policy, and how a batch of them travels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.effects import AssignBatch
from cosmos_rl_core.rollout.source import PromptSource


@dataclass(slots=True, kw_only=True)
class Batches:
    """Holds the payload of a group from its delivery until its step is committed."""

    source: PromptSource
    supervised: bool
    """True: a sample's payload is its row, read when it is needed."""
    _payloads: dict[int, bytes] = field(default_factory=dict)
    _assigned: Sequence[int] = ()

    def store(self, sample: int, payload: bytes) -> None:
        self._payloads[sample] = payload

    def message(self, effect: AssignBatch) -> p.Batch:
        self._assigned = effect.samples
        payloads = [self._payload(sample) for sample in effect.samples]
        return p.Batch(step=effect.step, epoch=effect.epoch, samples=list(effect.samples), payloads=payloads)

    def committed(self) -> None:
        """The step that was assigned last is in the weights."""
        for sample in self._assigned:
            self._payloads.pop(sample, None)
        self._assigned = ()

    def _payload(self, sample: int) -> bytes:
        if self.supervised:
            return json.dumps(dict(self.source[sample].row)).encode()
        return self._payloads[sample]
