"""Key files: private from the first byte, exact about what is wrong with them."""

import os
import stat

import pytest

from node.identity import KEY_FILE, load_identity, load_or_create_identity, save_identity
from protocol.errors import DataDirError, IdentityError
from protocol.identity import Identity


@pytest.fixture
def alice():
    return Identity.from_phrase("alice")


def test_a_key_is_created_once_and_kept(tmp_path):
    first = load_or_create_identity(tmp_path / "new" / "dir")
    assert load_or_create_identity(tmp_path / "new" / "dir").peer_id == first.peer_id
    assert load_or_create_identity(tmp_path / "other").peer_id != first.peer_id


def test_creation_asks_for_a_back_up(tmp_path, caplog):
    load_or_create_identity(tmp_path)
    assert "back it up" in caplog.text


def test_the_file_is_private_from_its_first_byte(tmp_path, monkeypatch):
    """Attack: another user opens the file between its creation and a later chmod."""
    modes = []
    real_open = os.open

    def watching_open(path, flags, mode=0o777, **options):
        descriptor = real_open(path, flags, mode, **options)
        if str(path).endswith(KEY_FILE):
            modes.append((stat.S_IMODE(os.fstat(descriptor).st_mode), bool(flags & os.O_EXCL)))
        return descriptor

    monkeypatch.setattr(os, "open", watching_open)
    previous = os.umask(0)
    try:
        load_or_create_identity(tmp_path)
    finally:
        os.umask(previous)
    assert modes[0] == (0o600, True)


def test_an_existing_file_is_never_overwritten(alice, tmp_path):
    path = tmp_path / KEY_FILE
    save_identity(alice, path)
    with pytest.raises(FileExistsError):
        save_identity(Identity.from_phrase("bob"), path)
    assert load_identity(path).peer_id == alice.peer_id


def test_a_dangling_link_is_not_followed_to_create_a_key(tmp_path):
    """Attack: a link planted in a shared directory has the key written where someone else reads it."""
    (tmp_path / KEY_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IdentityError):
        load_or_create_identity(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_can_use_is_refused(alice, tmp_path, mode):
    path = tmp_path / KEY_FILE
    save_identity(alice, path)
    path.chmod(mode)
    with pytest.raises(IdentityError) as caught:
        load_identity(path)
    assert caught.value.hint == f"chmod 600 {path}"


def test_a_passphrase_encrypts(alice, tmp_path):
    path = tmp_path / KEY_FILE
    save_identity(alice, path, passphrase="correct horse")
    assert load_identity(path, passphrase="correct horse").seed == alice.seed
    with pytest.raises(IdentityError, match="encrypted and no passphrase"):
        load_identity(path)
    with pytest.raises(IdentityError, match="does not open"):
        load_identity(path, passphrase="wrong horse")


def test_an_encrypted_file_does_not_hold_the_seed(alice, tmp_path):
    save_identity(alice, tmp_path / "plain")
    save_identity(alice, tmp_path / "sealed", passphrase="correct horse")
    secret = (tmp_path / "plain").read_text().splitlines()[-1].removeprefix("key: ")
    assert secret not in (tmp_path / "sealed").read_text()


def test_a_changed_header_of_an_encrypted_file_is_noticed(alice, tmp_path):
    """Attack: the peer id shown in the file is replaced by another."""
    path = tmp_path / KEY_FILE
    save_identity(alice, path, passphrase="correct horse")
    bob = Identity.from_phrase("bob").peer_id
    path.write_text(path.read_text().replace(str(alice.peer_id), str(bob)))
    with pytest.raises(IdentityError, match="damaged"):
        load_identity(path, passphrase="correct horse")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: text.replace("version 1", "version 9"),
        lambda text: text.replace("none", "rot13"),
        lambda text: text.replace("key: ", "key: !"),
        lambda text: text.replace("key: ", "key: AAAA"),
        lambda text: text + "key: x\n",
        lambda text: text.replace("key", "clé"),
        lambda text: text * 100,
        lambda text: "\0" * 200,
    ],
)
def test_a_damaged_file_is_named(alice, tmp_path, damage):
    path = tmp_path / KEY_FILE
    save_identity(alice, path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(IdentityError) as caught:
        load_identity(path)
    assert str(path) in caught.value.message
    assert "back-up" in caught.value.hint


def test_another_key_than_the_named_one_is_damage(alice, tmp_path):
    save_identity(alice, tmp_path / "alice")
    save_identity(Identity.from_phrase("bob"), tmp_path / "bob")
    key_of_bob = (tmp_path / "bob").read_text().splitlines()[-1]
    lines = (tmp_path / "alice").read_text().splitlines()
    (tmp_path / "alice").write_text("\n".join([*lines[:-1], key_of_bob]) + "\n")
    with pytest.raises(IdentityError, match="not the one of its peer id"):
        load_identity(tmp_path / "alice")


def test_a_directory_in_the_way_is_named(tmp_path):
    (tmp_path / KEY_FILE).mkdir()
    with pytest.raises(IdentityError, match="cannot read the key file"):
        load_or_create_identity(tmp_path)


def test_a_full_disk_leaves_no_half_key(alice, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataDirError, match="no space is left"):
        save_identity(alice, tmp_path / KEY_FILE)
    assert not (tmp_path / KEY_FILE).exists()
