"""The opening of a connection: both sides prove they hold the run's token, which itself never travels.

    client                                                     server
    preamble: magic | version | nonce (38 bytes)  -------->
                                                  <--------    preamble, then Hello in the first sealed frame
    Hello in the first sealed frame               -------->

Each direction has its own key, HMAC-SHA256(token, direction | client's preamble | server's preamble). The
nonces are fresh, so a first frame whose tag is right proves that its sender holds the token now, and a
recorded conversation fits no other connection.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec

from cosmos_rl_core.errors import UserError

PROTOCOL_VERSION = 1
TOKEN_BYTES = 32
HANDSHAKE_BYTES = 4096
"""Most bytes a peer may send before it has proved that it holds the token."""
HANDSHAKE_S = 5.0

_MAGIC = b"CRLW"
_PREAMBLE = struct.Struct("!4sH32s")
PREAMBLE_BYTES = _PREAMBLE.size

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The name and role of a peer."""

    name: Name
    """Unique in the run: "rollout-3"."""
    role: Name
    """"controller", "policy", "rollout", "reward", ..."""
    incarnation: int = 0
    """Grows each time a process of this name starts, so that a late message of a dead one is known."""


class Violation(Exception):
    """A peer broke the protocol; its connection is closed at once."""


class WrongTag(Violation):
    """A frame that was not sealed with this connection's key and in this place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """The two keys of one connection, as one side sees them."""

    send: bytes
    """[32]"""
    receive: bytes
    """[32]"""


def make_preamble(*, version: int = PROTOCOL_VERSION) -> bytes:
    """Return this side's opening bytes with a fresh nonce."""
    return _PREAMBLE.pack(_MAGIC, version, secrets.token_bytes(32))


def session_keys(token: bytes, *, ours: bytes, theirs: bytes, client: bool) -> SessionKeys:
    """Derive both keys from the token and the two preambles.

    Raises `Violation` where the peer speaks something else, `UserError` where it speaks another version.
    """
    magic, version, _ = _PREAMBLE.unpack(theirs)
    our_version = _PREAMBLE.unpack(ours)[1]
    if magic != _MAGIC:
        raise Violation("the peer does not speak the Cosmos-RL protocol")
    if version != our_version:
        raise UserError(
            f"this process speaks protocol version {our_version}, the peer speaks version {version}: "
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
