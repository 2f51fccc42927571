"""One authenticated connection: a stream of messages each way.

bytes -> FrameReader -> verified body -> message -> `receive()`; `send()` -> FrameSealer -> socket.

A slow consumer stops the reading of its socket, which fills the sender's write buffer, which makes the
sender's `send()` wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.frames import MAX_FRAME_BYTES, UNDECODABLE, ConnectionClosed, FrameReader, FrameSealer
from cosmos_rl_core.wire.handshake import (
    HANDSHAKE_BYTES,
    HANDSHAKE_S,
    PREAMBLE_BYTES,
    Hello,
    Violation,
    make_preamble,
    session_keys,
)

_WRITE_HIGH_BYTES = 2**20
_INBOX_HIGH_BYTES = 8 * 2**20
_MESSAGE_COST_BYTES = 1024  # minimum cost of a message in the inbox

_hello_decoder = msgspec.msgpack.Decoder(Hello)


class Connection:
    """The connection to an authenticated peer, or to a parent or child process. Made by `channel`."""

    peer: Hello
    """The peer's name and role."""
    closed: asyncio.Event
    """Set once the connection has ended."""
    reason: str
    """The reason of its end; empty while it is open."""
    protocol: WireProtocol
    """Its callbacks for the event loop."""

    def __init__(self, protocol: WireProtocol, *, peer: Hello) -> None:
        self.peer = peer
        self.closed = asyncio.Event()
        self.reason = ""
        self.protocol = protocol
        self._inbox: deque[tuple[Any, int]] = deque()
        self._inbox_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._handle: Callable[[Any], None] | None = None

    def post(self, message: Any) -> None:
        """Send without waiting. Raises `ConnectionClosed`, also if the peer does not read."""
        if self.closed.is_set():
            raise ConnectionClosed(self.reason)
        self.protocol.write(message)

    async def send(self, message: Any) -> None:
        """Send, and wait while the send buffer is full. Raises `ConnectionClosed`."""
        self.post(message)
        if not self.protocol.writable.is_set():
            await self.protocol.writable.wait()
        if self.closed.is_set():
            raise ConnectionClosed(self.reason)

    async def receive(self) -> Any:
        """Return the next message, also one received before the end. Raises `ConnectionClosed`."""
        while not self._inbox:
            if self.closed.is_set():
                raise ConnectionClosed(self.reason)
            assert self._reader is None, "one task receives from a connection"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message, cost = self._inbox.popleft()
        self._inbox_bytes -= cost
        if self._inbox_bytes <= _INBOX_HIGH_BYTES // 2:
            self.protocol.resume_reading()
        return message

    async def consume(self, handle: Callable[[Any], None]) -> None:
        """Call `handle` with each message as it arrives. Raises `ConnectionClosed` at the end, and errors of `handle`.

        Cheaper than `receive` in a loop for thousands of connections: no task is woken per message.
        """
        while self._inbox:
            handle(await self.receive())
        if not self.closed.is_set():
            assert self._reader is None, "one task receives from a connection"
            self._handle, self._reader = handle, asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._handle = self._reader = None
        raise ConnectionClosed(self.reason)

    def close(self) -> None:
        """Send the buffered bytes, then end the connection and set `closed`."""
        self.protocol.close("closed by this side")

    def deliver(self, message: Any, *, num_bytes: int) -> None:
        """Queue a received message, or handle it at once; called by the protocol."""
        if self._handle is not None:
            return self._handle_now(message, self._handle)
        cost = max(num_bytes, _MESSAGE_COST_BYTES)
        self._inbox.append((message, cost))
        self._inbox_bytes += cost
        if self._inbox_bytes > _INBOX_HIGH_BYTES:
            self.protocol.pause_reading()
        self._wake()

    def end(self, reason: str) -> None:
        """Note the end of the connection; called by the protocol."""
        self.reason = reason
        self.closed.set()
        self._wake()

    def _handle_now(self, message: Any, handle: Callable[[Any], None]) -> None:
        try:
            handle(message)
        except Exception as error:
            self._handle = None
            if self._reader is not None and not self._reader.done():
                self._reader.set_exception(error)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(eq=False, kw_only=True)
class WireProtocol(asyncio.BufferedProtocol):
    """The callbacks of the event loop: the handshake first, then frames to and from the `Connection`.

    Without a token there is no handshake and no tag, and `hello` is the peer's name.
    """

    token: bytes | None
    hello: Hello
    decoder: msgspec.msgpack.Decoder[Any]
    client: bool
    on_open: Callable[[Connection], None]
    on_lost: Callable[[WireProtocol], None] = field(default=lambda _: None)
    max_frame_bytes: int = MAX_FRAME_BYTES
    handshake_s: float = HANDSHAKE_S

    def __post_init__(self) -> None:
        self.failure: Exception | None = None
        """The error that ended the connection, if any."""
        self.reason = ""
        """The reason of its end; empty while it is open."""
        self.writable = asyncio.Event()
        """Set while the write buffer is below its high-water mark, and after the end."""
        self.writable.set()
        self._preamble = make_preamble()
        self._reader = FrameReader(max_frame_bytes=HANDSHAKE_BYTES - PREAMBLE_BYTES)
        self._sealer: FrameSealer | None = None
        self._connection: Connection | None = None
        self._reading_paused = False

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        loop = asyncio.get_running_loop()
        late = Violation(f"the handshake took longer than {self.handshake_s:g} s")
        self._deadline = loop.call_later(self.handshake_s, self.fail, late)
        if self.token is None:
            self._reader.use_key(None)
            self._sealer = FrameSealer(None, max_frame_bytes=self.max_frame_bytes)
            self._open(self.hello)
        elif self.client:
            self._transport.write(self._preamble)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.writable()

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.received(nbytes)
        try:
            self._read()
        except (Violation, UserError) as error:
            self.fail(error)
        except UNDECODABLE as error:
            self.fail(Violation(f"a message this side does not understand: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self.writable.set()
        if not self.reason:
            self.reason = f"the connection broke: {exc}" if exc else "closed by the peer"
        if self._connection is not None:
            self._connection.end(self.reason)
        self.on_lost(self)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    # -- called by the connection and its owner

    def write(self, message: Any) -> None:
        assert self._sealer is not None
        if not self.writable.is_set() and self._transport.get_write_buffer_size() > 2 * self.max_frame_bytes:
            self.fail(Violation("the peer reads too slowly: unsent messages fill two frames"))
        if self._transport.is_closing():
            raise ConnectionClosed(self.reason or "closed by the peer")
        self._transport.write(self._sealer.seal(message))

    def pause_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    def close(self, reason: str) -> None:
        """End after the unsent bytes were sent."""
        self.reason = self.reason or reason
        self._transport.close()

    def abort(self, reason: str) -> None:
        """End now."""
        self.reason = self.reason or reason
        self._transport.abort()

    # -- the handshake, then frames

    def _read(self) -> None:
        if self._sealer is None and not self._exchange_keys():
            return
        while (body := self._reader.next_body()) is not None and not self._transport.is_closing():
            if self._connection is None:
                self._open(_hello_decoder.decode(body))
            else:
                self._connection.deliver(self.decoder.decode(body), num_bytes=len(body))

    def _exchange_keys(self) -> bool:
        theirs = self._reader.take(PREAMBLE_BYTES)
        if theirs is None:
            return False
        if not self.client:
            self._transport.write(self._preamble)  # before any check, so that a client of another version learns ours
        assert self.token is not None
        keys = session_keys(self.token, ours=self._preamble, theirs=theirs, client=self.client)
        self._reader.use_key(keys.receive)
        self._sealer = FrameSealer(keys.send, max_frame_bytes=self.max_frame_bytes)
        self._transport.write(self._sealer.seal(self.hello))
        return True

    def _open(self, peer: Hello) -> None:
        self._deadline.cancel()
        self._reader.max_frame_bytes = self.max_frame_bytes
        self._connection = Connection(self, peer=peer)
        self.on_open(self._connection)

    def fail(self, error: Exception) -> None:
        """End the connection because of an error, also one of the layer below."""
        self.failure = error
        self.reason = self.reason or str(error)
        if isinstance(error, UserError):
            self._transport.close()  # our preamble must still reach a peer of another version
        else:
            self._transport.abort()
