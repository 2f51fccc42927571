"""The certificates of a run, made by its controller. Needs the extra `tls`.

    controller, workers = make_bundles(valid_days=90)

A CA of P-256 signs one certificate for the controller and one for all workers. Its private key is not kept, so that
nobody can make further certificates of the run.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.wire.tls import CONTROLLER, WORKER, Tls

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder

_CLOCKS = timedelta(hours=1)
"""Maximum difference between the clocks of machines."""


def make_bundles(*, valid_days: float) -> tuple[Tls, Tls]:
    """Return new bundles for the controller and for workers. Raises UserError without the package cryptography."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    except ImportError as error:
        raise UserError(
            f"[tls] enabled = true needs a package that is not installed: {pip_install('cosmos-rl-core[tls]')}"
        ) from error
    key = generate_private_key(SECP256R1())
    name = f"Cosmos-RL run {secrets.token_hex(8)}"
    authority = (
        _builder(name, issuer=name, key=key, valid_days=valid_days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    ca = _signed(authority, key)
    return _bundle(CONTROLLER, ca, key), _bundle(WORKER, ca, key)


def _bundle(name: str, ca: Certificate, ca_key: EllipticCurvePrivateKey) -> Tls:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID as Use

    key = generate_private_key(SECP256R1())
    days = (ca.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)
    issuer = str(ca.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value)
    builder = (
        _builder(name, issuer=issuer, key=key, valid_days=days)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([Use.SERVER_AUTH, Use.CLIENT_AUTH]), critical=False)
    )
    written = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    certificates = (_signed(builder, ca_key), ca)
    return Tls(b"".join([written, *(one.public_bytes(s.Encoding.PEM) for one in certificates)]).decode())


def _builder(name: str, *, issuer: str, key: EllipticCurvePrivateKey, valid_days: float) -> CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    end = now + timedelta(days=valid_days)
    return x509.CertificateBuilder(
        subject_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
        issuer_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=min(now, end) - _CLOCKS,
        not_valid_after=end,
    )


def _signed(builder: CertificateBuilder, key: EllipticCurvePrivateKey) -> Certificate:
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.sign(key, SHA256())


def _usage(*, signs_certificates: bool):  # noqa: ANN202  x509.KeyUsage, which is imported here
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
