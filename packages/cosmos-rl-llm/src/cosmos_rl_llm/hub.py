"""Lines of `cosmos-rl doctor` about the Hugging Face hub and its cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from cosmos_rl_core.doctor.report import Check
from cosmos_rl_core.storage.hub import silence


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
