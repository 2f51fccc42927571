"""The publisher's threads: one accepts, two per subscriber answer its requests.

They block in sockets and conditions, so they serve while the trainer computes. A
subscriber's thread waits for requests or for a version, and ends when its connection does; what it had leased
is given back.
"""

from __future__ import annotations

import logging
import socket
import threading

import msgspec

from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.publish.session import Session
from cosmos_rl_transfer.publish.supply import Supply
from cosmos_rl_transfer.wire.link import Link

log = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0


class Server:
    """Listens and serves until closed."""

    def __init__(self, supply: Supply, *, token: bytes, bind: str, timeout_s: float) -> None:
        self._supply, self._token, self._timeout_s = supply, token, timeout_s
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._listener = socket.create_server((bind, 0), family=family)
        host = f"[{bind}]" if ":" in bind else bind
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._closed = False
        self._sessions: dict[Link, threading.Thread] = {}
        self._accepting = threading.Thread(target=self._accept, name="weights-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening, close every connection, wait for the threads. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions = dict(self._sessions)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in sessions:
            link.close()
        self._supply.versions.close()
        for thread in [self._accepting, *sessions.values()]:
            thread.join(timeout=_HANDSHAKE_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return  # closed
            link = Link(connection, timeout_s=_HANDSHAKE_S, side="publisher")
            thread = threading.Thread(target=self._serve, args=(link, peer), name="weights-serve", daemon=True)
            with self._lock:
                if self._closed:
                    link.close()
                    return
                self._sessions[link] = thread
            thread.start()

    def _serve(self, link: Link, peer: object) -> None:
        try:
            link.authenticate(self._token)
            # a subscriber may have nothing to ask for long; its death closes the socket
            link.set_deadlines(timeout_s=self._timeout_s, idle_s=None)
            Session(self._supply, link).run()
        except (TransferError, msgspec.DecodeError) as error:
            log.info("subscriber %s left: %s", peer, error)
        finally:
            link.close()
            with self._lock:
                self._sessions.pop(link, None)
