"""The wait-for graph of a run: edges from its status, and the chain from a waiting process to the one that works.

    policy-0 waits for batch 41: 5 of 8 groups ready, 3 leased to rollout-1         policy-0  -> rollout-1
    rollout-1 waits for weights: it loads them                                      rollout-1 -> weights

Functions of values: the status is a mapping as in status.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

RUN, WEIGHTS = "the run", "weights"
ROLES = ("policy", "rollout")
"""Names of a role stand for workers of it that have not connected."""


class Wait(NamedTuple):
    """One process waits for another one."""

    waiter: str
    awaited: str
    """A worker, a role of which no worker is connected, or `WEIGHTS`."""
    text: str
    """The line of the status."""
    is_spare: bool = False
    """Whether the waiter asks for more work, and may have some: the wait of another one does not go through it."""


class _Members(NamedTuple):
    """The workers of a status."""

    policies: tuple[str, ...]
    rollouts: tuple[str, ...]
    mesh: tuple[str, ...]
    starting: tuple[str, ...]
    """Policies that are not ready."""


def waits_of(status: Mapping[str, Any]) -> list[Wait]:
    """Return the edges of a status, in its order."""
    members = status.get("members", ())
    by_role = {role: tuple(each["name"] for each in members if each["role"] == role) for role in ROLES}
    starting = tuple(each["name"] for each in members if each["role"] == "policy" and each["state"] != "ready")
    workers = _Members(by_role["policy"], by_role["rollout"], tuple(status.get("mesh", ())), starting)
    waits: list[Wait] = []
    for text in map(str, status.get("waits", ())):
        for pattern, awaited in _PATTERNS:
            if matched := pattern.search(text):
                waiter, spare = matched.groupdict().get("waiter") or RUN, "waits for leases" in text
                names = [name for name in awaited(matched, workers) if name != waiter]
                waits += [Wait(waiter, name, text, spare and name != WEIGHTS) for name in names]
                break
    return waits


def chain(waits: Sequence[Wait], members: Sequence[Mapping[str, Any]], *, stopped: Collection[str] = ()) -> list[Wait]:
    """Return the waits from the run, a policy or a rollout to the process that all wait for; empty without a wait.

    Of several awaited processes the one in the worst state is followed: not connected, not ready, the oldest heartbeat.
    stopped: workers that do not run. The chain ends at one; weights wait for a policy that is one.
    """
    if not waits:
        return []
    publishers = [each["name"] for each in members if each["role"] == "policy" and each["name"] in stopped]
    waits = [*waits, *(Wait(WEIGHTS, name, f"{WEIGHTS} wait for {name}, which does not run") for name in publishers)]
    order = {RUN: 0} | {each["name"]: 1 + ROLES.index(each["role"]) for each in members if each["role"] in ROLES}
    node = min((wait.waiter for wait in waits), key=lambda name: order.get(name, len(ROLES) + 1))
    states = {each["name"]: each for each in members}
    path: list[Wait] = []
    passed: set[str] = set()
    while True:
        passed.add(node)
        if node in stopped:
            return path
        ways = [wait for wait in waits if wait.waiter == node and wait.awaited not in passed]
        ways = [wait for wait in ways if not wait.is_spare or not path]
        if not ways:
            return path
        path.append(max(ways, key=lambda wait: _badness(wait.awaited, states)))
        node = path[-1].awaited


def _badness(name: str, states: Mapping[str, Mapping[str, Any]]) -> tuple[int, float]:
    member = states.get(name)
    if member is None:
        return (3 if name in ROLES else 1), 0.0
    return (0 if member.get("state") == "ready" else 2), float(member.get("age_s", 0.0))


def _leased(matched: re.Match[str], workers: _Members) -> Sequence[str]:
    """The holders of the leases of a batch; without any, all rollouts."""
    return re.findall(r"\d+ leased to (\S+?)(?:,|$)", matched.string) or _rollouts(matched, workers)


def _named(matched: re.Match[str], workers: _Members) -> Sequence[str]:
    return matched["names"].split(", ")


def _rollouts(matched: re.Match[str], workers: _Members) -> Sequence[str]:
    return workers.rollouts or ("rollout",)


def _policies(matched: re.Match[str], workers: _Members) -> Sequence[str]:
    return workers.mesh or workers.policies or ("policy",)


def _starting_policies(matched: re.Match[str], workers: _Members) -> Sequence[str]:
    return workers.starting or ("policy",)


def _weights(matched: re.Match[str], workers: _Members) -> Sequence[str]:
    return (WEIGHTS,)


_PATTERNS: Sequence[tuple[re.Pattern[str], Callable[[re.Match[str], _Members], Sequence[str]]]] = [
    (re.compile(pattern), awaited)
    for pattern, awaited in (
        (r"^the run waits for policy replicas", _starting_policies),
        (r"^the run waits for a rollback", _starting_policies),
        (r"^the run waits for (?P<names>\S+) to reconnect", _named),
        (r"^the run waits for \d+ groups to return", _rollouts),
        (r"^evaluating version \d+", _rollouts),
        (r"^(?P<waiter>\S+) waits for batch \d+", _leased),
        (r"^(?P<waiter>\S+) waits for the votes of (?P<names>.+) on step", _named),
        (r"^(?P<waiter>\S+) waits for the end of the evaluation of", _rollouts),
        (r"^(?P<waiter>\S+) waits for the end of step", _policies),
        (r"^(?P<waiter>\S+) waits for weights: no policy is ready", _starting_policies),
        (r"^(?P<waiter>\S+) waits for weights", _weights),
        (r"^(?P<waiter>\S+) waits for leases: it(?:s weights| holds weights)", _weights),
        (r"^(?P<waiter>\S+) waits for (?:leases|room)", _policies),
    )
]
"""Lines of `Controller.waits`, and whom they name."""
