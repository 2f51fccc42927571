"""The token of a reward service, from the environment or a file. It is never printed."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from cosmos_rl_core.errors import UserError

VARIABLES = ("WFM_REWARD_TOKEN", "REMOTE_REWARD_TOKEN")


def server_token(file: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the server's token; a file that is not there is made (mode 0600). Raises UserError without either."""
    if token := _from_environment(environ):
        return checked_token(token, origin="the environment's")
    if not file:
        raise UserError(
            f"the reward server needs a token: set {VARIABLES[0]}, or token_file, which is made when missing"
        )
    path = Path(file)
    if not path.exists():
        _make(path)
    return read_token_file(path)


def client_token(file: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the client's token: the file's where one is named, else the environment's. Raises UserError without."""
    if file:
        return read_token_file(Path(file))
    token = _from_environment(environ)
    if not token:
        raise UserError(f"the reward service wants a token: set {VARIABLES[0]}, or the option token_file")
    return checked_token(token, origin="the environment's")


def read_token_file(path: Path) -> str:
    """Return the token in a file. Raises UserError if it is missing, empty or readable by others."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the token file {path}: {error}") from error
    if mode & 0o077:
        raise UserError(f"others can read the token file {path} (mode {mode:04o}): run chmod 600 {path}")
    return checked_token(text, origin=f"{path}'s")


def checked_token(token: str, *, origin: str) -> str:
    """Return a token that can stand in an HTTP header. Raises UserError, which does not show it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"{origin} token of the reward service must be one word of printable ASCII")
    return token


def _from_environment(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in VARIABLES if environ.get(name)), "")


def _make(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UserError(f"cannot make the token file {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
