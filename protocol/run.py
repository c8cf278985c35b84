"""How a run is named: `<operator peer id>/<name>`, an address that certifies itself."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from protocol.envelope import Signed, open_envelope
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.records import Manifest

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class RunAddress:
    """All that a contributor needs beside a bootstrap address."""

    operator: PeerId
    name: str

    @classmethod
    def parse(cls, text: str) -> RunAddress:
        """Read `<operator peer id>/<name>`. Raises MalformedError."""
        operator, slash, name = text.partition("/")
        hint = "write --run <operator peer id>/<name>, as `intellect-node run create` printed it"
        if not slash or not _NAME.fullmatch(name):
            raise MalformedError(f"not a run address: {text[:120]!r}", hint=hint)
        try:
            return cls(PeerId.parse(operator), name)
        except MalformedError as error:
            raise MalformedError(f"not a run address: {error.message}", hint=hint) from error

    def __str__(self) -> str:
        return f"{self.operator}/{self.name}"

    @property
    def digest(self) -> bytes:
        """SHA-256 that stands for the address in DHT keys and adverts."""
        return hashlib.sha256(b"intellect-node run\0" + str(self).encode()).digest()

    def open_manifest(self, data: bytes) -> Signed[Manifest]:
        """Check that a manifest is the one this address names. Raises ProtocolError."""
        manifest = open_envelope(data, Manifest).require_author(self.operator)
        if manifest.record.name != self.name:
            raise MalformedError(f"the operator's manifest is for the run {manifest.record.name!r}, not {self.name!r}")
        return manifest
