"""FanOut: which shards the trainer gives to which relays, as they come and go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from p2p.shardcast.fan_out import FanOut, draw_shares
from protocol.identity import Identity, PeerId

RELAYS = [Identity.from_phrase(f"relay {number}").peer_id for number in range(8)]
SHARDS = 500
ALL = (1 << SHARDS) - 1


class Origin:
    """A fan-out at a time that a test sets."""

    def __init__(self, limit: int) -> None:
        self.now = 0.0
        self.fan_out = FanOut(self._holder, limit, lapse_s=10.0, clock=lambda: self.now)

    def asks(self, relay: PeerId | str, shards: int = ALL, *, step: int = 1) -> int:
        return self.fan_out(SimpleNamespace(headers={"Authorization": str(relay)}), step, shards)

    def _holder(self, authorization: str) -> PeerId | None:
        return next((relay for relay in RELAYS if str(relay) == authorization), None)


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_every_shard_is_for_so_many_relays_and_all_have_about_as_many(limit: int) -> None:
    shares = draw_shares(RELAYS, SHARDS, limit=limit)
    for index in range(SHARDS):
        assert sum(share >> index & 1 for share in shares.values()) == limit
    expected = SHARDS * limit / len(RELAYS)
    assert all(0.6 * expected < share.bit_count() < 1.4 * expected for share in shares.values())


def test_few_relays_may_have_everything() -> None:
    origin = Origin(limit=2)
    assert [origin.asks(relay) for relay in RELAYS[:2]] == [ALL, ALL]
    assert origin.asks(RELAYS[2]) != ALL


def test_strangers_get_nothing() -> None:
    assert Origin(limit=4).asks("somebody") == 0


def test_only_the_shards_of_a_relay_that_comes_or_goes_change_hands() -> None:
    origin = Origin(limit=1)
    for relay in RELAYS:
        origin.asks(relay)
    before = {relay: origin.asks(relay) for relay in RELAYS}
    origin.now = 9.0
    for relay in RELAYS[1:]:
        origin.asks(relay)
    assert origin.asks(RELAYS[1]) == before[RELAYS[1]]  # the first one may still come back
    origin.now = 11.0
    after = {relay: origin.asks(relay) for relay in RELAYS[1:]}
    assert sum(after.values()) == ALL
    assert all(after[relay] & before[relay] == before[relay] for relay in after)
    origin.asks(RELAYS[0])
    assert {relay: origin.asks(relay) for relay in RELAYS} == before


def test_a_request_that_waits_keeps_nobody_alive() -> None:
    """A relay died while the origin held back its answer, and is looked at again and again."""
    origin = Origin(limit=1)
    waiting = SimpleNamespace(headers={"Authorization": str(RELAYS[0])})
    origin.fan_out(waiting, 1, ALL)
    assert origin.asks(RELAYS[1]) != ALL
    for origin.now in (4.0, 8.0, 12.0):
        origin.fan_out(waiting, 1, ALL)
        share = origin.asks(RELAYS[1])
    assert share == ALL


def test_a_checkpoint_that_is_still_hashed_keeps_its_shares() -> None:
    origin = Origin(limit=2)
    for relay in RELAYS:
        origin.asks(relay, 1)
    early = [origin.asks(relay, 0b111) for relay in RELAYS]
    assert [origin.asks(relay) & 0b111 for relay in RELAYS] == early


def test_steps_are_apart_and_old_ones_are_forgotten() -> None:
    origin = Origin(limit=1)
    for relay in RELAYS[:2]:
        origin.asks(relay, step=1)
    assert origin.asks(RELAYS[0], step=2) == ALL
    for step in range(3, 20):
        origin.asks(RELAYS[0], step=step)
    assert len(origin.fan_out._steps) <= 8
