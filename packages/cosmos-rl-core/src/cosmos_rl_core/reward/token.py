"""The token of a reward service, from the environment or a file. It is never printed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.handshake import read_secret, write_secret

VARIABLES = ("WFM_REWARD_TOKEN", "REMOTE_REWARD_TOKEN")


def server_token(file: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the server's token; a missing file is created (mode 0600). Raises UserError without variable and file."""
    if token := _from_environment(environ):
        return checked_token(token, origin="the environment's")
    if not file:
        raise UserError(
            f"the reward server needs a token: set {VARIABLES[0]}, or token_file, which is created if it is missing"
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
    token = _from_environment(environ)
    if not token:
        raise UserError(f"the reward service needs a token: set {VARIABLES[0]}, or the option token_file")
    return checked_token(token, origin="the environment's")


def checked_token(token: str, *, origin: str) -> str:
    """Return a token that is valid in an HTTP header. Raises UserError, without the token in its message."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"{origin} token of the reward service must be one word of printable ASCII")
    return token


def _from_environment(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in VARIABLES if environ.get(name)), "")
