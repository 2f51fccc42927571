"""The Hugging Face hub: whether it answers, asked once and for a few seconds, before libraries retry for a minute."""

from __future__ import annotations

import http.client
import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cosmos_rl_core.doctor.report import Check

ANSWER_S = 3.0
"""Maximum wait for an answer of the hub."""


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


def model_problem(name: str, revision: str | None) -> str:
    """Return the reason that a model of this id cannot be had; "" if it is in the cache or on the hub."""
    if cached_model(name, revision) is not None:
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


def cached_model(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def must_be_quiet() -> None:
    """Let the libraries of this process use the cache alone, without retries, if the hub does not answer."""
    if not silence():
        return
    from datasets import config
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"


def checks() -> Iterator[Check]:
    """Yield the lines of `cosmos-rl doctor`: whether the hub answers, and the cache."""
    from huggingface_hub import constants

    reason = silence()
    fix = "runs with local models and data need no hub; else set HTTPS_PROXY or HF_ENDPOINT"
    yield Check("note", "hub", reason, fix) if reason else Check("ok", "hub", f"{constants.ENDPOINT} answers")
    cache = Path(constants.HF_HUB_CACHE)
    if cache.is_dir():
        models = len([*cache.glob("models--*")])
        yield Check(
            "ok", "hub cache", f"{cache}: {models} models, {shutil.disk_usage(cache).free / 2**30:.1f} GiB free"
        )
    else:
        yield Check("ok", "hub cache", f"{cache} does not exist yet; HF_HOME chooses another place")


def _ask(address: str) -> None:
    """Raise OSError without an answer, HTTPError for a refusal. In a thread: a look-up of a name has no time limit."""
    answers: list[Exception | None] = []
    thread = threading.Thread(target=lambda: answers.append(_answer(address)), name="hub", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if not answers:
        raise TimeoutError("no answer")
    if answers[0] is not None:
        raise answers[0]


def _answer(address: str) -> Exception | None:
    from huggingface_hub import get_token

    request = urllib.request.Request(address)
    if token := get_token():
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S):
            return None
    except (OSError, http.client.HTTPException) as error:
        return error
