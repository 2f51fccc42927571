"""Entry point of `cosmos-rl reward-server`, from its unvalidated settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.ops.reward_service.settings import load_settings
from cosmos_rl_core.reward.remote import server_token


def run_server(
    raw: Mapping[str, Any], *, file: str = "", say: Callable[[str], None], python_path: Sequence[str] = ()
) -> int:
    """Serve until a signal, and return the exit code.

    Raises UserError for invalid settings (with every problem), a missing token, a missing package, a reward that
    cannot be built, and an address in use.
    """
    settings = load_settings(raw, file=file)
    token = server_token(settings.token_file)
    try:
        from cosmos_rl_core.ops.reward_service.server import serve
    except ModuleNotFoundError as error:
        raise UserError(f"the reward server needs {error.name}: {pip_install('cosmos-rl-core[reward]')}") from error
    return asyncio.run(serve(settings, token=token, say=say, python_path=python_path))
