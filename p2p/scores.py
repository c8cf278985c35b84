"""What peers have done wrong: named misdeeds with a cost, scores that decay, and bans that outlive a restart.

A peer whose score reaches BAN_SCORE is banned; the ban of one that comes back to it lasts longer. An address that many
banned peers came from is banned with them, loopback excepted. Everything is bounded: a new identity costs nothing, so
what is remembered must not either.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from p2p.addresses import Scope, neighbourhood, scope_of_ip
from protocol.atomic import write_atomically

log = logging.getLogger(__name__)

BAN_SCORE: Final = 100.0
HALF_LIFE_S: Final = 600.0
BAN_S: Final = 3600.0
MAX_BAN_S: Final = 12 * 3600.0
BANNED_PEERS_PER_ADDRESS: Final = 5
MAX_SCORED: Final = 4096
MAX_BANS: Final = 1024
MAX_FILE_BYTES: Final = 512 * 1024


class Misdeed(Enum):
    """What a peer can do wrong: the name that is shown, and what one time costs."""

    GARBAGE = ("sent bytes that do not decode", 20)
    OVERSIZED = ("announced a message beyond the limit", 20)
    STALL = ("began a message and did not end it", 10)
    FLOOD = ("opened streams or sent requests beyond its share", 5)
    WINDOW = ("pushed data beyond the receive window", 60)
    FORGED_VALUE = ("put a value that its key's owner did not sign", 50)
    BAD_ANSWER = ("answered a request with something else", 20)

    def __init__(self, what: str, cost: int) -> None:
        self.what = what
        self.cost = cost


class Ban(msgspec.Struct):
    """Until when a peer or a neighbourhood is shut out, and how many times it has been."""

    name: Annotated[str, Meta(max_length=80)]
    until_s: float
    times: Annotated[int, Meta(ge=1, le=1000)]
    why: Annotated[str, Meta(max_length=160)] = ""


@dataclass
class _Score:
    value: float = 0.0
    at_s: float = 0.0
    misdeeds: Counter[Misdeed] = field(default_factory=Counter)

    def now(self, clock_s: float) -> float:
        return float(self.value * 0.5 ** (max(0.0, clock_s - self.at_s) / HALF_LIFE_S))


class Scores:
    """Misdeeds of peers by id. `path` keeps the bans; None keeps them in memory."""

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._scores: dict[str, _Score] = {}
        self._bans: dict[str, Ban] = {ban.name: ban for ban in _read(path)} if path else {}
        self._banned_from: dict[str, set[str]] = {}
        self.unsaved = False

    def blame(self, peer: object, misdeed: Misdeed, *, ip: str | None = None) -> bool:
        """Count a misdeed; return whether the peer is banned now."""
        name, now_s = str(peer), self._clock()
        score = self._scores.pop(name, None) or _Score()
        score.value, score.at_s = score.now(now_s) + misdeed.cost, now_s
        score.misdeeds[misdeed] += 1
        self._scores[name] = score
        self._forget_the_oldest()
        if score.value >= BAN_SCORE:
            self._ban(name, misdeed.what)
            self._ban_address(name, ip)
        return self.is_banned(name)

    def score(self, peer: object) -> float:
        """0 for who has done nothing; BAN_SCORE is too much. Halves every HALF_LIFE_S."""
        held = self._scores.get(str(peer))
        return held.now(self._clock()) if held else 0.0

    def is_banned(self, peer: object) -> bool:
        return self._is_in_force(str(peer))

    def is_banned_address(self, ip: str) -> bool:
        return self._is_in_force(neighbourhood(ip))

    def describe(self) -> list[dict[str, Any]]:
        """Everyone that has done something wrong or is banned, the worst first, as plain values for people."""
        now_s = self._clock()
        rows = [self._row(name, now_s) for name in {*self._scores, *self._bans}]
        return sorted((row for row in rows if row["score"] >= 1 or row["banned_for_s"]), key=lambda row: -row["score"])

    def save(self) -> None:
        """Write the bans, atomically. Blocks."""
        if self._path is None:
            return
        self.unsaved = False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(list(self._bans.values())), indent=1))

    def _row(self, name: str, now_s: float) -> dict[str, Any]:
        score, ban = self._scores.get(name), self._bans.get(name)
        return {
            "peer_id": name,
            "score": round(score.now(now_s), 1) if score else 0.0,
            "misdeeds": {each.name.lower(): count for each, count in score.misdeeds.items()} if score else {},
            "banned_for_s": max(0, round(ban.until_s - now_s)) if ban else 0,
            "why": ban.why if ban else "",
        }

    def _is_in_force(self, name: str) -> bool:
        ban = self._bans.get(name)
        return ban is not None and ban.until_s > self._clock()

    def _ban(self, name: str, why: str) -> None:
        before = self._bans.pop(name, None)
        times = before.times + 1 if before else 1
        lasts_s = min(MAX_BAN_S, BAN_S * 2.0 ** min(times - 1, 10))
        self._bans[name] = Ban(name, self._clock() + lasts_s, min(times, 1000), why)
        self._scores.pop(name, None)
        while len(self._bans) > MAX_BANS:
            del self._bans[min(self._bans, key=lambda each: self._bans[each].until_s)]
        self.unsaved = True
        log.warning("banned peer=%s for_s=%.0f times=%d why=%r", name, lasts_s, times, why)

    def _ban_address(self, name: str, ip: str | None) -> None:
        if ip is None or scope_of_ip(ip) == Scope.LOOPBACK:
            return
        area = neighbourhood(ip)
        banned = self._banned_from.setdefault(area, set())
        banned.add(name)
        if len(banned) >= BANNED_PEERS_PER_ADDRESS:
            del self._banned_from[area]
            self._ban(area, f"{BANNED_PEERS_PER_ADDRESS} banned peers came from there")
        elif len(self._banned_from) > MAX_BANS:
            del self._banned_from[next(iter(self._banned_from))]

    def _forget_the_oldest(self) -> None:
        while len(self._scores) > MAX_SCORED:
            del self._scores[next(iter(self._scores))]


def _read(path: Path) -> list[Ban]:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=list[Ban])[:MAX_BANS]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("bans_unreadable path=%s error=%s next=starting_without", path, error)
        return []
