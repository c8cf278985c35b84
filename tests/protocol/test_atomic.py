"""Small files written whole or not at all, on disks that do not take them."""

import errno
import os
from pathlib import Path

import pytest

from protocol.atomic import write_atomically
from protocol.errors import DataDirError


def test_a_disk_that_became_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to delete as well, even what was never there."""

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    path = tmp_path / "cursors.json"
    write_atomically(path, b"old")
    with monkeypatch.context() as disk:
        disk.setattr(os, "open", read_only)
        disk.setattr(os, "unlink", read_only)
        with pytest.raises(DataDirError, match=r"cannot write .*cursors\.json: Read-only file system"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
