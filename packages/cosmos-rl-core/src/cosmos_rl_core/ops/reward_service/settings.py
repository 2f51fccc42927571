"""The settings of a reward server: a TOML file, or flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from cosmos_rl_core.reward.pool.settings import ServedReward
from cosmos_rl_core.settings.base import ConfigError, Strict
from cosmos_rl_core.settings.problems import in_file_order, known_tables, problems


class ServerSettings(Strict):
    """Settings of a server, without its token."""

    rewards: Annotated[tuple[ServedReward, ...], Field(min_length=1)]
    """The served rewards."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; the default is reachable only from this machine."""
    port: int = Field(default=8300, ge=0, le=65535)
    """Port to listen on; 0 selects a free one and prints it."""
    token_file: str = ""
    """File with the token, readable only by its owner; created if it is missing. Environment variables take
    precedence."""
    queue_size: int = Field(default=256, ge=1)
    """Maximum number of unfinished requests; further ones get 429."""
    queue_bytes: int = Field(default=8 * 2**30, ge=1)
    """Maximum total bytes of unfinished bodies; further ones get 429."""
    max_body_bytes: int = Field(default=4 * 2**30, ge=1)
    """Maximum size of a body; a larger one gets 413."""
    upload_timeout_s: float = Field(default=300.0, gt=0)
    """Maximum seconds for receiving a body."""
    ttl_s: float = Field(default=900.0, gt=0)
    """Seconds that an unfetched result is stored."""
    fetched_ttl_s: float = Field(default=60.0, ge=0)
    """Seconds that a result is stored after the first fetch, in case the response was lost."""
    max_wait_s: float = Field(default=30.0, ge=0)
    """Maximum seconds that a fetch blocks for a result."""

    @field_validator("rewards")
    @classmethod
    def _distinct(cls, rewards: tuple[ServedReward, ...]) -> tuple[ServedReward, ...]:
        seen = [reward.called for reward in rewards]
        twice = sorted({name for name in seen if seen.count(name) > 1})
        if twice:
            raise ValueError(f"two rewards are named {', '.join(twice)}; give one a label")
        if dotted := [name for name in seen if "." in name]:
            raise ValueError(
                f"{dotted[0]} has a dot, which separates the parts of a reward; give it a label without one"
            )
        return rewards


def load_settings(raw: Mapping[str, Any], *, file: str = "") -> ServerSettings:
    """Return the validated settings. Raises ConfigError with every problem."""
    try:
        return ServerSettings.model_validate(dict(raw))
    except ValidationError as error:
        setting_problems = problems(error, tables=known_tables(ServerSettings))
        raise ConfigError(in_file_order(setting_problems, raw), file=file) from error
