"""The metrics of a server, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from cosmos_rl_core.reward.pool.pool import PoolMetrics

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

Kind = TypeVar("Kind", Counter, Gauge)


class ServerMetrics:
    """Metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        disable_created_metrics()  # omits an unused line per counter
        self.registry = CollectorRegistry()
        self.answers = self.add(Counter, "http_answers", "HTTP answers by status.", ["status"])
        self.depths = self.add(Gauge, "queue_depth", "Requests that wait for a worker.")
        self.workers = self.add(Gauge, "workers", "Workers that are up.")
        self.requests = self.add(Counter, "requests", "Requests with a result.")
        self.failures = self.add(Counter, "failures", "Those that failed.")
        self.batches = self.add(Counter, "batches", "Batches scored.")
        self.restarts = self.add(Counter, "worker_restarts", "Workers that died.")
        self.busy = self.add(Counter, "busy_seconds", "Time spent on scoring.")
        self.seconds = Histogram(
            "cosmos_rl_reward_seconds",
            "Time from the queue to the result.",
            ["reward"],
            registry=self.registry,
            buckets=BUCKETS_S,
        )

    def add(self, kind: type[Kind], name: str, text: str, labels: Sequence[str] = ("reward",)) -> Kind:
        """Return a new metric."""
        return kind(name, text, labels, namespace="cosmos_rl_reward", registry=self.registry)

    def page(self) -> bytes:
        """Return the page in the text format."""
        return generate_latest(self.registry)


class RewardMetrics(PoolMetrics):
    """Metrics of one reward."""

    def __init__(self, metrics: ServerMetrics, name: str) -> None:
        self._batches = metrics.batches.labels(name)
        self._restarts = metrics.restarts.labels(name)
        self._busy = metrics.busy.labels(name)
        self._requests = metrics.requests.labels(name)
        self._failures = metrics.failures.labels(name)
        self._seconds = metrics.seconds.labels(name)

    def restarted(self) -> None:
        self._restarts.inc()

    def scored(self, *, seconds: float) -> None:
        self._busy.inc(seconds)
        self._batches.inc()

    def settled(self, *, since: float, failed: bool) -> None:
        self._requests.inc()
        self._failures.inc(failed)
        self._seconds.observe(time.monotonic() - since)
