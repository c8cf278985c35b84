"""Data directories: one node each, a known layout, and words for what a disk can refuse."""

import errno
import os
import subprocess
import sys

import pytest

from node.datadir import DataDir, disk_error
from node.layouts import LAYOUT_FILE
from protocol.errors import DataDirError


def test_a_directory_is_made_private_and_can_be_used_again(tmp_path):
    path = tmp_path / "a" / "b"
    with DataDir(path) as data:
        assert data.sub("outbox").is_dir()
        assert path.stat().st_mode & 0o077 == 0
    with DataDir(path) as data:
        assert data.sub("outbox") == path / "outbox"


def test_a_second_node_is_told_who_holds_the_directory(tmp_path):
    holder = "import sys; from pathlib import Path; from node.datadir import DataDir\n"
    holder += "with DataDir(Path(sys.argv[1])):\n print('held', flush=True); sys.stdin.read()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", holder, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(DataDirError) as caught, DataDir(tmp_path):
            pass
        assert f"process {other.pid}" in caught.value.message
        assert f"intellect-node leave --data-dir {tmp_path}" in caught.value.hint
        other.kill()
    with DataDir(tmp_path):
        pass


def test_a_later_layout_is_refused_by_name_and_the_lock_freed(tmp_path):
    (tmp_path / LAYOUT_FILE).write_text('{"layout": 999, "software": "intellect-node/9.1.0"}\n')
    for _ in range(2):
        with pytest.raises(DataDirError, match=r"written by intellect-node/9\.1\.0: layout 999") as caught:
            DataDir(tmp_path).__enter__()
        assert "pip install 'intellect-node>=9.1.0'" in caught.value.hint


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirError, match="is not a directory"), DataDir(tmp_path / "file"):
        pass
    with pytest.raises(DataDirError, match="is not a directory"), DataDir(tmp_path / "file" / "below"):
        pass


def test_an_unwritable_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as permissions do, except to root
    with pytest.raises(DataDirError, match="cannot be written by this user"), DataDir(tmp_path):
        pass


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "no space is left"),
        (errno.EDQUOT, "no space is left"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "this user"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_disk_errors_have_names_and_hints(tmp_path, number, text):
    error = disk_error(OSError(number, os.strerror(number)), tmp_path / "x")
    assert text in error.message
    assert error.hint
