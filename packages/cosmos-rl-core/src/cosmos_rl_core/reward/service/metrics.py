"""What a server counts, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(slots=True, kw_only=True)
class RewardCounters:
    """One reward's."""

    clock: Callable[[], float]
    requests: int = 0
    failures: int = 0
    batches: int = 0
    restarts: int = 0
    """Workers that died."""
    busy_s: float = 0.0
    """Time workers spent on scoring."""
    seconds: float = 0.0
    """Time requests took from the queue to their result, added up."""
    within: list[int] = field(default_factory=lambda: [0] * len(BUCKETS_S))
    """Requests that took at most as long as each of the buckets."""

    def settled(self, *, since: float, failed: bool) -> None:
        """Count a request that has its result."""
        taken = self.clock() - since
        self.requests += 1
        self.failures += failed
        self.seconds += taken
        for i, bound in enumerate(BUCKETS_S):
            self.within[i] += taken <= bound


def render(
    rewards: Mapping[str, RewardCounters],
    *,
    depths: Mapping[str, int],
    workers: Mapping[str, int],
    num_open: int,
    open_bytes: int,
    answers: Mapping[int, int],
) -> str:
    """Return the page. `answers` counts HTTP answers by status."""
    lines = [
        *_family("requests_open", "gauge", "Requests that are arriving or not done.", [("", num_open)]),
        *_family("open_bytes", "gauge", "Size of their bodies.", [("", open_bytes)]),
        *_family(
            "http_answers_total",
            "counter",
            "HTTP answers by status.",
            [(f'status="{status}"', count) for status, count in sorted(answers.items())],
        ),
        *_family("queue_depth", "gauge", "Requests that wait for a worker.", _each(depths)),
        *_family("workers", "gauge", "Workers that are up.", _each(workers)),
    ]
    columns: dict[str, tuple[str, dict[str, float]]] = {
        "requests_total": ("Requests with a result.", {name: one.requests for name, one in rewards.items()}),
        "failures_total": ("Those that failed.", {name: one.failures for name, one in rewards.items()}),
        "batches_total": ("Batches scored.", {name: one.batches for name, one in rewards.items()}),
        "worker_restarts_total": ("Workers that died.", {name: one.restarts for name, one in rewards.items()}),
        "busy_seconds_total": ("Time spent on scoring.", {name: one.busy_s for name, one in rewards.items()}),
    }
    for name, (text, values) in columns.items():
        lines += _family(name, "counter", text, _each(values))
    lines += _histogram(rewards)
    return "\n".join(lines) + "\n"


def _each(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(f'reward="{_escaped(name)}"', value) for name, value in values.items()]


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    full = f"cosmos_rl_reward_{name}"
    rows = [f"{full}{{{labels}}} {value}" if labels else f"{full} {value}" for labels, value in samples]
    return [f"# HELP {full} {text}", f"# TYPE {full} {kind}", *rows]


def _histogram(rewards: Mapping[str, RewardCounters]) -> list[str]:
    name = "cosmos_rl_reward_seconds"
    lines = [f"# HELP {name} Time from the queue to the result.", f"# TYPE {name} histogram"]
    for reward, one in rewards.items():
        label = f'reward="{_escaped(reward)}"'
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), (*one.within, one.requests), strict=True):
            lines.append(f'{name}_bucket{{{label},le="{bound}"}} {count}')
        lines += [f"{name}_sum{{{label}}} {one.seconds}", f"{name}_count{{{label}}} {one.requests}"]
    return lines


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
