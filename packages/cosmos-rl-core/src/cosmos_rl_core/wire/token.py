"""The run's token: 256 random bits in a file only its owner can read."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.handshake import TOKEN_BYTES

_MAX_BYTES = 4096
"""Bytes that are read of a file."""


def make_token(path: Path) -> bytes:
    """Write a new token to `path` (mode 0600) and return it. Raises `UserError` if the file exists."""
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        write_secret(path, token.hex())
    except FileExistsError as error:
        raise UserError(f"{path} exists: read it with read_token, or remove it to make a new token") from error
    return token


def keep_token(path: Path, token: bytes) -> None:
    """Write the token again where its file was removed or changed. Raises OSError where that cannot be done."""
    with contextlib.suppress(UserError):
        if read_token(path) == token:
            return
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    write_secret(partial, token.hex())
    partial.replace(path)


def read_token(path: Path) -> bytes:
    """Return the token in `path`. Raises `UserError` if it is missing, malformed or readable by others."""
    text = read_secret(path)
    with contextlib.suppress(ValueError):
        if len(token := bytes.fromhex(text)) == TOKEN_BYTES:
            return token
    raise UserError(f"{path} is not a token file: it should hold {2 * TOKEN_BYTES} hex digits")


def read_secret(path: Path) -> str:
    """Return the text in `path`. Raises `UserError` if it is missing or readable by others."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_MAX_BYTES).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise UserError(f"cannot read the token file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise UserError(f"others can read the token file {path} (mode {mode:04o}): run chmod 600 {path}")
    return text


def write_secret(path: Path, text: str) -> None:
    """Write a new file that its owner alone can read. Raises OSError, FileExistsError where it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
