"""The key file: a node's Ed25519 key on disk, readable by its owner alone, optionally encrypted with a passphrase.

Text of a few lines, so that people can see what it is and copy it whole. Encryption is scrypt and ChaCha20-Poly1305;
the header, peer id included, is authenticated.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from node.datadir import disk_error, make_directory
from protocol.atomic import sync_directory
from protocol.errors import IdentityError
from protocol.identity import KEY_BYTES, Identity

KEY_FILE: Final = "identity.key"
_FIRST_LINE: Final = "intellect-node key, version 1"
_FIELDS: Final = ("peer-id", "encryption", "salt", "key")
_PLAIN: Final = "none"
_SCRYPT: Final = "scrypt-2^15-8-1+chacha20-poly1305"
_SALT_BYTES: Final = 16
_NONCE: Final = bytes(12)  # the salt is fresh for each file, so the derived key encrypts once only
_MAX_FILE_BYTES: Final = 4096

_log = logging.getLogger(__name__)


def load_or_create_identity(data_dir: Path, *, passphrase: str = "") -> Identity:
    """The node's key, created on first use. Raises IdentityError, or DataDirError when it cannot be written."""
    path = data_dir / KEY_FILE
    if path.exists() or path.is_symlink():
        return load_identity(path, passphrase=passphrase)
    identity = Identity(secrets.token_bytes(KEY_BYTES))
    try:
        keep_new_identity(identity, data_dir, passphrase=passphrase)
    except FileExistsError:  # another process was first
        return load_identity(path, passphrase=passphrase)
    return identity


def keep_new_identity(identity: Identity, data_dir: Path, *, passphrase: str = "") -> None:
    """Make a new key a directory's own, and ask for a back-up. Raises FileExistsError, or DataDirError."""
    make_directory(data_dir)
    path = data_dir / KEY_FILE
    save_identity(identity, path, passphrase=passphrase)
    _log.warning(
        "new key peer_id=%s file=%s; back it up (`intellect-node id export --data-dir %s`): who loses it loses this "
        "node's standing",
        *(identity.peer_id, path, data_dir),
    )


def load_identity(path: Path, *, passphrase: str = "") -> Identity:
    """Read a key file. Raises IdentityError that names the file and what to do."""
    fields = _parse(_read_private(path), path)
    if fields["encryption"] == _PLAIN:
        if passphrase:
            _log.warning("a passphrase is set but the key file is not encrypted file=%s", path)
        seed = _decode(fields["key"], path)
    elif not passphrase:
        raise IdentityError(
            f"the key file {path} is encrypted and no passphrase is set",
            hint="set INTELLECT_NODE_PASSPHRASE to its passphrase",
        )
    else:
        seed = _decrypt(fields, passphrase, path)
    if len(seed) != KEY_BYTES:
        raise _damaged(path, "its key has a wrong length")
    identity = Identity(seed)
    if str(identity.peer_id) != fields["peer-id"]:
        raise _damaged(path, "its key is not the one of its peer id")
    return identity


def save_identity(identity: Identity, path: Path, *, passphrase: str = "") -> None:
    """Write a new key file, mode 0600 from its first byte, and make it durable. Raises FileExistsError."""
    data = _render(identity, passphrase).encode("ascii")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def _render(identity: Identity, passphrase: str) -> str:
    salt = secrets.token_bytes(_SALT_BYTES) if passphrase else b""
    header = _header(str(identity.peer_id), _SCRYPT if passphrase else _PLAIN, _encode(salt))
    key = identity.seed
    if passphrase:
        key = _cipher(passphrase, salt).encrypt(_NONCE, key, header.encode())
    return f"{header}key: {_encode(key)}\n"


def _header(peer_id: str, encryption: str, salt: str) -> str:
    return f"{_FIRST_LINE}\npeer-id: {peer_id}\nencryption: {encryption}\nsalt: {salt}\n"


def _read_private(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise IdentityError(
                    f"the key file {path} can be used by other users of this computer (mode {mode:04o})",
                    hint=f"chmod 600 {path}",
                )
            return file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise IdentityError(
            f"there is no key file {path}: no node has run in that directory, or another one is meant",
            hint=f"intellect-node id --data-dir {path.parent} makes a key; `ls {path.parent}` shows what is there",
        ) from error
    except OSError as error:
        raise IdentityError(
            f"cannot read the key file {path}: {error.strerror}", hint=f"look at its owner: ls -l {path}"
        ) from error


def _parse(data: bytes, path: Path) -> dict[str, str]:
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise _damaged(path, "it is not text") from None
    if len(data) > _MAX_FILE_BYTES or not lines or lines[0] != _FIRST_LINE:
        raise _damaged(path, f"it does not begin with {_FIRST_LINE!r}")
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    if tuple(fields) != _FIELDS or len(lines) != 1 + len(_FIELDS):
        raise _damaged(path, f"it does not hold exactly the lines {', '.join(_FIELDS)}")
    if fields["encryption"] not in (_PLAIN, _SCRYPT):
        raise _damaged(path, "its encryption is unknown")
    return fields


def _decrypt(fields: dict[str, str], passphrase: str, path: Path) -> bytes:
    header = _header(fields["peer-id"], fields["encryption"], fields["salt"])
    cipher = _cipher(passphrase, _decode(fields["salt"], path))
    try:
        return cipher.decrypt(_NONCE, _decode(fields["key"], path), header.encode())
    except InvalidTag:
        raise IdentityError(
            f"the passphrase does not open the key file {path}, or the file is damaged",
            hint="check INTELLECT_NODE_PASSPHRASE, or put your back-up of the file in its place",
        ) from None


def _cipher(passphrase: str, salt: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(Scrypt(salt=salt, length=32, n=1 << 15, r=8, p=1).derive(passphrase.encode()))


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii") or "-"


def _decode(text: str, path: Path) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _damaged(path, "it is not base64") from None


def _damaged(path: Path, why: str) -> IdentityError:
    return IdentityError(
        f"the key file {path} is damaged: {why}",
        hint=f"put your back-up in its place, or start over with a new key: mv {path} {path}.damaged",
    )
