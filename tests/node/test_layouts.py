"""Data directories of older layouts are brought up to date step by step; what cannot be is refused by name."""

import json
import shutil
from pathlib import Path

import pytest

from node import layouts
from node.datadir import DataDir
from node.layouts import LAYOUT_FILE, LAYOUT_VERSION, bring_up_to_date, read_layout
from node.version import SOFTWARE
from protocol.errors import DataDirError

FIRST = Path(__file__).parent / "fixtures" / "layout-1"


def files(directory):
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.fixture
def first(tmp_path):
    """A contributor's directory as the first layout left it."""
    return Path(shutil.copytree(FIRST, tmp_path / "node"))


def test_the_first_layout_is_brought_up_to_date_and_nothing_is_lost(first):
    before = files(first)
    assert before[LAYOUT_FILE] == b"1\n"
    with DataDir(first):
        pass
    after = files(first)
    assert json.loads(after.pop(LAYOUT_FILE)) == {"layout": LAYOUT_VERSION, "software": SOFTWARE}
    after.pop("node.lock")
    assert after == {name: data for name, data in before.items() if name not in (LAYOUT_FILE, "node.lock")}
    assert len(after) >= 3


def test_a_new_directory_says_who_made_it(tmp_path):
    bring_up_to_date(tmp_path)
    assert read_layout(tmp_path) == layouts.Layout(LAYOUT_VERSION, SOFTWARE)


def test_the_file_names_the_release_that_wrote_last(tmp_path):
    (tmp_path / LAYOUT_FILE).write_text(json.dumps({"layout": LAYOUT_VERSION, "software": "intellect-node/0.0.1"}))
    bring_up_to_date(tmp_path)
    assert read_layout(tmp_path).software == SOFTWARE


def test_a_crash_between_steps_goes_on_where_it_stopped(first, monkeypatch):
    done = []

    def fail(directory):
        done.append("fails")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layouts, "LAYOUT_VERSION", 4)
    monkeypatch.setattr(layouts, "STEPS", {1: lambda directory: done.append(1), 2: fail, 3: lambda _: done.append(3)})
    with pytest.raises(DataDirError, match="from layout 2 to 3: No space left") as caught:
        bring_up_to_date(first)
    assert "the step is done anew" in caught.value.hint
    assert read_layout(first).layout == 2
    monkeypatch.setattr(layouts, "STEPS", {1: fail, 2: lambda directory: done.append(2), 3: lambda _: done.append(3)})
    bring_up_to_date(first)
    assert done == [1, "fails", 2, 3]
    assert read_layout(first).layout == 4


def test_a_layout_without_a_way_is_refused_by_name(first, monkeypatch):
    monkeypatch.setattr(layouts, "STEPS", {})
    with pytest.raises(DataDirError, match="has layout 1, from which this release"):
        bring_up_to_date(first)
    assert (first / LAYOUT_FILE).read_bytes() == b"1\n"


@pytest.mark.parametrize("content", [b"", b"x", b"0", b"-3", b"1.5", b"{}", b'{"layout": "2"}', b"[" * 1024, b"\xff"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / LAYOUT_FILE).write_bytes(content)
    with pytest.raises(DataDirError, match="does not say which layout") as caught:
        bring_up_to_date(tmp_path)
    assert "back-up" in caught.value.hint


def test_every_older_layout_has_a_step():
    assert set(layouts.STEPS) == set(range(1, LAYOUT_VERSION))
