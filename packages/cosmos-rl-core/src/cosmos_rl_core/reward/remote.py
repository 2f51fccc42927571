"""A reward computed by a service, and the tokens of services. Rewards of the same service share one request per group.

[[reward.functions]]
name = "cosmos_rl_core.reward.remote:RemoteReward"
options = { reward = "brightness", url = "http://127.0.0.1:8300", token_file = "reward.token" }

Tokens come from the environment or a file, and are never printed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import WeakValueDictionary

import numpy as np
from pydantic import Field, PrivateAttr, SecretStr, model_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.reward.request import NUM_FRAMES, GroupSpec, Header, RewardSpec
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.handshake import read_secret, write_secret

if TYPE_CHECKING:
    from cosmos_rl_core.reward.client import ServiceAddress

_ENQUEUE_VARIABLES = ("WFM_REWARD_ENQUEUE_URL", "REMOTE_REWARD_ENQUEUE_URL")
_FETCH_VARIABLES = ("WFM_REWARD_FETCH_URL", "REMOTE_REWARD_FETCH_URL")


class RemoteReward(Strict):
    """Scores of a reward service, one per rollout: `await reward(group)`. A failure raises."""

    reward: str | dict[str, float]
    """Name at the service: "brightness", or "videoalign.vq" for one part; or several with weights, for their weighted
    sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward for these requests, if the service allows them."""
    url: str = ""
    """Address of the service: "http://127.0.0.1:8300"; sets the two URLs below."""
    enqueue_url: str = ""
    """URL for requests; default: WFM_REWARD_ENQUEUE_URL, or REMOTE_REWARD_ENQUEUE_URL."""
    fetch_url: str = ""
    """URL for results; default: WFM_REWARD_FETCH_URL, or REMOTE_REWARD_FETCH_URL."""
    token: SecretStr = SecretStr("")
    """The service's token. As a recipe is written into the run's directory, prefer token_file or WFM_REWARD_TOKEN."""
    token_file: str = ""
    """File with the token, readable only by its owner."""
    media: Literal["video", "image", "latent", "none"] = "video"
    """Kind of `Rollout.media` to send; "none": only texts."""
    beside: tuple[str, ...] = ()
    """Further media to send, such as ["success"]; of one shape in all rollouts of a group."""
    columns: tuple[str, ...] | None = None
    """Columns of the prompt's row to send. Not set: all."""
    deadline_s: float = Field(default=50.0, gt=0)
    """Maximum wait for scores, including retries. [reward] timeout_s should be longer."""

    _requests: GroupRequests = PrivateAttr()

    @model_validator(mode="after")
    def _share(self) -> Self:
        if not self.weights:
            raise ValueError("reward is empty")
        self._requests = GroupRequests.shared(self)
        return self

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights by name."""
        return {self.reward: 1.0} if isinstance(self.reward, str) else self.reward

    def address(self) -> ServiceAddress:
        """Return the service's address from options and environment. Raises UserError if neither has it."""
        from cosmos_rl_core.reward.client import ServiceAddress

        base = self.url.rstrip("/")
        enqueue_url = self.enqueue_url or (base and f"{base}/api/reward/enqueue") or _first(_ENQUEUE_VARIABLES)
        fetch_url = self.fetch_url or (base and f"{base}/api/reward/fetch") or _first(_FETCH_VARIABLES)
        for url, option, variable in (
            (enqueue_url, "enqueue_url", _ENQUEUE_VARIABLES[0]),
            (fetch_url, "fetch_url", _FETCH_VARIABLES[0]),
        ):
            if not url.startswith(("http://", "https://")):
                raise UserError(
                    f"the reward service's {option} is {url!r}: give the option url, such as "
                    f'"http://127.0.0.1:8300", or set {variable}'
                )
        secret = self.token.get_secret_value()
        token = checked_token(secret, origin="the option") if secret else client_token(self.token_file)
        return ServiceAddress(enqueue_url=enqueue_url, fetch_url=fetch_url, token=token)

    async def __call__(self, group: RolloutGroup) -> list[float]:
        """Return the weighted scores [G]. Raises like `RewardClient.score`."""
        scores = await self._requests.scores(self, group)
        missing = [name for name in self.weights if name not in scores]
        if missing:
            raise ValueError(f"the service returned no scores for {', '.join(missing)}, but for {', '.join(scores)}")
        columns = [(weight, scores[name]) for name, weight in self.weights.items()]
        return [sum(weight * values[i] for weight, values in columns) for i in range(len(group.rollouts))]


@dataclass(eq=False, slots=True)
class _Flight:
    """A request in flight."""

    group: RolloutGroup
    """Kept alive, so that its id() stays unique."""
    task: asyncio.Task[dict[str, list[float]]]
    num_waiting: int = 0


@dataclass(eq=False)
class GroupRequests:
    """Shared requests of all rewards with the same settings, one per group.

    The rewards of a rubric score a group at the same time; the first one sends a request for all of them, and the
    others wait for its scores.
    """

    rewards: dict[str, RewardSpec] = field(default_factory=dict)
    """Requested rewards by their names at the service, without parts."""
    _flights: dict[int, _Flight] = field(default_factory=dict)

    @staticmethod
    def shared(reward: RemoteReward) -> GroupRequests:
        """Return the requests shared by the reward's settings, and add the reward to them."""
        settings = reward.model_dump_json(exclude={"reward", "token"}) + reward.token.get_secret_value()
        requests = _SHARED.get(settings)
        if requests is None:
            requests = _SHARED[settings] = GroupRequests()
        for name in reward.weights:
            served = name.partition(".")[0]
            requests.rewards[served] = RewardSpec(served, options=dict(reward.options))
        return requests

    async def scores(self, reward: RemoteReward, group: RolloutGroup) -> dict[str, list[float]]:
        """Return the scores of a group for all shared rewards."""
        flight = self._flights.get(id(group))
        if flight is None:
            task = asyncio.create_task(_request(reward, group, list(self.rewards.values())))
            flight = self._flights[id(group)] = _Flight(group, task)
            task.add_done_callback(lambda _: self._flights.pop(id(group)))
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting and not flight.task.done():  # no reward waits any more
                flight.task.cancel()


_SHARED: WeakValueDictionary[str, GroupRequests] = WeakValueDictionary()
"""Shared requests by settings, while a reward with them is alive."""


async def _request(reward: RemoteReward, group: RolloutGroup, rewards: list[RewardSpec]) -> dict[str, list[float]]:
    try:
        from cosmos_rl_core.reward.client import RewardClient
    except ModuleNotFoundError as error:
        raise UserError(f"a remote reward needs {error.name}: {pip_install('cosmos-rl-core[reward]')}") from error

    header = _header(reward, group, rewards)
    kinds = [kind for kind in (reward.media, *reward.beside) if kind != "none"]
    arrays = {kind: [_media(kind, rollout.media, group) for rollout in group.rollouts] for kind in kinds}
    if reward.media == "video":
        arrays |= _of_one_length(arrays["video"])
    async with RewardClient(reward.address(), deadline_s=reward.deadline_s) as client:
        return await client.score(header, arrays)


def _header(reward: RemoteReward, group: RolloutGroup, rewards: list[RewardSpec]) -> Header:
    row = dict(group.prompt.row)
    if reward.columns is not None:
        absent = [name for name in reward.columns if name not in row]
        if absent:
            raise ValueError(f"the row has no column {', '.join(absent)}; it has {', '.join(row)}")
        row = {name: row[name] for name in reward.columns}
    texts = [rollout.text for rollout in group.rollouts]
    spec = GroupSpec(
        size=len(group.rollouts), row=row, prompt_text=group.prompt_text, texts=texts if any(texts) else []
    )
    return Header(groups=[spec], rewards=rewards, media=reward.media, client=f"{socket.gethostname()}:{os.getpid()}")


def _media(kind: str, media: Mapping[str, Any], group: RolloutGroup) -> Any:
    if kind not in media:
        names = ", ".join(media) or "none"
        raise ValueError(f"rollouts of {group.prompt.origin or group.prompt.sample_id} have no media {kind!r}: {names}")
    return media[kind]


def _of_one_length(videos: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Return videos [F, H, W, 3] padded to the longest by repeating their last frame, and each one's frame count."""
    lengths = [len(video) for video in videos]
    longest = max(lengths)
    if min(lengths) == longest:
        return {"video": list(videos)}
    padded = [np.concatenate([video, np.repeat(video[-1:], longest - len(video), axis=0)]) for video in videos]
    return {"video": padded, NUM_FRAMES: [np.array(length, np.int32) for length in lengths]}


def _first(variables: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> str:
    """Return the value of the first variable that is set; empty if none is."""
    return next((environ[name] for name in variables if environ.get(name)), "")


TOKEN_VARIABLES = ("WFM_REWARD_TOKEN", "REMOTE_REWARD_TOKEN")
"""Environment variables with the token; rewards of a server do not get them."""


def server_token(file: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the server's token; a missing file is created (mode 0600). Raises UserError without variable and file."""
    if token := _first(TOKEN_VARIABLES, environ):
        return checked_token(token, origin="the environment's")
    if not file:
        raise UserError(
            f"the reward server needs a token: set {TOKEN_VARIABLES[0]}, or token_file, which is created if it is "
            "missing"
        )
    path = Path(file)
    if not path.exists():
        try:
            write_secret(path, secrets.token_hex(32))
        except OSError as error:
            raise UserError(f"cannot create the token file {path}: {error.strerror}") from error
    return checked_token(read_secret(path), origin=f"{path}'s")


def client_token(file: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the client's token from the named file, or from the environment. Raises UserError without either."""
    if file:
        return checked_token(read_secret(Path(file)), origin=f"{file}'s")
    token = _first(TOKEN_VARIABLES, environ)
    if not token:
        raise UserError(f"the reward service needs a token: set {TOKEN_VARIABLES[0]}, or the option token_file")
    return checked_token(token, origin="the environment's")


def checked_token(token: str, *, origin: str) -> str:
    """Return a token that is valid in an HTTP header. Raises UserError, without the token in its message."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"{origin} token of the reward service must be one word of printable ASCII")
    return token
