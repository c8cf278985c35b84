"""Backing up, restoring and replacing keys."""

import stat

import pytest
from factories import make_manifest, make_submission, sealed

from node.datadir import DataDir
from node.homes import KEY_FILE, say_about
from node.identity import load_identity, load_or_create_identity
from node.inference.outbox import Outbox
from node.key_care import export_key, import_key, is_encrypted, rotate_key, what_is_left
from protocol.errors import ConfigError, DataDirError, IdentityError


@pytest.fixture
def node(tmp_path):
    path = tmp_path / "node"
    load_or_create_identity(path)
    return path


def peer_id(path):
    return load_identity(path / KEY_FILE).peer_id


def test_a_copy_is_encrypted_and_brings_the_key_back(node, tmp_path):
    copy = tmp_path / "copy.key"
    assert export_key(node, copy, passphrase="long words", own_passphrase="") == peer_id(node)
    assert is_encrypted(copy)
    assert not is_encrypted(node / KEY_FILE)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with pytest.raises(IdentityError, match="passphrase"):
        import_key(copy, tmp_path / "new", passphrase="wrong", own_passphrase="")
    assert not (tmp_path / "new").exists()
    import_key(copy, tmp_path / "new", passphrase="long words", own_passphrase="")
    assert peer_id(tmp_path / "new") == peer_id(node)


def test_a_copy_never_overwrites_and_never_lies_open(node, tmp_path):
    (tmp_path / "copy").write_text("the only copy of another key")
    with pytest.raises(ConfigError, match="may be the only copy"):
        export_key(node, tmp_path / "copy", passphrase="x", own_passphrase="")
    with pytest.raises(ConfigError, match="needs a passphrase"):
        export_key(node, tmp_path / "other", passphrase="", own_passphrase="")


def test_a_key_is_not_put_over_another(node, tmp_path):
    other = tmp_path / "other"
    load_or_create_identity(other)
    with pytest.raises(DataDirError, match="has a key already"):
        import_key(node / KEY_FILE, other, passphrase="", own_passphrase="")
    assert import_key(node / KEY_FILE, node, passphrase="", own_passphrase="") == peer_id(node)


def test_a_new_key_keeps_the_old_one_and_what_only_it_can_use(node):
    old = peer_id(node)
    Outbox(node / "outbox.sqlite").close()
    new = rotate_key(node, passphrase="")
    assert peer_id(node) == new != old
    assert load_identity(node / f"{KEY_FILE}.{str(old)[-8:]}").peer_id == old
    assert (node / f"outbox.sqlite.{str(old)[-8:]}").exists()
    assert not (node / "outbox.sqlite").exists()


def test_work_that_no_relay_has_is_not_given_up(node, alice):
    manifest = sealed(make_manifest(), alice)
    outbox = Outbox(node / "outbox.sqlite")
    outbox.add(make_submission(alice, manifest.id), node / "f.parquet")
    outbox.close()
    before = peer_id(node)
    with pytest.raises(ConfigError, match="1 finished submissions"):
        rotate_key(node, passphrase="")
    assert peer_id(node) == before


def test_a_running_node_keeps_its_key(node):
    with DataDir(node), pytest.raises(DataDirError, match="in use"):
        rotate_key(node, passphrase="")


@pytest.mark.parametrize(
    ("role", "text"),
    [("inference", "Credits, standing"), ("validator", "name the new one"), ("relay", "tell everyone")],
)
def test_what_a_new_key_costs_is_said_by_role(node, role, text):
    say_about(node, role=role, run="x/demo")
    assert text in what_is_left(node, passphrase="")


def test_an_operators_key_is_never_replaced(node):
    (node / "run").mkdir()
    (node / "run" / "manifest").touch()
    with pytest.raises(ConfigError, match="is its run's address"):
        what_is_left(node, passphrase="")


def test_the_commands(run_cli, node, tmp_path):
    (tmp_path / "secret").write_text("long words\n")
    secret = ("--passphrase-file", tmp_path / "secret")
    exported = run_cli("id", "export", "--out", tmp_path / "k", "--data-dir", node, *secret)
    assert (exported.code, "without the passphrase nobody" in exported.err) == (0, True), exported.err
    assert run_cli("id", "import", tmp_path / "k", "--data-dir", tmp_path / "n", *secret).code == 0
    old = run_cli("id", "--data-dir", tmp_path / "n").out
    rotated = run_cli("id", "rotate", "--yes", "--data-dir", tmp_path / "n")
    assert "gets a new key" in rotated.err
    assert rotated.out == run_cli("id", "show", "--data-dir", tmp_path / "n").out != old
