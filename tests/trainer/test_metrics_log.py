"""Metrics survive crashes at any byte: whole lines, rising steps, none twice, none lost, bounded files."""

import errno
import json
import os

import pytest

from protocol.errors import DataDirError
from trainer.metrics import MetricsLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "training.jsonl"


def filled(path, steps=3, **settings):
    metrics = MetricsLog(path, **settings)
    for step in range(metrics.last_step + 1, metrics.last_step + 1 + steps):
        assert metrics.append({"step": step, "reward": step / 10})
    return metrics


def test_a_row_a_line(path):
    filled(path)
    assert lines(path) == [{"step": step, "reward": step / 10} for step in range(3)]


def test_a_step_is_there_once_also_after_a_restart(path):
    filled(path)
    again = MetricsLog(path)
    assert again.last_step == 2
    assert not again.append({"step": 2, "reward": 9.0})
    assert again.append({"step": 3, "reward": 0.3})
    assert [row["step"] for row in lines(path)] == [0, 1, 2, 3]


def test_torn_at_any_byte_of_the_last_line_it_is_repaired(path):
    """The process or the machine died while the last line was written: any prefix of it may be there."""
    filled(path, 2)
    two = path.read_bytes()
    last = b'{"step":2,"reward":0.2}\n'
    for cut in range(len(last)):
        path.write_bytes(two + last[:cut])
        metrics = MetricsLog(path)
        assert metrics.last_step == 1
        assert metrics.append({"step": 2, "reward": 0.2})
        assert path.read_bytes() == two + last


@pytest.mark.parametrize(
    "junk", [b"\0" * 300, b"\0\0\0\n", b"not json\n", b"[1]\n", b'{"step":"2"}\n', b"{}\n\n\n", b"\xff\n"]
)
def test_garbage_after_the_last_row_is_cut_off(path, junk):
    """A power cut can leave blocks of zeros where data was to come."""
    filled(path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + junk)
    assert MetricsLog(path).last_step == 1
    assert path.read_bytes() == whole


def test_numbers_json_has_no_word_for_become_null(path):
    MetricsLog(path).append({"step": 0, "loss": float("nan"), "ratio_max": float("inf")})
    assert lines(path) == [{"step": 0, "loss": None, "ratio_max": None}]


def test_files_and_their_sizes_are_bounded_and_the_newest_rows_stay(path):
    filled(path, 100, max_bytes=200, keep=3)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["training.jsonl", "training.jsonl.1", "training.jsonl.2"]
    assert all(file.stat().st_size <= 200 for file in files)
    kept = [row["step"] for row in MetricsLog(path, max_bytes=200, keep=3).rows()]
    assert kept == list(range(kept[0], 100))


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_crash_in_the_middle_of_a_rotation_loses_nothing_young(path, monkeypatch, renames):
    metrics = filled(path, 24, max_bytes=200, keep=4)
    before = [row["step"] for row in metrics.rows()]
    real, left = os.rename, [renames]

    def replace(self, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            filled(path, 30, max_bytes=200, keep=4)
    again = MetricsLog(path, max_bytes=200, keep=4)
    steps = [row["step"] for row in again.rows()]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[-1] >= before[-1]
    assert again.append({"step": again.last_step + 1})


def test_a_full_disk_leaves_no_half_line(path, monkeypatch):
    metrics = filled(path)
    whole, real = path.read_bytes(), os.write

    def write(descriptor, data):
        if len(data) > 5:
            return real(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(DataDirError, match=r"metrics file .* cannot be written: No space left"):
            metrics.append({"step": 3, "reward": 0.333})
    assert path.read_bytes() == whole
    assert metrics.append({"step": 3, "reward": 0.333})
    assert lines(path)[-1] == {"step": 3, "reward": 0.333}


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DataDirError, match=r"metrics file .* cannot be written"):
        MetricsLog(tmp_path / "nowhere" / "training.jsonl")
    (tmp_path / "directory").mkdir()
    with pytest.raises(DataDirError, match=r"metrics file .* cannot be written: Is a directory"):
        MetricsLog(tmp_path / "directory")
