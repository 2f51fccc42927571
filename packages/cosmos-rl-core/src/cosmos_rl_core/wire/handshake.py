"""The run's token, 256 random bits in a file of mode 0600, and the opening of a connection that proves it.

Both sides prove that they have the token, which itself is never sent:

    client                                                     server
    preamble (38 bytes)                           -------->
                                                  <--------    preamble, then Hello in the first sealed frame
    Hello in the first sealed frame               -------->

    preamble = magic | version of the protocol | version of cosmos-rl-core, zero-padded (16 bytes) | nonce (16 bytes)

Each direction has its own key, HMAC-SHA256(token, direction | client's preamble | server's preamble). The
nonces are fresh: a first frame with the right tag proves that its sender has the token, and a recorded conversation is
invalid on any other connection.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import stat
import struct
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec

from cosmos_rl_core.errors import UserError

PROTOCOL_VERSION = 10
"""Raised with each change of a message or of the handshake: tests/test_protocol_version.py."""
TOKEN_BYTES = 32
TOKEN_VARIABLE = "COSMOS_RL_TOKEN"
"""Environment variable with a run's token, for machines that do not share its directory."""
HANDSHAKE_BYTES = 4096
"""Maximum bytes that a peer may send before it is authenticated."""
HANDSHAKE_S = 5.0

_MAGIC = b"CRLW"
_TLS_MAGIC = b"CRLT"
"""Begins the answer of a server that uses TLS to a client that does not."""
_TLS_RECORD = b"\x16\x03"
"""Beginning of a TLS client's first bytes: a handshake record (RFC 8446, section 5.1)."""
PLAIN_BYTE = _MAGIC[0]
"""First byte of a preamble, which begins no TLS record."""
_PREAMBLE = struct.Struct("!4sH16s16s")
_NAMED_SINCE = 2
"""Version of the protocol since which a preamble contains that of cosmos-rl-core."""
PREAMBLE_BYTES = _PREAMBLE.size

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The name and role of a peer."""

    name: Name
    """Unique in the run: "rollout-3"."""
    role: Name
    """"controller", "policy", "rollout", "reward", ..."""
    incarnation: int = 0
    """Rises with each process of this name, which identifies late messages of a dead one."""


class Violation(Exception):
    """A peer broke the protocol; its connection is closed at once."""


class WrongTag(Violation):
    """A frame that was not sealed with this connection's key and sequence number."""


class OtherVersion(UserError):
    """The peer has another version of the protocol."""


class TlsRefused(UserError):
    """TLS is used by one side alone, or a certificate is of another run or not valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """The two keys of one connection, from one side's view."""

    send: bytes
    """[32]"""
    receive: bytes
    """[32]"""


def make_preamble(*, version: int = PROTOCOL_VERSION) -> bytes:
    """Return this side's opening bytes with a fresh nonce."""
    return _PREAMBLE.pack(_MAGIC, version, _package_version(), secrets.token_bytes(16))


@cache
def _package_version() -> bytes:
    return metadata.version("cosmos-rl-core").encode("ascii", errors="replace")[:16]


def tls_notice() -> bytes:
    """Return the answer to a client without TLS: a preamble that it refuses with an explanation."""
    return _PREAMBLE.pack(_TLS_MAGIC, PROTOCOL_VERSION, b"", b"")


def session_keys(token: bytes, *, ours: bytes, theirs: bytes, client: bool) -> SessionKeys:
    """Derive both keys from the token and the two preambles.

    Raises `Violation` for another protocol, `UserError` for another version, `TlsRefused` if the peer uses TLS.
    """
    magic, version, *_ = _PREAMBLE.unpack(theirs)
    if magic == _TLS_MAGIC:
        raise TlsRefused(
            "the run uses TLS: give this process the content of tls.pem in the run's directory in the environment "
            "variable COSMOS_RL_TLS, or the file by --tls-file"
        )
    if magic.startswith(_TLS_RECORD):
        raise TlsRefused(
            "the peer uses TLS, and this run does not: start it without COSMOS_RL_TLS and --tls-file, or set "
            "[tls] enabled = true in the recipe"
        )
    if magic != _MAGIC:
        raise Violation("the peer does not use the Cosmos-RL protocol")
    if version != _PREAMBLE.unpack(ours)[1]:
        raise OtherVersion(
            f"this process has protocol version {_versions(ours)}, the peer has version {_versions(theirs)}: "
            "install the same cosmos-rl-core on both sides"
        )
    if hmac.compare_digest(ours, theirs):
        raise Violation("the peer sent our own opening back")
    transcript = ours + theirs if client else theirs + ours
    to_server = hmac.digest(token, b"cosmos-rl client to server|" + transcript, "sha256")
    to_client = hmac.digest(token, b"cosmos-rl server to client|" + transcript, "sha256")
    if client:
        return SessionKeys(send=to_server, receive=to_client)
    return SessionKeys(send=to_client, receive=to_server)


def _versions(preamble: bytes) -> str:
    """Return the versions in a preamble: "2 (cosmos-rl-core 0.1.0)"."""
    _, version, package, _ = _PREAMBLE.unpack(preamble)
    if version >= _NAMED_SINCE and (match := re.fullmatch(rb"([0-9A-Za-z.+!-]+)\0*", package)):
        return f"{version} (cosmos-rl-core {match[1].decode()})"
    return str(version)


_SECRET_FILE_BYTES = 16384
"""Maximum bytes read from a file."""


def make_token(path: Path) -> bytes:
    """Write the token of COSMOS_RL_TOKEN, or a new one, to `path` (mode 0600) and return it.

    Raises `UserError` if the file exists, or if the variable is malformed.
    """
    token = environment_token() or secrets.token_bytes(TOKEN_BYTES)
    try:
        write_secret(path, token.hex())
    except FileExistsError as error:
        raise UserError(f"{path} exists: read it with read_token, or remove it to make a new token") from error
    return token


def keep_secret(path: Path, text: str) -> None:
    """Write a secret again if its file was removed or changed. Raises OSError."""
    with contextlib.suppress(UserError):
        if read_secret(path) == text.strip():
            return
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    write_secret(partial, text.strip())
    partial.replace(path)


def read_token(path: Path) -> bytes:
    """Return the token in `path`. Raises `UserError` if it is missing, malformed or readable by others."""
    if (token := _parsed(read_secret(path))) is not None:
        return token
    raise UserError(f"{path} is not a token file: it should hold {2 * TOKEN_BYTES} hex digits")


def environment_token() -> bytes | None:
    """Return the token of the environment variable COSMOS_RL_TOKEN, or None. Raises `UserError` if it is malformed."""
    text = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not text:
        return None
    if (token := _parsed(text)) is not None:
        return token
    raise UserError(f"{TOKEN_VARIABLE} should be the content of a run's file `token`: {2 * TOKEN_BYTES} hex digits")


def _parsed(text: str) -> bytes | None:
    """Return the token written as hex digits, or None."""
    with contextlib.suppress(ValueError):
        if len(token := bytes.fromhex(text)) == TOKEN_BYTES:
            return token
    return None


def read_secret(path: Path, *, kind: str = "token") -> str:
    """Return the text in `path`. Raises `UserError`, with this kind of file, if it is missing or readable by others."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_SECRET_FILE_BYTES).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise UserError(f"cannot read the {kind} file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise UserError(f"others can read the {kind} file {path} (mode {mode:04o}): run chmod 600 {path}")
    return text


def write_secret(path: Path, text: str) -> None:
    """Write a new file that its owner alone can read. Raises OSError, FileExistsError where it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
