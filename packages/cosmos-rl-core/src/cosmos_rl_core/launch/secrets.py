"""The token of a run and, with [tls], its certificates: files of mode 0600 in the run's directory.

token             all processes
tls.pem           all workers, and `cosmos-rl scale`
tls_controller.pem   the controller, and the one that takes over from it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.recipe.sections import TlsSection
from cosmos_rl_core.wire.certificates import make_bundles
from cosmos_rl_core.wire.handshake import keep_secret, make_token, read_token
from cosmos_rl_core.wire.listening import is_loopback
from cosmos_rl_core.wire.tls import (
    CONTROLLER_TLS_FILE,
    CONTROLLER_TLS_VARIABLE,
    TLS_FILE,
    TLS_VARIABLE,
    Tls,
    environment_tls,
    read_tls,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """The secrets of one run."""

    token: bytes
    controller: Tls | None = None
    """The controller's certificate; None without TLS."""
    workers: Tls | None = None

    @property
    def ca(self) -> str:
        """SHA-256 of the CA's certificate; empty without TLS."""
        return "" if self.controller is None else self.controller.fingerprint


def make_secrets(directory: Path, section: TlsSection) -> Secrets:
    """Make the secrets of a new run, or take those of the environment, and write them. Raises UserError."""
    if not section.enabled:
        return Secrets(token=make_token(directory / "token"))
    controller, workers = _environment_bundles() or make_bundles(valid_days=section.valid_days)
    _write(directory, controller, workers)
    return Secrets(token=make_token(directory / "token"), controller=controller, workers=workers)


def read_secrets(directory: Path, section: TlsSection) -> Secrets:
    """Read the secrets of a run whose controller died; its workers have them. Raises UserError."""
    token = read_token(directory / "token")
    if not section.enabled:
        return Secrets(token=token)
    if (bundles := _environment_bundles()) is not None:
        _write(directory, *bundles)
        return Secrets(token=token, controller=bundles[0], workers=bundles[1])
    return Secrets(
        token=token, controller=read_tls(directory / CONTROLLER_TLS_FILE), workers=read_tls(directory / TLS_FILE)
    )


def _environment_bundles() -> tuple[Tls, Tls] | None:
    """Return the bundles of the controller and of workers that a platform has put into the environment, or None."""
    if (controller := environment_tls(CONTROLLER_TLS_VARIABLE)) is None:
        return None
    if (workers := environment_tls()) is None or workers.fingerprint != controller.fingerprint:
        raise UserError(f"{CONTROLLER_TLS_VARIABLE} is set, and {TLS_VARIABLE} is not the certificate of its workers")
    return controller, workers


def _write(directory: Path, controller: Tls, workers: Tls) -> None:
    for name, tls in ((CONTROLLER_TLS_FILE, controller), (TLS_FILE, workers)):
        keep_secret(directory / name, tls.bundle)


def describe_encryption(secrets: Secrets, section: TlsSection, *, bind: str) -> str:
    """Return a sentence about who can read the connections of a run that other machines can reach; else empty."""
    if is_loopback(bind):
        return ""
    if secrets.controller is None:
        return (
            f"[run] bind = {bind} without TLS: connections are authenticated by the run's token and not encrypted, so "
            "others in the network can read prompts, rollouts and weights. [tls] enabled = true encrypts them"
        )
    rest = "all connections" if section.weights else "connections to the controller; [tls] weights = true adds weights"
    return f"TLS 1.3 with the CA {secrets.ca[:16]} for {rest}"
