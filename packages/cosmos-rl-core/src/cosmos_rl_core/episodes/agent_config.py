"""[agent]: programs of their own that ask the model through an endpoint."""

from __future__ import annotations

from pydantic import Field

from cosmos_rl_core.settings.base import Strict


class AgentSection(Strict):
    """[agent]: rollouts are played by a program that asks the model through an OpenAI-compatible endpoint."""

    command: tuple[str, ...] = ()
    """Started once for each rollout, such as ["python", "my_agent.py"], with OPENAI_BASE_URL, OPENAI_API_KEY and the
    row in its environment. Not set: agents that run elsewhere ask for rows with POST /rollouts."""
    max_episodes: int = Field(default=64, ge=1)
    """Maximum number of concurrent rollouts of a replica, and so of processes of `command`."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Maximum time from the start of a rollout to its end; then it is given up and tried again."""
    retries: int = Field(default=1, ge=0)
    """Further tries of a rollout whose agent failed, before its prompt is given back."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the endpoint on the address of [run] bind. 0: any free one, which the run prints."""
