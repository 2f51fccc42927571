"""The settings of a reward server: a TOML file, or flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from cosmos_rl_core.reward.service.messages import MAX_ITEMS
from cosmos_rl_core.settings.base import ConfigError, Strict
from cosmos_rl_core.settings.problems import in_file_order, known_tables, problems


class ServedReward(Strict):
    """[[rewards]]: one reward and the processes that compute it."""

    name: str = Field(min_length=1)
    """An installed reward, one of a domain ("wfm:brightness"), or "module:attribute"."""
    label: str = Field(default="", pattern=r"^[^.:\s]*$")
    """What clients call it; by default what follows the last colon of the name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""
    request_options: tuple[str, ...] = ()
    """Options that a request may set for itself; any other is refused."""
    workers: int = Field(default=1, ge=1)
    """Processes."""
    python: str | None = Field(default=None, min_length=1)
    """Interpreter they run under, of an environment that has cosmos-rl-core too; without it the server's own."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of these processes, such as CUDA_VISIBLE_DEVICES."""
    batch_size: int = Field(default=8, ge=1, le=MAX_ITEMS)
    """Most requests that a worker is given at once."""
    batch_wait_s: float = Field(default=0.0, ge=0)
    """How long a worker waits for a batch to fill once it has a first request."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest that a worker may take over a batch before it is killed."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Longest that a worker may take to build the reward."""
    max_failed_starts: int = Field(default=5, ge=1)
    """Times in a row that a worker in place of a dead one may fail to start, before the server goes on without it."""
    max_attempts: int = Field(default=3, ge=1)
    """Times a request is given to a worker that dies of it, or takes too long, before it has failed."""

    @property
    def called(self) -> str:
        """What clients call it."""
        return self.label or self.name.rpartition(":")[2]


class ServerSettings(Strict):
    """Everything about a server but its token."""

    rewards: Annotated[tuple[ServedReward, ...], Field(min_length=1)]
    """What it serves."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address it listens on; the default is reached from this machine alone."""
    port: int = Field(default=8300, ge=0, le=65535)
    """0 takes a free one, which is printed."""
    token_file: str = ""
    """Where the token lies, readable by its owner alone; made when it is not there. Variables come first."""
    queue_size: int = Field(default=256, ge=1)
    """Most requests that are not done; the next is answered 429."""
    queue_bytes: int = Field(default=8 * 2**30, ge=1)
    """Most bytes of bodies that are not done, likewise."""
    max_body_bytes: int = Field(default=4 * 2**30, ge=1)
    """Largest body; a larger one is answered 413."""
    upload_timeout_s: float = Field(default=300.0, gt=0)
    """Longest that a body may take to arrive."""
    ttl_s: float = Field(default=900.0, gt=0)
    """How long a result waits to be fetched."""
    fetched_ttl_s: float = Field(default=60.0, ge=0)
    """How long it is kept after it was fetched, for an answer that was lost on the way."""
    max_wait_s: float = Field(default=30.0, ge=0)
    """Longest that a fetch may wait for a result."""

    @field_validator("rewards")
    @classmethod
    def _distinct(cls, rewards: tuple[ServedReward, ...]) -> tuple[ServedReward, ...]:
        seen = [reward.called for reward in rewards]
        twice = sorted({name for name in seen if seen.count(name) > 1})
        if twice:
            raise ValueError(f"two are called {', '.join(twice)}; give one a label of its own")
        if dotted := [name for name in seen if "." in name]:
            raise ValueError(f"{dotted[0]} has a dot, which parts of a reward are told by; give it a label without one")
        return rewards


def load_settings(raw: Mapping[str, Any], *, file: str = "") -> ServerSettings:
    """Return the validated settings. Raises ConfigError with everything that is wrong with them."""
    try:
        return ServerSettings.model_validate(dict(raw))
    except ValidationError as error:
        found = problems(error, tables=known_tables(ServerSettings))
        raise ConfigError(in_file_order(found, raw), file=file) from error
