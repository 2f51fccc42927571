"""The staleness arithmetic of the rollout buffer: admission of leases, selection of a step's groups.

A *sample* is one prompt group. A step trains B = `groups_per_step` groups; step t trains on weights of
version t and makes version t + 1. A group whose lease was granted to a replica that held version w has the
*deadline*

    d = w + max_staleness

the last step that may consume it: all its terms have a version >= w, so at step t <= d the oldest is t - w
<= max_staleness versions old. A group is *outstanding* while it is leased or ready and no step was assigned
to it; next_step = t is the first step without a batch. With N(x) = number of outstanding groups with d <=
x, the buffer is *feasible* at t when

    N(t + j) <= (j + 1) B      for every j >= 0

(steps t .. t + j have (j + 1) B places, and those groups fit nowhere else). Two rules keep it feasible:

* `admits` grants a lease only if the buffer is feasible afterwards.
* `select` takes B ready groups for step t only if the rest is feasible at t + 1, that is, for every j >= 0,
  at least N(t + j) - j B of the groups with d <= t + j are taken. Taking ready groups in (deadline, sample)
  order takes the most of them below every bound at once, so if that choice fails, every choice does and the
  step must wait.

Hence no group ever passes its deadline, although nothing is dropped or evicted. Nor is there a deadlock:
fewer than B outstanding groups always leave room for a lease at the current version (d >= t), and once B or
more are outstanding and all of them ready, N(t + j) - min(B, N(t + j)) <= j B, so `select` succeeds.
max_staleness = 0 gives the synchronous loop; max_staleness = s allows (s + 1) B groups in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessWindow:
    """A hard bound on the staleness of the groups that a step trains on."""

    max_staleness: int
    """Maximum versions between the weights a term was sampled from and the weights trained on it."""
    groups_per_step: int
    """B: prompt groups per step."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness is {self.max_staleness}; it must be 0 (synchronous) or more")
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step is {self.groups_per_step}; a step needs at least one group")

    @property
    def capacity(self) -> int:
        """Most groups that can be outstanding at once, (s + 1) B."""
        return (self.max_staleness + 1) * self.groups_per_step

    def deadline(self, version: int) -> int:
        """Return the last step that may consume a group whose oldest term can be of `version`."""
        return version + self.max_staleness

    def room(self, outstanding: Mapping[int, int], deadline: int, *, next_step: int) -> int:
        """Return the number of further groups of `deadline` that fit: min over j of (j + 1) B - N(t + j).

        `outstanding` maps a deadline to its number of outstanding groups and must be feasible. Only the bounds at
        `deadline` and at later deadlines can be tight. The result for a passed deadline is 0.
        """
        if deadline < next_step:
            return 0
        num_due = sum(count for d, count in outstanding.items() if d <= deadline)
        room = (deadline - next_step + 1) * self.groups_per_step - num_due
        for bound in sorted(d for d in outstanding if d > deadline):
            num_due += outstanding[bound]
            room = min(room, (bound - next_step + 1) * self.groups_per_step - num_due)
        return room

    def admits(self, outstanding: Mapping[int, int], deadline: int, *, next_step: int) -> bool:
        """Return whether one more group of `deadline` may be leased."""
        return self.room(outstanding, deadline, next_step=next_step) > 0

    def select(
        self, ready: Mapping[int, Collection[int]], outstanding: Mapping[int, int], *, next_step: int
    ) -> tuple[int, ...] | None:
        """Return the B samples of step `next_step`, sorted by id, or None if it must wait.

        `ready` maps a deadline to the ids of ready groups; `outstanding` counts ready and leased ones.
        """
        if not self._can_take(ready, outstanding, next_step):
            return None
        taken: list[int] = []
        for deadline in sorted(ready):
            places = self.groups_per_step - len(taken)
            if not places:
                break
            taken += sorted(ready[deadline])[:places]
        return tuple(sorted(taken))

    def _can_take(self, ready: Mapping[int, Collection[int]], outstanding: Mapping[int, int], next_step: int) -> bool:
        num_due = num_ready = 0
        for bound in sorted(outstanding):
            num_due += outstanding[bound]
            num_ready += len(ready.get(bound, ()))
            must_take = num_due - max(bound - next_step, 0) * self.groups_per_step
            if min(num_ready, self.groups_per_step) < must_take:
                return False
        return num_ready >= self.groups_per_step
