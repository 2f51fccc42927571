"""A listening socket whose peers prove the run's token before their messages are read, each in its own thread.

At most `MOST_STRANGERS` unauthenticated connections are open at a time, each for `HANDSHAKE_S` in all: strangers cannot
exhaust the descriptors or threads that a trainer needs.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

from cosmos_rl_core.wire.listening import RETRY_S, SeldomLog, Strangers
from cosmos_rl_transfer.errors import AuthenticationError, TransferError
from cosmos_rl_transfer.wire.link import Link

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MOST_STRANGERS = 64


class Listener:
    """Listens until closed. `talk(link, peer)` runs in the peer's thread; the link is closed if it raises."""

    def __init__(self, bind: str, *, token: bytes, name: str, talk: Callable[[Link, object], None]) -> None:
        """Listen on a free port of `bind`; `name` prefixes the threads' names. Raises OSError."""
        self._token, self._name, self._talk = token, name, talk
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._socket = socket.create_server((bind, 0), family=family)
        host = f"[{bind}]" if ":" in bind else bind
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        """Address for peers: "host:port"."""
        self._complain = SeldomLog(log.warning)
        self._closed = threading.Event()
        self._changed = threading.Condition()
        """Guards the two below."""
        self._strangers = Strangers(MOST_STRANGERS, complain=lambda text: self._complain(f"{name}: {text}"))
        self._talking: dict[Link, threading.Thread] = {}
        """Connections with a thread."""
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening and close the connections that have a thread. Idempotent."""
        with self._changed:
            if self._closed.is_set():
                return
            self._closed.set()
            self._changed.notify_all()
            talking = list(self._talking)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for link in talking:
            link.close()

    def join(self) -> None:
        """Wait for the threads, after `close`, each at most for the duration of a handshake."""
        with self._changed:
            threads = [self._accepting, *self._talking.values()]
        for thread in threads:
            thread.join(timeout=HANDSHAKE_S)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                self._complain(f"{self._name}: a connection cannot be accepted: {error.strerror}")
                if error.errno != errno.ECONNABORTED:
                    self._closed.wait(RETRY_S)
                continue
            try:
                self._admit(Link(connection, timeout_s=HANDSHAKE_S, side="publisher"), peer)
            except OSError as error:  # it was gone before its options were set
                connection.close()
                log.info("%s: %s left: %s", self._name, peer, error)

    def _admit(self, link: Link, peer: object) -> None:
        """Start a connection's thread."""
        thread = threading.Thread(target=self._serve, args=(link, peer), name=f"{self._name}-serve", daemon=True)
        with self._changed:
            while not self._closed.is_set() and (left_s := self._strangers.room_in_s()):
                self._changed.wait(left_s)
            if self._closed.is_set():
                link.close()
                return
            self._strangers.enter(link, drop=link.close)
            self._talking[link] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no memory or no process number is left for it
            self._forget(link)
            link.close()
            self._complain(f"{self._name}: a connection cannot be served: {error}")
            self._closed.wait(RETRY_S)

    def _serve(self, link: Link, peer: object) -> None:
        try:
            with ExitStack() as on_error:
                on_error.callback(link.close)
                link.authenticate(self._token)
                self._leave_strangers(link)
                self._talk(link, peer)
                on_error.pop_all()
        except AuthenticationError as error:
            self._complain(f"{self._name}: {error}")
        except TransferError as error:
            log.info("%s: %s left: %s", self._name, peer, error)
        finally:
            self._forget(link)

    def _leave_strangers(self, link: Link) -> None:
        with self._changed:
            self._strangers.leave(link)
            self._changed.notify_all()

    def _forget(self, link: Link) -> None:
        self._leave_strangers(link)
        with self._changed:
            self._talking.pop(link, None)
