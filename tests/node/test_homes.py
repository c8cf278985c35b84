"""Where nodes keep their state when nobody says, and which one a command is about."""

import fcntl
import os

import pytest

from node.datadir import LOCK_FILE, DataDir
from node.homes import (
    KEY_FILE,
    NEW,
    Home,
    about,
    chosen_home,
    default_home,
    holder,
    home_or_new,
    homes_root,
    known_homes,
    say_about,
    settle,
)
from protocol.errors import ConfigError, DataDirError
from protocol.run import RunAddress


@pytest.fixture
def environ(tmp_path):
    return {"XDG_DATA_HOME": str(tmp_path), "HOME": "/nowhere"}


@pytest.fixture
def make(environ):
    def made(name):
        path = homes_root(environ) / name
        path.mkdir(parents=True)
        (path / KEY_FILE).touch()
        return path

    return made


def test_each_role_and_run_has_a_directory(alice, bob, environ, tmp_path):
    run = RunAddress(alice.peer_id, "demo")
    assert default_home("relay", run, environ) == tmp_path / "intellect-node" / f"relay-demo-{str(alice.peer_id)[-8:]}"
    others = {default_home("relay", RunAddress(bob.peer_id, "demo"), environ), default_home("inference", run, environ)}
    assert default_home("relay", run, environ) not in others


def test_a_relative_data_home_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert homes_root({"XDG_DATA_HOME": "here"}) == tmp_path / ".local/share/intellect-node"


def test_the_only_directory_is_meant_or_the_only_one_that_runs(environ, make):
    with pytest.raises(DataDirError, match="no node has been started"):
        chosen_home(None, environ)
    one = make("one")
    assert chosen_home(None, environ) == one
    two = make("two")
    with pytest.raises(ConfigError, match="one, two"):
        chosen_home(None, environ)
    with DataDir(two):
        assert chosen_home(None, environ) == two
    assert chosen_home(one / ".", environ) == one
    assert chosen_home(None, environ | {"INTELLECT_NODE_DATA_DIR": str(two)}) == two


def test_a_key_that_waits_is_taken_by_the_next_new_directory(environ, make):
    waiting = make(NEW)
    assert known_homes(environ) == []
    assert home_or_new(None, environ) == waiting
    target = waiting.parent / "relay-demo-1"
    settle(target, environ)
    assert (target / KEY_FILE).exists()
    assert not waiting.exists()
    make(NEW)
    settle(target, environ)
    assert waiting.exists(), "a directory that is in use takes nothing"


def test_a_directory_outside_the_root_takes_no_key(environ, make, tmp_path):
    waiting = make(NEW)
    settle(tmp_path / "elsewhere", environ)
    assert waiting.exists()


def test_a_directory_says_what_it_is_for(tmp_path):
    assert about(tmp_path) == Home(tmp_path)
    say_about(tmp_path, role="relay", run="x/demo")
    assert about(tmp_path) == Home(tmp_path, "relay", "x/demo")


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"role": 5}'])
def test_a_damaged_note_says_nothing(tmp_path, data):
    (tmp_path / "node.json").write_bytes(data)
    assert about(tmp_path).run == ""


def test_the_holder_is_found_by_the_lock_not_by_the_file(tmp_path):
    assert holder(tmp_path) == 0
    (tmp_path / LOCK_FILE).write_text("1\n")
    assert holder(tmp_path) == 0, "a number that a node left behind is nobody"
    with DataDir(tmp_path):
        assert holder(tmp_path) == os.getpid()
    descriptor = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_TRUNC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert holder(tmp_path) == -1
    os.close(descriptor)
