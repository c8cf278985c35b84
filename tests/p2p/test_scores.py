"""Scores of peers, their decay, and bans: no sockets."""

import pytest

from p2p import scores
from p2p.scores import Misdeed, Scores


def test_misdeeds_fade(monkeypatch):
    """A peer that errs now and then is not banned; one that goes on is, and longer each time."""
    now = 0.0
    book = Scores(clock=lambda: now)
    for _ in range(12):
        assert not book.blame("peer", Misdeed.GARBAGE)
        now += scores.HALF_LIFE_S
    assert book.score("peer") < 20
    lasted = []
    for _ in range(3):
        while not book.blame("peer", Misdeed.FORGED_VALUE):
            pass
        began = now
        while book.is_banned("peer"):
            now += 600
        lasted.append(now - began)
    assert lasted == [scores.BAN_S, 2 * scores.BAN_S, 4 * scores.BAN_S]


def test_address_of_many_banned_peers_is_banned(tmp_path):
    """Attack: a new identity after each ban, from the same network."""
    book = Scores(tmp_path / "bans.json")
    for number in range(scores.BANNED_PEERS_PER_ADDRESS):
        assert not book.is_banned_address("203.0.113.9")
        for _ in range(2):
            book.blame(f"peer {number}", Misdeed.WINDOW, ip="203.0.113.7")
            book.blame(f"local {number}", Misdeed.WINDOW, ip="127.0.0.1")
    assert book.is_banned_address("203.0.113.9")
    assert not book.is_banned_address("203.0.114.9")
    assert not book.is_banned_address("127.0.0.1")
    book.save()
    assert Scores(tmp_path / "bans.json").is_banned_address("203.0.113.1")


def test_scores_are_bounded(monkeypatch):
    """Attack: misbehave a little under a million identities."""
    monkeypatch.setattr(scores, "MAX_SCORED", 50)
    monkeypatch.setattr(scores, "MAX_BANS", 20)
    book = Scores()
    for number in range(200):
        book.blame(f"peer {number}", Misdeed.STALL)
    assert len(book.describe()) == 50
    for number in range(100):
        for _ in range(2):
            book.blame(f"bad {number}", Misdeed.WINDOW, ip=f"10.0.{number}.1")
    assert sum(row["banned_for_s"] > 0 for row in book.describe()) == 20


@pytest.mark.parametrize("content", [b"", b"[3]", b'[{"name":"' + b"x" * 900_000, b'[{"name":"a","until_s":"x"}]'])
def test_damaged_bans_are_begun_anew(tmp_path, content):
    (tmp_path / "bans.json").write_bytes(content)
    assert Scores(tmp_path / "bans.json").describe() == []
