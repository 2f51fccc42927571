"""The settings of one reward's worker processes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cosmos_rl_core.connected_process import MAX_DESCRIPTORS
from cosmos_rl_core.settings.base import Strict


class ServedReward(Strict):
    """[[rewards]]: one reward and its worker processes."""

    name: str = Field(min_length=1)
    """An installed reward, one of a domain ("wfm:brightness"), or "module:attribute"."""
    label: str = Field(default="", pattern=r"^[^.:\s]*$")
    """Name for clients; default: the part of `name` after the last colon."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward."""
    request_options: tuple[str, ...] = ()
    """Options that a request may set; others are refused."""
    workers: int = Field(default=1, ge=1)
    """Number of worker processes."""
    python: str | None = Field(default=None, min_length=1)
    """Python interpreter of the workers, with cosmos-rl-core installed; default: the server's."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the workers, such as CUDA_VISIBLE_DEVICES."""
    batch_size: int = Field(default=8, ge=1, le=MAX_DESCRIPTORS)
    """Maximum requests in one batch of a worker."""
    batch_wait_s: float = Field(default=0.0, ge=0)
    """Seconds a worker waits for a full batch after the first request."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Maximum seconds for a batch; then the worker is killed."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Maximum seconds for building the reward."""
    max_failed_starts: int = Field(default=5, ge=1)
    """Consecutive failed starts of a dead worker's replacement, after which the server continues without it."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts of a request whose worker dies or times out, before the request fails."""

    @property
    def called(self) -> str:
        """Name for clients."""
        return self.label or self.name.rpartition(":")[2]
