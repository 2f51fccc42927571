"""Retries with exponential backoff and jitter after transient errors, until a deadline."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection

import httpx

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SHOWN_CHARS = 500


class RewardServiceError(Exception):
    """The service refused the request, failed on it, or returned an invalid reply. A retry cannot succeed."""


class Retry:
    """The attempts of one request.

    retry.waiting_for = "http://... to accept the request"
    response = await retry.until_accepted(send, accept={200})
    raise retry.error(deadline_s)                                       # after the deadline
    """

    def __init__(self, *, rng: random.Random) -> None:
        self._rng = rng
        self._pauses = 0
        self._failures = 0
        self._trouble = ""
        self.waiting_for = ""

    async def until_accepted(
        self, send: Callable[[], Awaitable[httpx.Response]], *, accept: Collection[int]
    ) -> httpx.Response:
        """Return the first response with a status in `accept`.

        Retries after connection errors, 408, 429 and 5xx; raises RewardServiceError for any other response.
        """
        while True:
            retry_after_s = 0.0
            try:
                response = await send()
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

    def error(self, deadline_s: float) -> ConnectionError | TimeoutError:
        """Return the error of a request after its deadline."""
        waited = f"no scores within deadline_s = {deadline_s:g}; waited for {self.waiting_for}"
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
