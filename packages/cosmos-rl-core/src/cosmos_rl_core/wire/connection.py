"""One authenticated connection: a stream of messages each way.

bytes -> FrameReader -> verified body -> message -> `receive()`; `send()` -> FrameSealer -> socket.

A slow consumer stops the reading of its socket, which fills the sender's write buffer, which makes the
sender's `send()` wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
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


class Connection(asyncio.BufferedProtocol):
    """The connection to an authenticated peer, or to a parent or child process. Made by `channel`.

    It has the callbacks of the event loop, too: the handshake first, then frames. Without a token there is no handshake
    and no tag, and `hello` is the peer's name.
    """

    def __init__(
        self,
        *,
        token: bytes | None,
        hello: Hello,
        decoder: msgspec.msgpack.Decoder[Any],
        client: bool = False,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done after the handshake; with an error if the connection ends before. One task awaits it."""
        self.peer = hello
        """The peer's name and role, after the handshake."""
        self.closed = asyncio.Event()
        """Set once the connection has ended."""
        self.reason = ""
        """The reason of its end; empty while it is open."""
        self._failure: Exception | None = None
        """The error that ended the connection, if any."""
        self._token, self._hello, self._decoder, self._client = token, hello, decoder, client
        self._max_frame_bytes, self._handshake_s = max_frame_bytes, handshake_s
        self._preamble = b"" if token is None else make_preamble()
        self._frames = FrameReader(max_frame_bytes=HANDSHAKE_BYTES - PREAMBLE_BYTES)
        self._sealer: FrameSealer | None = None
        self._writable = asyncio.Event()
        """Set while the write buffer is below its high-water mark, and after the end."""
        self._writable.set()
        self._reading_paused = False
        self._inbox: deque[tuple[Any, int]] = deque()
        self._inbox_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        """Of the task that receives, while it waits."""
        self._handle: Callable[[Any], None] | None = None

    # -- sending and receiving

    def post(self, message: Any) -> None:
        """Send without waiting. Raises `ConnectionClosed`, also if the peer does not read."""
        if self.closed.is_set():
            raise ConnectionClosed(self.reason)
        assert self._sealer is not None
        if not self._writable.is_set() and self._transport.get_write_buffer_size() > 2 * self._max_frame_bytes:
            self.fail(Violation("the peer reads too slowly: unsent messages fill two frames"))
        if self._transport.is_closing():
            raise ConnectionClosed(self.reason or "closed by the peer")
        self._transport.write(self._sealer.seal(message))

    async def send(self, message: Any) -> None:
        """Send, and wait while the send buffer is full. Raises `ConnectionClosed`."""
        self.post(message)
        if not self._writable.is_set():
            await self._writable.wait()
        if self.closed.is_set():
            raise ConnectionClosed(self.reason)

    async def receive(self) -> Any:
        """Return the next message, also one received before the end. Raises `ConnectionClosed`."""
        while not self._inbox:
            if self.closed.is_set():
                raise ConnectionClosed(self.reason)
            await self._wait()
        message, cost = self._inbox.popleft()
        self._inbox_bytes -= cost
        if self._reading_paused and self._inbox_bytes <= _INBOX_HIGH_BYTES // 2:
            self._reading_paused = False
            self._transport.resume_reading()
        return message

    async def consume(self, handle: Callable[[Any], None]) -> None:
        """Call `handle` with each message as it arrives. Raises `ConnectionClosed` at the end, and errors of `handle`.

        Cheaper than `receive` in a loop for thousands of connections: no task is woken per message.
        """
        while self._inbox:
            handle(await self.receive())
        if not self.closed.is_set():
            self._handle = handle
            try:
                await self._wait()
            finally:
                self._handle = None
        raise ConnectionClosed(self.reason)

    async def _wait(self) -> None:
        """Wait for a message, for an error of `consume`'s function, or for the end."""
        assert self._waiter is None, "one task receives from a connection"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self, reason: str = "closed by this side") -> None:
        """Send the buffered bytes, then end the connection and set `closed`."""
        self.reason = self.reason or reason
        self._transport.close()

    def abort(self, reason: str) -> None:
        """End the connection now."""
        self.reason = self.reason or reason
        self._transport.abort()

    def fail(self, error: Exception) -> None:
        """End the connection because of an error, also one of the layer below."""
        self._failure = error
        self.reason = self.reason or str(error)
        if isinstance(error, UserError):
            self._transport.close()  # our preamble must still reach a peer of another version
        else:
            self._transport.abort()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        late = Violation(f"the handshake took longer than {self._handshake_s:g} s")
        self._deadline = asyncio.get_running_loop().call_later(self._handshake_s, self.fail, late)
        if self._token is None:
            self._frames.use_key(None)
            self._sealer = FrameSealer(None, max_frame_bytes=self._max_frame_bytes)
            self._open(self._hello)
        elif self._client:
            self._transport.write(self._preamble)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.writable()

    def buffer_updated(self, nbytes: int) -> None:
        self._frames.received(nbytes)
        try:
            if self._sealer is None and not self._exchange_keys():
                return
            while (body := self._frames.next_body()) is not None and not self._transport.is_closing():
                if not self.opened.done():
                    self._open(_hello_decoder.decode(body))
                else:
                    self._deliver(self._decoder.decode(body), num_bytes=len(body))
        except (Violation, UserError) as error:
            self.fail(error)
        except UNDECODABLE as error:
            self.fail(Violation(f"a message this side does not understand: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self.reason = self.reason or (f"the connection broke: {exc}" if exc else "closed by the peer")
        self._writable.set()
        self.closed.set()
        self._wake()
        if not self.opened.done():
            self.opened.set_exception(self._failure or ConnectionClosed(self.reason))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _exchange_keys(self) -> bool:
        """Derive the keys from both preambles and send the Hello; False until the peer's preamble is complete."""
        theirs = self._frames.take(PREAMBLE_BYTES)
        if theirs is None:
            return False
        if not self._client:
            self._transport.write(self._preamble)  # before any check, so that a client of another version learns ours
        assert self._token is not None
        keys = session_keys(self._token, ours=self._preamble, theirs=theirs, client=self._client)
        self._frames.use_key(keys.receive)
        self._sealer = FrameSealer(keys.send, max_frame_bytes=self._max_frame_bytes)
        self._transport.write(self._sealer.seal(self._hello))
        return True

    def _open(self, peer: Hello) -> None:
        self._deadline.cancel()
        self._frames.max_frame_bytes = self._max_frame_bytes
        self.peer = peer
        self.opened.set_result(None)

    def _deliver(self, message: Any, *, num_bytes: int) -> None:
        """Queue a received message, or let the function of `consume` handle it at once."""
        if self._handle is not None:
            try:
                return self._handle(message)
            except Exception as error:
                self._handle = None
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(error)
                return None
        cost = max(num_bytes, _MESSAGE_COST_BYTES)
        self._inbox.append((message, cost))
        self._inbox_bytes += cost
        if self._inbox_bytes > _INBOX_HIGH_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
