"""What is told of a source that fails: once for the requests that fail together, again when it says something new."""

import logging

import pytest

from p2p.shardcast import sources
from p2p.shardcast.sources import Links
from protocol.errors import RelayError


@pytest.fixture
def links(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sources.time, "monotonic", lambda: now[0])
    made = Links(http=None, sources=list)
    made.now = now
    return made


def test_requests_that_fail_together_are_one_line(links, alice, bob, caplog):
    caplog.set_level(logging.INFO)
    gone = RelayError("127.0.0.1:1 cannot be reached, or broke off: Connection refused")
    for peer in (alice, bob, alice, bob, alice):
        links.note_failure(peer.peer_id, gone)
    assert len(caplog.records) == 2
    links.note_failure(alice.peer_id, RelayError("went silent"))
    assert "went silent" in caplog.records[-1].message
    links.now[0] = sources.REPEAT_S
    links.note_failure(bob.peer_id, gone)
    assert len(caplog.records) == 4


def test_every_failure_counts_whether_it_is_told_or_not(links, alice, bob):
    for _ in range(5):
        links.note_failure(alice.peer_id, RelayError("gone"))
    mine, others = links.balancer.weights([alice.peer_id, bob.peer_id])
    assert mine < others
