"""TLS 1.3 between the processes of a run: both sides have a certificate of the run's own authority (CA).

    tls = read_tls(run_dir / "tls.pem")
    session = tls.session(client=True, server=CONTROLLER)
    session.feed(received)                  bytes from the socket
    session.read_into(view)                 plaintext
    session.write(data)
    send(session.take())                    bytes for the socket

A bundle is a text of three PEM blocks: a private key, its certificate and that of the CA. The CA in it is the only one
that is trusted. The frames, with the proof of the token, are inside TLS.
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import tempfile
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.handshake import PLAIN_BYTE, TlsRefused, Violation, read_secret, tls_notice

TLS_FILE = "tls.pem"
"""The bundle of all workers, in the run's directory."""
CONTROLLER_TLS_FILE = "tls_controller.pem"
"""The bundle of the controller, in the run's directory."""
TLS_VARIABLE = "COSMOS_RL_TLS"
"""Environment variable with the content of TLS_FILE, for machines that do not share the run's directory."""
CONTROLLER_TLS_VARIABLE = "COSMOS_RL_CONTROLLER_TLS"
"""Environment variable with the controller's bundle, for a platform that makes the certificates of a run."""
CONTROLLER, WORKER = "controller", "worker"
"""Names in the certificates. A client checks that the certificate of its server has the expected one."""
_BLOCK = re.compile(r"-----BEGIN ([A-Z ]+)-----.+?-----END \1-----\n?", re.DOTALL)
_EXPIRED, _NOT_YET_VALID, _OTHER_NAME = 10, 9, 62
"""Codes of OpenSSL: x509_vfy.h."""
_REFUSED = {
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this side's certificate has expired; stop the run and continue it with "
    "--resume auto, which makes new certificates",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer requires a certificate",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer has no certificate",
    **dict.fromkeys(
        ("TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE", "TLSV1_ALERT_DECRYPT_ERROR"),
        "the peer does not accept the certificate of this side: it is of another run",
    ),
}
"""Explanations of OpenSSL's reasons, most of which are alerts of the peer."""


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificate of a process, and the CA that it trusts. Made by `read_tls`, `environment_tls` and
    `certificates.make_bundles`."""

    bundle: str = field(repr=False)
    origin: str = field(default=TLS_FILE, compare=False)
    """Its file or variable, for messages."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the CA's certificate, 64 hex digits."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(_blocks(self)[2])).hexdigest()

    @property
    def expires_at(self) -> float:
        """End of the CA's validity, in Unix seconds."""
        (ca,) = _context(self, server=True).get_ca_certs()
        return ssl.cert_time_to_seconds(str(ca["notAfter"]))

    def check(self) -> Tls:
        """Return it. Raises UserError for a bundle that OpenSSL does not accept, or that has expired."""
        try:
            expires_at = self.expires_at
        except (ValueError, OSError, IndexError) as error:  # ssl.SSLError is an OSError
            raise UserError(f"{self.origin} is not the file {TLS_FILE} of a run: {error}") from error
        if expires_at < time.time():
            raise UserError(
                f"the certificate in {self.origin} has expired; stop the run and continue it with --resume auto, "
                "which makes new ones"
            )
        return self

    def session(self, *, client: bool, server: str = CONTROLLER) -> TlsSession:
        """Return one side of a connection. server: the name in the certificate that a client requires."""
        return TlsSession(self, client=client, server=server)


def read_tls(path: Path) -> Tls:
    """Return the bundle in a file. Raises UserError if it is missing, unusable, expired or readable by others."""
    return Tls(read_secret(path, kind="certificate") + "\n", origin=str(path)).check()


def environment_tls(variable: str = TLS_VARIABLE) -> Tls | None:
    """Return the bundle of an environment variable, or None. Raises UserError."""
    text = os.environ.get(variable, "").strip()
    return Tls(text + "\n", origin=f"the variable {variable}").check() if text else None


class TlsSession:
    """The state of one side of a connection, without its socket. Not thread-safe.

    Methods raise TlsRefused if the other side has no certificate of this run or no TLS, and Violation for other bytes
    that are not of this connection; then `take` returns bytes that explain it to the other side.
    """

    def __init__(self, tls: Tls, *, client: bool, server: str) -> None:
        self.is_open = False
        """Whether both sides have proved their certificates, as far as this side can see."""
        self._tls, self._client = tls, client
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = _context(tls, server=not client).wrap_bio(
            self._received, self._sent, server_side=not client, server_hostname=server if client else None
        )
        self._begun = False
        self._notice = b""

    @property
    def pending(self) -> bool:
        """Whether received bytes were not read yet."""
        return self._received.pending > 0 or self._object.pending() > 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes from the socket."""
        if not self._begun:
            self._begun = True
            if data[0] == PLAIN_BYTE:
                self._notice = b"" if self._client else tls_notice()
                raise TlsRefused(_without_tls(client=self._client))
        self._received.write(data)

    def shake_hands(self) -> bool:
        """Continue the handshake with the bytes received so far; return whether it is complete."""
        try:
            self._object.do_handshake()
            self.is_open = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise self._explained(error) from error
        return self.is_open

    def read_into(self, view: memoryview) -> int:
        """Decrypt into `view`; return the number of bytes, 0 until more are received."""
        count = 0
        while count < len(view) and self.pending:
            try:
                count += self._object.read(len(view) - count, view[count:])  # type: ignore[arg-type,operator]
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                raise self._explained(error) from error
        return count

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt."""
        self._object.write(data)

    def take(self) -> bytes:
        """Return the bytes for the socket."""
        notice, self._notice = self._notice, b""
        return notice or self._sent.read()

    def _explained(self, error: ssl.SSLError) -> Exception:
        if isinstance(error, ssl.SSLCertVerificationError):
            return TlsRefused(self._wrong_certificate(error.verify_code))
        if (reason := _REFUSED.get(error.reason or "")) is not None:
            return TlsRefused(f"{reason} ({self._authority})")
        return Violation(f"TLS failed: {error.reason or error}")

    def _wrong_certificate(self, code: int) -> str:
        if code == _EXPIRED:
            return (
                "the peer's certificate has expired; stop the run and continue it with --resume auto, which makes "
                "new certificates"
            )
        if code == _NOT_YET_VALID:
            return "the peer's certificate is not valid yet; compare the clocks of both machines"
        if code == _OTHER_NAME:
            return "the peer is another kind of process of this run: the controller is required, or a worker"
        return f"the peer's certificate is of another run; give both sides {TLS_FILE} of one run ({self._authority})"

    @property
    def _authority(self) -> str:
        return f"this side trusts the CA {self._tls.fingerprint[:16]} of {self._tls.origin}"


def _without_tls(*, client: bool) -> str:
    if client:
        return (
            f"the run does not use TLS, and this process has a certificate: remove {TLS_VARIABLE} and --tls-file, or "
            "set [tls] enabled = true in the recipe"
        )
    return (
        f"the peer does not use TLS; start it with {TLS_FILE} of this run's directory, by {TLS_VARIABLE} or --tls-file"
    )


def _blocks(tls: Tls) -> tuple[str, str, str]:
    """The key, the certificate and the CA. Raises ValueError."""
    blocks = [match.group() for match in _BLOCK.finditer(tls.bundle)]
    if len(blocks) != 3:
        raise ValueError(f"it has {len(blocks)} PEM blocks, not a private key and two certificates")
    return blocks[0], blocks[1], blocks[2]


@lru_cache(maxsize=64)
def _context(tls: Tls, *, server: bool) -> ssl.SSLContext:
    """Raises ValueError and ssl.SSLError."""
    key, certificate, authority = _blocks(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # no session is resumed
    context.load_verify_locations(cadata=authority)
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # of mode 0600; ssl reads keys from files only
        file.write(key + certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context
