"""Client of a reward service: sends requests, polls for scores, retries. A failure never becomes a score."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import msgspec
import numpy as np

from cosmos_rl_core.reward.request import EncodedBody, Enqueued, Fetched, Header, encode_body
from cosmos_rl_core.wire.listening import is_loopback

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SHOWN_CHARS = 500


class RewardServiceError(Exception):
    """The service refused the request, failed on it, or returned an invalid reply. A retry cannot succeed."""


class Retry:
    """The attempts of one request until its deadline.

    retry = Retry(http, deadline_s=60, rng=rng)
    async with retry.deadline():                     # TimeoutError, or ConnectionError if the last attempt failed
        response = await retry.post(url, purpose="to answer", accept={200}, json=body)
    """

    def __init__(self, http: httpx.AsyncClient, *, deadline_s: float, rng: random.Random) -> None:
        self._http, self._deadline_s, self._rng = http, deadline_s, rng
        self._pauses = 0
        self._failures = 0
        self._trouble = ""
        self._waiting_for = ""

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Limit the attempts. The error after the deadline names what they waited for, and the last trouble."""
        limit = asyncio.timeout(self._deadline_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._error() from error

    async def post(self, url: str, *, purpose: str, accept: Collection[int], **sent: Any) -> httpx.Response:
        """Return the first response with a status in `accept`. sent: as of httpx, the same for all attempts.

        Retries after connection errors, 408, 429 and 5xx; raises RewardServiceError for any other response.
        """
        self._waiting_for = f"{url} {purpose}"
        while True:
            retry_after_s = 0.0
            try:
                response = await self._http.post(url, **sent)
            except httpx.LocalProtocolError:  # its message may contain a header with the token
                raise RewardServiceError("the request is not valid HTTP; check the service's URLs and token") from None
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                if response.status_code in accept:
                    self._failures, self._trouble = 0, ""
                    return response
                trouble = f"{response.status_code} {_shown(response)}"
                if response.status_code not in (408, 429) and response.status_code < 500:
                    raise RewardServiceError(f"{response.request.url} returned {trouble}")
                retry_after_s = _retry_after_s(response)
            await self.pause(trouble, at_least_s=retry_after_s)

    async def pause(self, trouble: str = "", *, at_least_s: float = 0.0) -> None:
        """Wait before the next attempt, twice as long each time, with jitter. No `trouble`: the service is slow."""
        self._failures += bool(trouble)
        self._trouble = trouble
        longest = min(_FIRST_PAUSE_S * 2 ** min(self._pauses, 10), _LONGEST_PAUSE_S)
        self._pauses += 1
        await asyncio.sleep(at_least_s + longest * self._rng.uniform(0.5, 1.0))

    def reset(self) -> None:
        """Start again with short pauses: the service is working."""
        self._pauses = 0

    def _error(self) -> ConnectionError | TimeoutError:
        waited = f"no scores within deadline_s = {self._deadline_s:g}; waited for {self._waiting_for}"
        if not self._trouble:
            return TimeoutError(waited)
        times = "an attempt" if self._failures == 1 else f"{self._failures} attempts"
        return ConnectionError(f"{waited}; {times} failed, the last with: {self._trouble}")


def _shown(response: httpx.Response) -> str:
    text = response.text.strip()
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _retry_after_s(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), _LONGEST_PAUSE_S) if text.isdecimal() else 0.0


Reply = TypeVar("Reply", Enqueued, Fetched)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """URLs and token of a service."""

    enqueue_url: str
    fetch_url: str
    token: str = field(repr=False)

    @property
    def is_loopback(self) -> bool:
        """Whether the service is on this machine."""
        return all(is_loopback(urlsplit(url).hostname or "") for url in (self.enqueue_url, self.fetch_url))

    @property
    def is_secure(self) -> bool:
        """Whether the connection uses TLS."""
        return any(url.startswith("https://") for url in (self.enqueue_url, self.fetch_url))


class RewardClient:
    """Sends requests to one service; many may be in flight at the same time.

    async with RewardClient(address, deadline_s=60) as client:
        scores = await client.score(header, {"video": [clip, clip]})        # {"brightness": [0.1, 0.7]}
    """

    def __init__(
        self, address: ServiceAddress, *, deadline_s: float, wait_s: float = 10.0, rng: random.Random | None = None
    ) -> None:
        """`wait_s`: how long a fetch may block at the service; `rng`: for the jitter of retries."""
        self._address = address
        self._deadline_s = deadline_s
        self._wait_s = min(wait_s, deadline_s)
        self._rng = rng or random.Random()
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {address.token}"},
            timeout=httpx.Timeout(60.0, connect=10.0, read=self._wait_s + 30.0),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=30.0),
            verify=address.is_secure,  # loading certificates is slow
            follow_redirects=False,  # the token is valid for this address only
            trust_env=not address.is_loopback,  # a proxy cannot reach this machine's ports
        )

    async def __aenter__(self) -> RewardClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def score(self, header: Header, arrays: Mapping[str, Sequence[np.ndarray]]) -> dict[str, list[float]]:
        """Return the scores of a request by name, each [B]; `arrays` has one array per sample under each name.

        A reward in parts gives one list per part, as "reward.part". Raises ValueError for a request that cannot be
        encoded; RewardServiceError if the service refuses it, fails on it or returns invalid scores; TimeoutError if it
        is not done after `deadline_s`, or ConnectionError if the last attempt failed with an error. The request is sent
        again to a service that restarted meanwhile; its id prevents a second scoring by the same service.
        """
        header = header if header.id else msgspec.structs.replace(header, id=uuid4().hex)
        body = encode_body(header, arrays)
        retry = Retry(self._http, deadline_s=self._deadline_s, rng=self._rng)
        async with retry.deadline():
            while True:
                uuid = await self._enqueue(header, body, retry)
                reply = await self._fetch(uuid, header, retry)
                if reply is not None:
                    return _checked(reply, header)
                await retry.pause("the service no longer has the request")

    async def _enqueue(self, header: Header, body: EncodedBody, retry: Retry) -> str:
        headers = {"Content-Length": str(body.num_bytes), "Content-Type": "application/octet-stream"}
        response = await retry.post(
            self._address.enqueue_url, purpose="to accept the request", accept={200}, content=body, headers=headers
        )
        enqueued = _decoded(response, Enqueued)
        _check_id(enqueued.id, header)
        return enqueued.uuid

    async def _fetch(self, uuid: str, header: Header, retry: Retry) -> Fetched | None:
        """Return the final reply, or None if the service no longer has the request."""
        fetch = {"uuid": uuid, "wait_s": self._wait_s}
        while True:
            start = time.monotonic()
            response = await retry.post(
                self._address.fetch_url, purpose=f"to score request {uuid}", accept={200, 202, 404}, json=fetch
            )
            if response.status_code == httpx.codes.NOT_FOUND:
                return None
            reply = _decoded(response, Fetched)
            if reply.uuid != uuid:
                raise RewardServiceError(f"fetched request {uuid}, the service returned {reply.uuid}")
            _check_id(reply.id, header)
            if reply.status != "pending":
                return reply
            if time.monotonic() - start > self._wait_s / 2:
                retry.reset()
            else:  # the service does not block fetches, so wait here
                await retry.pause()


def _decoded(response: httpx.Response, kind: type[Reply]) -> Reply:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RewardServiceError(f"{response.request.url} returned an invalid reply: {error}") from error


def _check_id(returned: str, header: Header) -> None:
    if returned != header.id:
        raise RewardServiceError(f"sent request id {header.id}, the service returned {returned!r}")


def _checked(reply: Fetched, header: Header) -> dict[str, list[float]]:
    """Return the scores after a check of names and lengths. They are finite: JSON has no NaN and no infinity."""
    if reply.status == "failed":
        raise RewardServiceError(reply.error or "the service failed without a reason")
    requested = {reward.name for reward in header.rewards}
    scored = {name.partition(".")[0] for name in reply.scores}
    if scored != requested:
        raise RewardServiceError(f"requested {_listed(requested)}, the service scored {_listed(scored)}")
    for name, values in reply.scores.items():
        if len(values) != header.size:
            raise RewardServiceError(f"{name}: the service returned {len(values)} scores for {header.size} samples")
    return reply.scores


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
