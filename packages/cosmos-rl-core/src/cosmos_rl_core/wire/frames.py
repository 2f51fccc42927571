"""Sealed frames: u32 length | 16-byte tag | msgpack body.

The tag is HMAC-SHA256 over u64 sequence | u32 length | body, cut to 128 bits. The sequence number counts
the frames of one direction and is not sent, so a replayed, reordered, changed or missing frame has a wrong
tag. Without a key the tag is 16 zeros and nothing is verified.

The sender computes the tag in place: sequence and length are 12 bytes, the tag is 16, and the tag is right
before the body, so its last 12 bytes hold them while the tag is computed. No body is copied for it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any

import msgspec

from cosmos_rl_core.wire.handshake import Violation, WrongTag

_HEADER = struct.Struct("!I16s")
_COUNTED = struct.Struct("!QI")
_COUNTED_AT = _HEADER.size - _COUNTED.size
HEADER_BYTES = _HEADER.size
MAX_FRAME_BYTES = 256 * 2**20
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are not a message; for text that is not UTF-8 it raises Python's own."""
_BLOCK_BYTES = 64
"""Of SHA-256."""
_LEAST_BUFFER_BYTES = 4 * 2**10
_BUFFER_BYTES = 64 * 2**10
"""Size up to which a buffer grows that is filled by one read: thousands of idle connections have small ones."""

_encode_into = msgspec.msgpack.Encoder().encode_into


class ConnectionClosed(Exception):
    """The connection has ended; the message is the reason."""


class _Tags:
    """HMAC-SHA256 (RFC 2104) of one key, as two copied hashes: half the time of the standard library's object."""

    def __init__(self, key: bytes) -> None:
        assert len(key) <= _BLOCK_BYTES, "a longer key is hashed first"
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def digest(self, *parts: bytes | bytearray | memoryview) -> bytes:
        """Return the 32 bytes over the parts, one after another."""
        inner, outer = self._inner.copy(), self._outer.copy()
        for part in parts:
            inner.update(part)
        outer.update(inner.digest())
        return outer.digest()


class FrameSealer:
    """Turns messages into frames, in order."""

    def __init__(self, key: bytes | None, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._tags = None if key is None else _Tags(key)
        self._max_frame_bytes = max_frame_bytes
        self._sequence = 0

    def seal(self, message: Any) -> bytearray:
        """Return the next frame. Raises ValueError for a message above the frame limit."""
        frame = bytearray(HEADER_BYTES)
        _encode_into(message, frame, HEADER_BYTES)
        length = len(frame) - HEADER_BYTES
        if length > self._max_frame_bytes:
            raise ValueError(
                f"a {type(message).__name__} of {length} bytes is above the frame limit of "
                f"{self._max_frame_bytes} bytes: send it in parts or raise max_frame_bytes on both sides"
            )
        if self._tags is None:
            _HEADER.pack_into(frame, 0, length, b"")
            return frame
        _COUNTED.pack_into(frame, _COUNTED_AT, self._sequence, length)
        tag = self._tags.digest(memoryview(frame)[_COUNTED_AT:])
        _HEADER.pack_into(frame, 0, length, tag)  # "16s" keeps the first 16 bytes
        self._sequence += 1
        return frame


class FrameOpener:
    """Verifies the frames of one direction, in order."""

    def __init__(self, key: bytes | None) -> None:
        self._tags = None if key is None else _Tags(key)
        self._sequence = 0

    def read_header(self, header: bytes | bytearray | memoryview, *, max_bytes: int) -> tuple[int, bytes]:
        """Return a body's length and tag. Raises `Violation` for a length above `max_bytes`."""
        length, tag = _HEADER.unpack_from(header)
        if length > max_bytes:
            raise Violation(f"a frame of {length} bytes is above the limit of {max_bytes} bytes")
        return length, tag

    def verify(self, tag: bytes, body: bytearray | memoryview) -> None:
        """Raise `WrongTag` unless `body` is the next one of the key's owner."""
        if self._tags is None:
            return
        expected = self._tags.digest(_COUNTED.pack(self._sequence, len(body)), body)
        if not hmac.compare_digest(tag, expected[: len(tag)]):
            raise WrongTag("a frame's tag is wrong: it was changed, replayed or sealed with another token")
        self._sequence += 1


class FrameReader:
    """Cuts received bytes into verified bodies; owns the buffer the socket writes into.

    socket -> `writable()` -> `received(n)` -> `next_body()` until it returns None
    """

    def __init__(self, *, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._opener: FrameOpener | None = None
        self._size = _LEAST_BUFFER_BYTES
        self._view = memoryview(bytearray(self._size))
        self._start = 0
        self._end = 0

    def use_key(self, key: bytes | None) -> None:
        """Verify all later frames with this key."""
        self._opener = FrameOpener(key)

    def writable(self) -> memoryview:
        """Return the free part of the buffer, never empty."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._view) < self._size:
                self._view = memoryview(bytearray(self._size))
        elif self._end == len(self._view):
            self._make_room(HEADER_BYTES)
        return self._view[self._end :]

    def received(self, num_bytes: int) -> None:
        """Count bytes that were written into the buffer."""
        self._end += num_bytes
        if self._end == len(self._view):
            self._size = min(2 * self._size, _BUFFER_BYTES)

    def take(self, num_bytes: int) -> bytes | None:
        """Return the next bytes as they are, or None while too few have come."""
        if self._end - self._start < num_bytes:
            return None
        self._start += num_bytes
        return bytes(self._view[self._start - num_bytes : self._start])

    def next_body(self) -> memoryview | bytes | None:
        """Return the next body, in memory that is not reused, or None while it is incomplete.

        Raises `Violation` for a frame above the limit (before memory is allocated) or with a wrong tag.
        """
        start = self._start
        available = self._end - start
        if available < HEADER_BYTES:
            return None
        assert self._opener is not None, "no frame is read before the keys are known"
        length, tag = self._opener.read_header(self._view[start:], max_bytes=self.max_frame_bytes)
        size = HEADER_BYTES + length
        if available < size:
            self._make_room(size)
            return None
        self._opener.verify(tag, self._view[start + HEADER_BYTES : start + size])
        self._start = start + size
        if len(self._view) == size > self._size:
            return self._detach(size)
        return bytes(self._view[start + HEADER_BYTES : self._start])

    def _make_room(self, size: int) -> None:
        """Make room for `size` bytes from `_start` on. A frame larger than the buffer gets memory of its own size."""
        if self._start + size <= len(self._view):
            return
        pending = self._view[self._start : self._end]
        fresh = memoryview(bytearray(max(size, self._size)))
        fresh[: len(pending)] = pending
        self._view, self._start, self._end = fresh, 0, len(pending)

    def _detach(self, size: int) -> memoryview:
        """Return a large frame's body with its memory, without a copy, and start a new buffer."""
        assert self._start == self._end == size == len(self._view)
        body = self._view[HEADER_BYTES:]
        self._view = memoryview(bytearray(self._size))
        self._start = self._end = 0
        return body
