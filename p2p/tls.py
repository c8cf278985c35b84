"""A node's own TLS certificate: self-signed, known by its fingerprint, vouched for by no authority.

Clients accept the one certificate whose SHA-256 stands in a signed record (relay advert, origin notice) and look at
nothing else in it: names and dates are there for other programs. The key is made for TLS alone, on ECDSA P-256, which
every TLS library takes; the node's Ed25519 key signs records and is never given to a TLS library.
"""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from protocol.errors import DataDirError

log = logging.getLogger(__name__)

FILE: Final = "tls.pem"
LIFETIME: Final = timedelta(days=730)
RENEW_BEFORE: Final = timedelta(days=365)
"""A start within this time of the end makes a new certificate."""
CLOCK_SLACK: Final = timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, in one PEM file."""

    path: Path
    fingerprint: bytes
    """SHA-256 of the certificate in DER."""

    def server_context(self) -> ssl.SSLContext:
        """For servers: TLS 1.3 alone, no session tickets (a resumed session would not show the certificate again)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.load_cert_chain(self.path)
        return context


def load_or_create_certificate(
    directory: Path, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> Certificate:
    """This node's certificate; a new one when there is none, it ends soon, is damaged, or others could read its key.

    Raises DataDirError when the disk refuses.
    """
    path = directory / FILE
    try:
        held = _load(path, clock())
        return held or _create(path, clock())
    except OSError as error:
        raise DataDirError(
            f"the TLS certificate {path} cannot be read or written: {error.strerror or error}",
            hint=f"look at its owner and the disk: ls -l {path}; df -h {directory}",
        ) from error


def _load(path: Path, now: datetime) -> Certificate | None:
    try:
        mode = path.stat().st_mode
        pem = path.read_bytes()
    except FileNotFoundError:
        return None
    if stat.S_IMODE(mode) & 0o077:
        log.warning("certificate=%s mode=%o replaced: others could read its key", path, stat.S_IMODE(mode))
        return None
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        held = Certificate(path, _fingerprint(certificate))
        held.server_context()
    except (ValueError, ssl.SSLError) as error:
        log.warning("certificate=%s replaced: damaged: %s", path, error)
        return None
    if certificate.not_valid_after_utc - now < RENEW_BEFORE:
        log.info("certificate=%s replaced: ends=%s", path, certificate.not_valid_after_utc.date())
        return None
    return held


def _create(path: Path, now: datetime) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "intellect-node")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(now + LIFETIME)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_secret(path, secret + certificate.public_bytes(serialization.Encoding.PEM))
    held = Certificate(path, _fingerprint(certificate))
    log.info("certificate=%s fingerprint=%s made", path, held.fingerprint.hex())
    return held


def _fingerprint(certificate: x509.Certificate) -> bytes:
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def _write_secret(path: Path, content: bytes) -> None:
    """Readable by its owner alone from the first byte on; the old file stays until the new one is whole."""
    part = path.with_name(path.name + ".part")
    with suppress(FileNotFoundError):
        part.unlink()
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
