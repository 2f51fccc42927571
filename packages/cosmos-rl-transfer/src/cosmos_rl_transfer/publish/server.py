"""The publisher's threads: one accepts, two per subscriber answer its requests.

They block in sockets and conditions, so they serve while the trainer computes. A
subscriber's thread waits for requests or for a version, and ends when its connection does; what it had leased
is given back.
"""

from __future__ import annotations

from cosmos_rl_transfer.publish.session import Session
from cosmos_rl_transfer.publish.supply import Supply
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.listener import Listener


class Server:
    """Listens and serves until closed."""

    def __init__(self, supply: Supply, *, token: bytes, bind: str, timeout_s: float) -> None:
        self._supply, self._timeout_s = supply, timeout_s
        self._listener = Listener(bind, token=token, name="weights", talk=self._serve)
        self.address = self._listener.address

    def close(self) -> None:
        """Stop listening, close every connection, wait for the threads. May be called twice."""
        self._listener.close()
        self._supply.versions.close()
        self._listener.join()

    def _serve(self, link: Link, peer: object) -> None:
        # a subscriber may have nothing to ask for long; its death closes the socket
        link.set_deadlines(timeout_s=self._timeout_s, idle_s=None)
        Session(self._supply, link).run()
