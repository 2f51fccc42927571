"""Pictures and videos fetched from URLs with http: and https:.

    request -> redirects, to allowed schemes alone -> body, read piece by piece until its end, its limit or the deadline

A server that is busy or does not answer is asked again within the same time. Afterwards the error is one that a later
try may mend; any other answer than the content is final.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from http.client import HTTPException, InvalidURL
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from cosmos_rl_core.errors import MediaError

FETCH_S = 60.0
"""Time for the content of a URL, tries and redirects included."""
ANSWER_S = 20.0
"""Time for each piece of an answer to arrive."""
TRIES = 3
PIECE_BYTES = 2**16
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Status of answers that may be others a moment later."""
HEADERS = {"User-Agent": "cosmos-rl", "Accept": "image/*, video/*, */*;q=0.5"}


def fetch(
    url: str, *, max_bytes: int, schemes: Collection[str], within_s: float = FETCH_S, pause_s: float = 1.0
) -> bytes:
    """Return the content of a URL, or its first `max_bytes` + 1 bytes.

    schemes: those that the URL, which has one of them, may lead to. pause_s: before the second try; later ones double.

    Raises MediaError; one that is not final if the server was busy or silent.
    """
    deadline = time.monotonic() + within_s
    opener = build_opener(_Redirects(schemes))
    for number in range(1, TRIES + 1):
        try:
            return _read(opener, _quoted(url), max_bytes=max_bytes, deadline=deadline)
        except HTTPError as error:
            error.close()
            failure, final = f"{error.code} {error.reason}", error.code not in BUSY
        except URLError as error:
            failure, final = str(error.reason), False
        except (OSError, HTTPException) as error:
            failure, final = str(error) or type(error).__name__, isinstance(error, InvalidURL)
        if final or number == TRIES or time.monotonic() + pause_s > deadline:
            raise MediaError(f"{url}: {failure}", final=final)
        time.sleep(pause_s)  # gives a busy server time
        pause_s *= 2
    raise AssertionError("the last try returns or raises")


def _read(opener: OpenerDirector, url: str, *, max_bytes: int, deadline: float) -> bytes:
    content = bytearray()
    request = Request(url, headers=HEADERS)
    with opener.open(request, timeout=_left(deadline)) as answer:
        while len(content) <= max_bytes and (piece := answer.read1(min(PIECE_BYTES, max_bytes + 1 - len(content)))):
            content += piece
            _left(deadline)
        length = answer.headers.get("Content-Length")
    if len(content) <= max_bytes and length is not None and length.isdigit() and len(content) < int(length):
        raise ConnectionError(f"the answer ended after {len(content):,} of {int(length):,} bytes")
    return bytes(content)


def _left(deadline: float) -> float:
    """Seconds for the next piece. Raises TimeoutError after the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the answer was not complete in time")
    return min(ANSWER_S, left)


def _quoted(url: str) -> str:
    """The URL with characters that may not stand in one escaped, and its host as the name service knows it."""
    parts = urlsplit(url.strip())
    host, port = parts.hostname, parts.port
    if not host:
        raise MediaError(f"{url}: a URL without a host")
    netloc = parts.netloc
    if not netloc.isascii():
        name = host.encode("idna").decode()
        netloc = name if port is None else f"{name}:{port}"
    path, query = (quote(part, safe="/%:=&?~+!$,;'@()*[]") for part in (parts.path, parts.query))
    return parts._replace(netloc=netloc, path=path, query=query, fragment="").geturl()


class _Redirects(HTTPRedirectHandler):
    def __init__(self, schemes: Collection[str]) -> None:
        self._schemes = schemes

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        scheme = urlsplit(newurl).scheme
        if scheme not in self._schemes or scheme not in ("http", "https"):
            fp.close()
            raise MediaError(f"{req.full_url} leads to {newurl}, and {scheme}: is not allowed (data.media.schemes)")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
