"""A run's key, directory and manifest: all of them, or nothing."""

import pytest

from node.homes import KEY_FILE, NEW, about, homes_root, known_homes
from node.identity import load_identity, load_or_create_identity
from node.run_make import RunOrder, make_run
from protocol.errors import ConfigError, ModelError


@pytest.fixture
def environ(tmp_path):
    return {"XDG_DATA_HOME": str(tmp_path / "data")}


def make(environ, bob, **order):
    wanted = RunOrder(**{"recipe": "demo", "validators": [bob.peer_id], **order})
    return make_run(wanted, issued_at_ms=1, passphrase="", environ=environ)


def test_a_run_gets_a_directory_and_a_key_of_its_own(environ, bob):
    made = make(environ, bob)
    assert [home.path for home in known_homes(environ)] == [made.home]
    assert about(made.home).run == str(made.run.address)
    assert load_identity(made.home / KEY_FILE).peer_id == made.run.address.operator
    assert make(environ, bob).home != made.home, "a second run has another operator's key"


def test_a_key_that_waits_becomes_the_operators(environ, bob):
    waiting = load_or_create_identity(homes_root(environ) / NEW)
    assert make(environ, bob).run.address.operator == waiting.peer_id
    assert not (homes_root(environ) / NEW).exists()


def test_a_given_directory_keeps_its_key(environ, bob, tmp_path):
    own = load_or_create_identity(tmp_path / "own")
    assert make(environ, bob, data_dir=tmp_path / "own").run.address.operator == own.peer_id


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ({"recipe": "none"}, ConfigError),
        ({"validators": []}, ConfigError),
        ({"name": "No Name"}, ConfigError),
        ({"recipe": "broken-model.toml"}, ModelError),
    ],
    ids=str,
)
@pytest.mark.parametrize("waiting", [False, True])
def test_what_fails_leaves_nothing(environ, bob, tmp_path, monkeypatch, order, error, waiting):
    """No key that nobody backs up, no directory, and a key that waited waits on."""
    monkeypatch.chdir(tmp_path)
    demo = (tmp_path / "broken-model.toml").write_text
    from trainer.recipe import recipe_path

    demo(recipe_path("demo").read_text().replace('"sort-digits"', '"no-such-policy"', 1))
    key = load_or_create_identity(homes_root(environ) / NEW) if waiting else None
    with pytest.raises(error):
        make(environ, bob, **order)
    assert known_homes(environ) == []
    left = sorted(path.name for path in homes_root(environ).rglob("*")) if homes_root(environ).exists() else []
    assert left == ([KEY_FILE, NEW] if waiting else [])
    if key is not None:
        assert load_identity(homes_root(environ) / NEW / KEY_FILE).peer_id == key.peer_id
