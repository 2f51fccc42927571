"""Lines of `cosmos-rl doctor` about the Hugging Face hub and its cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.storage.hub import seconds_ahead, silence

APART_S = 5.0
"""Difference from the hub's clock that is reported."""


def checks() -> Iterator[Check]:
    """Yield the lines of `cosmos-rl doctor`: whether the hub answers, and the cache."""
    from huggingface_hub import constants

    reason = silence()
    fix = "runs with local models and data need no hub; else set HTTPS_PROXY or HF_ENDPOINT"
    yield Check("note", "hub", reason, fix) if reason else Check("ok", "hub", f"{constants.ENDPOINT} answers")
    if abs(ahead := seconds_ahead() or 0.0) > APART_S:
        shown = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the hub's"
        yield Check("note", "clock", shown, "ntpd or chronyd: certificates and timelines of several machines need it")
    cache = Path(constants.HF_HUB_CACHE)
    if cache.is_dir():
        models = len([*cache.glob("models--*")])
        yield Check(
            "ok", "hub cache", f"{cache}: {models} models, {shutil.disk_usage(cache).free / 2**30:.1f} GiB free"
        )
    else:
        yield Check("ok", "hub cache", f"{cache} does not exist yet; HF_HOME chooses another place")
