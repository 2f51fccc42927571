"""The Hugging Face hub: whether it answers, asked once and for a few seconds, before libraries retry for a minute.

For domains that require `huggingface_hub`, which is imported by the functions.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import wait
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from cosmos_rl_core.processes import in_daemon_thread

ANSWER_S = 3.0
"""Maximum wait for an answer of the hub."""
CONFIG = ("config.json",)


@cache
def silence() -> str:
    """Return the reason that the hub cannot be asked; "" if it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        _ask(constants.ENDPOINT)
    except urllib.error.HTTPError:
        return ""  # an answer
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"the hub {constants.ENDPOINT} does not answer ({reason}); HF_HUB_OFFLINE=1 uses the cache alone"
    return ""


def model_problem(name: str, revision: str | None, *, files: Sequence[str] = CONFIG) -> str:
    """Return the reason that a model of this id cannot be had; "" if it is in the cache or on the hub.

    files: one of them is in every such model.
    """
    if cached_model(name, revision, files=files) is not None:
        return ""
    if reason := silence():
        return f"is no folder here and not in the cache, and {reason}"
    from huggingface_hub import constants

    try:
        _ask(f"{constants.ENDPOINT}/api/models/{name}" + (f"/revision/{revision}" if revision else ""))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            return f"is no folder here, and {constants.ENDPOINT} has no such model that this machine may read"
    except (OSError, http.client.HTTPException) as error:
        return f"is no folder here and not in the cache, and the hub does not answer ({error})"
    return ""


def cached_model(name: str, revision: str | None, *, files: Sequence[str] = CONFIG) -> Path | None:
    """Return the folder of a model in the hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = [try_to_load_from_cache(name, file, revision=revision) for file in files]
    except HFValidationError:
        return None
    return next((Path(file).parent for file in cached if isinstance(file, str)), None)


def must_be_quiet() -> None:
    """Let the libraries of this process use the cache alone, without retries, if the hub does not answer."""
    if not silence():
        return
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    if find_spec("datasets"):
        from datasets import config

        config.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"


def seconds_ahead() -> float | None:
    """Return by how many seconds this machine's clock is ahead of the hub's, negative if behind, at the least.

    The hub writes whole seconds, and its answer takes some time: 0 where these explain the difference. None without an
    answer, or for one without a date.
    """
    from huggingface_hub import constants

    if silence():
        return None
    before = time.time()
    try:
        headers = _ask(constants.ENDPOINT)
    except urllib.error.HTTPError as error:
        headers = error.headers
    except (OSError, http.client.HTTPException):
        return None
    after = time.time()
    try:
        date = parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except ValueError:
        return None
    return max(0.0, before - date - 1) + min(0.0, after - date)


def _ask(address: str) -> Message:
    """Return the headers of the answer. Raises OSError without one, HTTPError for a refusal.

    In a thread: a look-up of a name has no time limit.
    """
    answer = in_daemon_thread(partial(_answer, address), name="hub")
    wait([answer], timeout=ANSWER_S)
    if not answer.done():
        raise TimeoutError("no answer")
    return answer.result()


def _answer(address: str) -> Message:
    from huggingface_hub import get_token

    request = urllib.request.Request(address)
    if token := get_token():
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.headers
    except urllib.error.HTTPError as error:
        error.close()
        raise
