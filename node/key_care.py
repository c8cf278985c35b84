"""Backing up, restoring and replacing a node's key (node.identity holds the file's format).

A key is the node's standing: credits, verdicts and evictions are of its peer id. Nothing here touches the key of a
directory whose node runs.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from node.datadir import DataDir, disk_error
from node.homes import KEY_FILE, about
from node.identity import keep_new_identity, load_identity, save_identity
from node.inference.outbox import Outbox
from protocol.errors import ConfigError, DataDirError, IdentityError
from protocol.identity import KEY_BYTES, Identity, PeerId

ENV_PASSPHRASE: Final = "INTELLECT_NODE_PASSPHRASE"
OUTBOX: Final = "outbox.sqlite"
OF_THE_OLD_KEY: Final = (OUTBOX, "feeds.json", "docket.sqlite", "answers.sqlite")
"""State that only the key that wrote it can go on with."""


def export_key(data_dir: Path, target: Path, *, passphrase: str, own_passphrase: str) -> PeerId:
    """Write an encrypted copy of a directory's key. Raises ConfigError where `target` exists, IdentityError."""
    if not passphrase:
        raise ConfigError("a copy of a key needs a passphrase", hint="give --passphrase-file FILE, or type one")
    identity = load_identity(data_dir / KEY_FILE, passphrase=own_passphrase)
    try:
        save_identity(identity, target, passphrase=passphrase)
    except FileExistsError as error:
        raise ConfigError(
            f"{target} exists already, and may be the only copy of a key", hint="give another --out"
        ) from error
    return identity.peer_id


def is_encrypted(file: Path) -> bool:
    """Whether a key file needs a passphrase; what is wrong with the file is left to `import_key`."""
    try:
        with file.open("rb") as opened:
            return b"\nencryption: none\n" not in opened.read(4096)
    except OSError as error:
        raise IdentityError(f"cannot read the key file {file}: {error.strerror}") from error


def import_key(file: Path, data_dir: Path, *, passphrase: str, own_passphrase: str) -> PeerId:
    """Put a key into a directory that has none. Raises IdentityError, DataDirError."""
    identity = _opened(file, passphrase)
    path = data_dir / KEY_FILE
    if path.exists() or path.is_symlink():
        held = load_identity(path, passphrase=own_passphrase).peer_id
        if held == identity.peer_id:
            return held
        raise DataDirError(
            f"{data_dir} has a key already, of {held}",
            hint="give another --data-dir, or back that key up and move the file away",
        )
    with DataDir(data_dir):
        keep_new_identity(identity, data_dir, passphrase=own_passphrase)
    return identity.peer_id


def _opened(copy: Path, passphrase: str) -> Identity:
    """A copy's passphrase comes from its owner, not from the environment: the hint must say so."""
    try:
        return load_identity(copy, passphrase=passphrase)
    except IdentityError as error:
        if ENV_PASSPHRASE not in error.hint:
            raise
        hint = "check the passphrase, or the first line of the --passphrase-file, or take another copy"
        raise IdentityError(error.message, hint=hint) from error


def what_is_left(data_dir: Path, *, passphrase: str) -> str:
    """What a new key costs, in words. Raises ConfigError where the key cannot be replaced."""
    identity = load_identity(data_dir / KEY_FILE, passphrase=passphrase)
    if (data_dir / "run" / "manifest").exists():
        raise ConfigError(
            f"the key of {data_dir} is its run's address, and the trainer's: with another key nobody follows it",
            hint="create a new run in another --data-dir",
        )
    role = about(data_dir).role
    lost = {
        "validator": "manifests name validators by their peer id: the operator must name the new one in a new run",
        "relay": "bootstrap addresses end in the peer id: tell everyone the new one",
    }.get(role, "credits, standing and submissions that wait for a verdict stay with the old one")
    return f"{identity.peer_id} gets a new key. {lost[:1].upper()}{lost[1:]}."


def rotate_key(data_dir: Path, *, passphrase: str) -> PeerId:
    """Give a directory a new key; the old one, and what only it can go on with, is kept beside it. Raises NodeError."""
    with DataDir(data_dir):
        old = load_identity(data_dir / KEY_FILE, passphrase=passphrase).peer_id
        _require_handed_in(data_dir)
        kept = f".{str(old)[-8:]}"
        try:
            for name in (*OF_THE_OLD_KEY, KEY_FILE):
                if (data_dir / name).exists():
                    (data_dir / name).rename(data_dir / f"{name}{kept}")
        except OSError as error:
            raise disk_error(error, data_dir) from error
        identity = Identity(secrets.token_bytes(KEY_BYTES))
        keep_new_identity(identity, data_dir, passphrase=passphrase)
    return identity.peer_id


def _require_handed_in(data_dir: Path) -> None:
    if not (data_dir / OUTBOX).exists():
        return
    outbox = Outbox(data_dir / OUTBOX)
    try:
        waiting = outbox.count("ready")
    finally:
        outbox.close()
    if waiting:
        raise ConfigError(
            f"{waiting} finished submissions in {data_dir} have not reached a relay: the new key cannot hand them in",
            hint=f"start the node until they are handed in, or move {data_dir / OUTBOX} away to give them up",
        )
