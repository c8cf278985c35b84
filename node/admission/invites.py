"""Invites: files that an operator gives to people, each good for one key and until a date.

A file is text that survives being mailed: comment lines, and the signed record in base64. Whether an invite was used is
the ledger's to say.
"""

from __future__ import annotations

import base64
import binascii
import os
import time
from pathlib import Path
from typing import Any, Final

from node.datadir import make_directory
from node.homes import expand
from node.run_show import load_run
from protocol.atomic import write_atomically
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import ConfigError, DataDirError, ProtocolError
from protocol.identity import Identity
from protocol.records import Invite, Manifest
from protocol.run import RunAddress

KEPT: Final = "invite"
MAX_FILE_BYTES: Final = 8192
MAX_COUNT: Final = 1000
TOKEN_BYTES: Final = 16


def create_invites(
    data_dir: Path, identity: Identity, out: Path, *, count: int, days: float, now_ms: int
) -> dict[str, Any]:
    """Sign `count` invites to the run of an operator's directory, one file each in `out`.

    Raises ConfigError where this key is not the operator's, the run asks for no invites, or `out` holds some already.
    """
    manifest = load_run(data_dir)
    _require_operator(manifest, identity, data_dir)
    valid_until_ms = now_ms + int(days * 86_400_000)
    make_directory(out)
    files = [out / f"invite-{number:03d}.txt" for number in range(1, count + 1)]
    if taken := next((path for path in files if path.exists()), None):
        raise ConfigError(f"{taken} exists already", hint="give --out a new directory")
    for path in files:
        record = Invite(run_id=manifest.id, token=os.urandom(TOKEN_BYTES), valid_until_ms=valid_until_ms)
        write_atomically(path, _text(manifest, seal(record, identity), valid_until_ms))
    address = str(RunAddress(manifest.author, manifest.record.name))
    return {"run": address, "files": [str(path) for path in files], "valid_until_ms": valid_until_ms}


def kept_invite(data_dir: Path, given: str, manifest: Signed[Manifest]) -> bytes:
    """The invite in the file that was given, which is remembered, or the one from an earlier start; else nothing."""
    if given:
        data = read_invite(expand(Path(given)), manifest)
        write_atomically(data_dir / KEPT, data)
        return data
    try:
        data = (data_dir / KEPT).read_bytes()
        return data if open_envelope(data, Invite).record.run_id == manifest.id else b""
    except (OSError, ProtocolError):
        return b""


def read_invite(path: Path, manifest: Signed[Manifest]) -> bytes:
    """The envelope in an invite's file. Raises DataDirError, or ConfigError where it is none to this run."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise DataDirError(f"the invite {path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes; no invite is")
    lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith(b"#")]
    try:
        data = base64.b64decode(b"".join(lines), validate=True)
        invite = open_envelope(data, Invite)
    except (ValueError, binascii.Error, ProtocolError) as error:
        raise ConfigError(
            f"{path} holds no invite: {error}", hint="take the file as the operator sent it, whole"
        ) from error
    if invite.record.run_id != manifest.id or invite.author != manifest.author:
        raise ConfigError(
            f"the invite in {path} is not to this run, or not by its operator",
            hint=f"compare --run with the file's first line; this run is {manifest.author}/{manifest.record.name}",
        )
    return data


def _require_operator(manifest: Signed[Manifest], identity: Identity, data_dir: Path) -> None:
    if manifest.author != identity.peer_id:
        raise ConfigError(
            f"the key of {data_dir} is {identity.peer_id}, and the run's operator is {manifest.author}",
            hint="give the --data-dir that `run create` was given",
        )
    if manifest.record.admission.kind != "invite":
        raise ConfigError(
            f"the run {manifest.record.name!r} asks for no invites: its admission is {manifest.record.admission.kind}",
            hint='set admission.kind = "invite" in the recipe of a new run',
        )


def _text(manifest: Signed[Manifest], envelope: bytes, valid_until_ms: int) -> bytes:
    run = RunAddress(manifest.author, manifest.record.name)
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(valid_until_ms / 1000))
    encoded = base64.b64encode(envelope).decode("ascii")
    lines = [encoded[at : at + 76] for at in range(0, len(encoded), 76)]
    head = [f"# Invite to {run}", f"# For one node, until {until}: intellect-node --invite FILE …"]
    return "\n".join([*head, *lines, ""]).encode()
