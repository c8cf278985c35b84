"""The heartbeats that a relay hears: the newest of each node, in memory, and none for long.

One key is one node: while a node speaks, another one with its key is refused, which its instance tells. Bounded: beyond
MAX_HEARTS whoever the ledger does not know is forgotten first, so that keys which cost nothing push out nobody.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from node.clock import MAX_NODE_SKEW_S, SET_CLOCK
from node.membership import ACTIVE_S, MAX_ACTIVE_SHOWN, BeatAnswer
from node.relay.desk import RelayDesk, require_run
from protocol.envelope import Signed, open_envelope
from protocol.errors import ClockError, RefusedError, StaleRecordError
from protocol.identity import PeerId
from protocol.records import Heartbeat

MAX_HEARTS: Final = 4096
MAX_ANSWER_BYTES: Final = 512 << 10


@dataclass(frozen=True)
class _Heard:
    beat: Signed[Heartbeat]
    at_ms: int
    """By this relay's clock."""


class Hearts:
    """Safe for any thread."""

    def __init__(self, desk: RelayDesk, *, max_hearts: int = MAX_HEARTS) -> None:
        self._desk = desk
        self._max_hearts = max_hearts
        self._lock = threading.Lock()
        self._heard: dict[PeerId, _Heard] = {}
        """Who spoke longest ago comes first."""

    def hear(self, data: bytes, peer: PeerId) -> BeatAnswer:
        """Take a node's heartbeat. Raises ProtocolError, or RefusedError: not-yours, second-instance."""
        beat = open_envelope(data, Heartbeat)
        if beat.author != peer:
            raise RefusedError(
                f"a heartbeat of {beat.author.short}, handed in by {peer.short}",
                code="not-yours",
                hint="each node speaks for itself",
            )
        require_run(beat.record.run_id, self._desk.require_manifest(), Heartbeat.KIND)
        now_ms = self._desk.now_ms()
        _check_clock(beat, now_ms)
        with self._lock:
            self._take(beat, now_ms)
        return BeatAnswer(now_ms, self.active_count())

    def active_count(self) -> int:
        """Nodes that were heard lately."""
        since_ms = self._desk.now_ms() - int(ACTIVE_S * 1000)
        with self._lock:
            return sum(heard.at_ms >= since_ms for heard in self._heard.values())

    def active(self, most: int = MAX_ACTIVE_SHOWN) -> list[bytes]:
        """Heartbeats of nodes that were heard lately, the latest first, and no more than an answer holds."""
        since_ms = self._desk.now_ms() - int(ACTIVE_S * 1000)
        with self._lock:
            recent = [heard.beat.data for heard in reversed(self._heard.values()) if heard.at_ms >= since_ms]
        found, room = [], MAX_ANSWER_BYTES
        for data in recent[:most]:
            room -= len(data)
            if room < 0:
                break
            found.append(data)
        return found

    def _take(self, beat: Signed[Heartbeat], now_ms: int) -> None:
        held = self._heard.get(beat.author)
        if held is not None and held.beat.id != beat.id:
            if held.beat.record.instance != beat.record.instance and now_ms - held.at_ms < ACTIVE_S * 1000:
                raise second_instance(held.beat, silent_s=(now_ms - held.at_ms) / 1000)
            if held.beat.record.instance == beat.record.instance and beat.record.sequence <= held.beat.record.sequence:
                raise StaleRecordError(f"heartbeat {beat.record.sequence} after {held.beat.record.sequence}")
        self._heard.pop(beat.author, None)
        if len(self._heard) >= self._max_hearts:
            del self._heard[self._least()]
        self._heard[beat.author] = _Heard(beat, now_ms)

    def _least(self) -> PeerId:
        """Whom to forget: a stranger if there is one, of those who spoke longest ago."""
        manifest, ledger = self._desk.manifest, self._desk.ledger
        known = set() if ledger is None else ledger.state.contributors.keys()
        staff = () if manifest is None else (manifest.record.trainer_id, *manifest.record.validator_ids)
        strangers = (peer for peer in self._heard if peer not in known and peer not in staff)
        return next(strangers, next(iter(self._heard)))


def second_instance(other: Signed[Heartbeat], *, silent_s: float) -> RefusedError:
    """The refusal of a second node with one key, and the `other` one's heartbeat, without which nobody believes it."""
    return RefusedError(
        f"another node with the key of {other.author.short} works in this run: it spoke {silent_s:.0f} s ago",
        code="second-instance",
        hint="one key is one node: give this one its own --data-dir, or stop the other one and start this one"
        f" {ACTIVE_S:.0f} s later; `intellect-node id export` and `id import` move a key",
        retry_after_s=ACTIVE_S,
        evidence=other.data,
    )


def _check_clock(beat: Signed[Heartbeat], now_ms: int) -> None:
    """A heartbeat is signed just before it is sent, so its time tells the other clock both ways."""
    ahead_s = (beat.record.issued_at_ms - now_ms) / 1000
    if abs(ahead_s) > MAX_NODE_SKEW_S:
        raise ClockError(
            f"the clock of {beat.author.short} is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this "
            f"relay's; {MAX_NODE_SKEW_S:.0f} s are allowed",
            hint=f"set both computers' clocks: `{SET_CLOCK}`",
        )
