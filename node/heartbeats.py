"""A node's heartbeats: it says at relays that it is there, sees who else is, and notices two things in the answers.

Another node with its own key: one key is one node, so whoever comes second ends, with a message. No relay is believed
there: it must show what the other one signed. And a clock that is wrong: told from 10 seconds on, and from five minutes
on the node ends, because others would refuse what it signs. Relays are chosen by the key, so two nodes with one key
meet at the same ones.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import trio

from node.clock import MAX_NODE_SKEW_S, SET_CLOCK, WARN_SKEW_S, now_ms
from node.instance import own_instance
from node.membership import ACTIVE_S, BEAT_S
from node.relay_client import RelayClient
from node.status import StatusBoard
from node.swarm import Swarm
from node.version import SOFTWARE
from protocol.constants import PROTOCOL_VERSION
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import ClockError, NodeError, ProtocolError, RefusedError, RelayError
from protocol.identity import Identity, PeerId
from protocol.records import Head, Heartbeat

log = logging.getLogger(__name__)

Role = Literal["trainer", "relay", "inference", "validator"]

RELAYS: Final = 3
EVERY_BEATS: Final = 3
"""Who else is there is asked at every third beat."""
TIMEOUT_S: Final = 8.0
SHOWN: Final = 16
"""Of the others that are active, those who spoke last: what a node asks for must not grow with the swarm."""


class SecondInstance(NodeError):
    """Raised when another node works with this node's key, and was there before."""


class Pulse:
    """Makes one node's heartbeats; sequences rise over restarts."""

    def __init__(self, identity: Identity, run_id: bytes, board: StatusBoard, *, role: Role, data_dir: Path) -> None:
        self.identity = identity
        self._run_id = run_id
        self._board = board
        self._role: Role = role
        self._instance = own_instance(data_dir)
        self._sequence = 0

    def beat(self) -> bytes:
        """A heartbeat of now."""
        said, now = self._board.brief(), now_ms()
        self._sequence = max(self._sequence + 1, now)
        speed = self._board.detail("tokens_per_s")
        record = Heartbeat(
            run_id=self._run_id,
            role=self._role,
            instance=self._instance,
            sequence=self._sequence,
            software=SOFTWARE,
            protocol=PROTOCOL_VERSION,
            checkpoint_step=said["checkpoint_step"],
            tokens_per_s=float(speed) if isinstance(speed, int | float) else 0.0,
            activity=f"{said['state']}: {said['activity']}"[:128],
            issued_at_ms=now,
        )
        return seal(record, self.identity)


@dataclass(frozen=True)
class Heard:
    """One relay's answer to a heartbeat."""

    active: int
    """Nodes that it hears."""
    ahead_s: float
    """How far its clock is ahead of this one."""


class Presence:
    """Heartbeats at a few relays, round by round, as long as none proves another node with this key."""

    def __init__(self, *, refusals_level: int = logging.INFO) -> None:
        self.was_let_in = False
        """By any relay in an earlier round."""
        self._level = refusals_level

    async def speak(self, beat: bytes, relays: Iterable[RelayClient], *, hint: str | None = None) -> list[Heard]:
        """One heartbeat for all of them. What they say together is judged; one that errs or lies ends nobody.

        Only what proves another node ends a node that is new, or that no relay lets in any more: raises SecondInstance,
        with `hint` or the relay's own.
        """
        heard: list[Heard] = []
        refusals: list[RefusedError] = []

        async def tell(client: RelayClient) -> None:
            try:
                with trio.move_on_after(TIMEOUT_S):
                    sent_ms = now_ms()
                    answer = await client.post_heartbeat(beat)
                    heard.append(Heard(answer.active, (answer.now_ms - (sent_ms + now_ms()) / 2) / 1000))
            except RefusedError as error:
                said = (client.peer_id.short, error.code, error.message)
                log.log(self._level, "heartbeat relay=%s code=%s error=%r", *said)
                if shows_second(error, beat, relay=client.peer_id):
                    refusals.append(error)
            except (RelayError, ProtocolError) as error:
                log.debug("heartbeat relay=%s error=%r", client.peer_id.short, error.message)

        async with trio.open_nursery() as nursery:
            for client in relays:
                nursery.start_soon(tell, client)
        if refusals and not (heard and self.was_let_in):
            raise SecondInstance(refusals[0].message, hint=refusals[0].hint if hint is None else hint)
        self.was_let_in = self.was_let_in or bool(heard)
        return heard


class Heartbeats:
    """`run` it beside a role that is no relay. Raises SecondInstance, or ClockError."""

    def __init__(self, pulse: Pulse, swarm: Swarm, board: StatusBoard, *, obeys_clocks: bool = True) -> None:
        """Without `obeys_clocks` a wrong clock is only told: the trainer's is what others are held against."""
        self._pulse = pulse
        self._swarm = swarm
        self._board = board
        self._obeys = obeys_clocks
        self._presence = Presence()
        self._active = 0
        """Nodes that a relay hears, by its last answer."""
        self._head_ahead_s: float | None = None
        self._warned = False
        swarm.on_head(self._note_head)

    async def run(self) -> None:
        for count in range(2**62):
            relays = chosen(self._swarm.clients, self._pulse.identity.peer_id)
            await self._round(relays)
            if relays and count % EVERY_BEATS == 0:
                await self._look_around(relays)
            await trio.sleep(BEAT_S if relays else 1.0)

    async def _round(self, relays: Sequence[RelayClient]) -> None:
        heard = await self._presence.speak(self._pulse.beat(), relays)
        if heard:
            self._active = heard[-1].active
            self._judge_clock(statistics.median(one.ahead_s for one in heard))

    def _note_head(self, head: Signed[Head]) -> None:
        """Heads are passed on as soon as they are signed, so a new one tells the trainer's clock."""
        self._head_ahead_s = (head.record.issued_at_ms - now_ms()) / 1000

    def _judge_clock(self, ahead_s: float) -> None:
        """`ahead_s`: how far the relays' clocks are ahead of this one."""
        self._board.details(clock=clock_text(ahead_s))
        if abs(ahead_s) <= WARN_SKEW_S:
            return
        if not self._warned:
            self._warned = True
            log.warning("%s", clock_text(ahead_s))
        if self._obeys and abs(ahead_s) > MAX_NODE_SKEW_S and self._trainer_agrees(ahead_s):
            raise ClockError(
                f"{clock_text(ahead_s)}; beyond {MAX_NODE_SKEW_S:.0f} s others refuse what it signs",
                hint=f"set the clock: {SET_CLOCK}",
            )

    def _trainer_agrees(self, ahead_s: float) -> bool:
        """Relays could lie together; the trainer's signature is on the time of its heads."""
        heard_s = self._head_ahead_s
        return heard_s is not None and heard_s * ahead_s > 0 and abs(heard_s) > MAX_NODE_SKEW_S / 2

    async def _look_around(self, relays: Sequence[RelayClient]) -> None:
        for client in relays:
            try:
                with trio.move_on_after(TIMEOUT_S):
                    beats = await client.active(SHOWN)
                    self._board.details(active=describe(beats), active_nodes=count_text(beats, self._active))
                    return
            except (RelayError, ProtocolError) as error:
                log.debug("heartbeats relay=%s error=%r", client.peer_id.short, error.message)


def chosen(clients: Sequence[RelayClient], peer: PeerId) -> list[RelayClient]:
    """The relays that a key speaks to: the same for whoever has it."""

    def distance(client: RelayClient) -> bytes:
        return hashlib.sha256(peer.public_key + client.peer_id.public_key).digest()

    return sorted(clients, key=distance)[:RELAYS]


def shows_second(error: RefusedError, own: bytes, *, relay: PeerId) -> bool:
    """Whether a refusal of the heartbeat `own` proves another node with its key.

    Its evidence has to be a heartbeat that this key signed lately, in this run, for another instance. What this very
    data directory said before a restart is of the same instance, and proves nothing.
    """
    if error.code != "second-instance":
        return False
    try:
        mine, other = open_envelope(own, Heartbeat), open_envelope(error.evidence, Heartbeat)
    except ProtocolError as problem:
        return _unproved(relay, problem.message)
    if other.author != mine.author or other.record.run_id != mine.record.run_id:
        return _unproved(relay, "its evidence is of another key, or of another run")
    if other.record.instance == mine.record.instance:
        return _unproved(relay, "its evidence is this node's own")
    if abs(now_ms() - other.record.issued_at_ms) > 1000 * (ACTIVE_S + MAX_NODE_SKEW_S):
        return _unproved(relay, "its evidence is too old")
    return True


def _unproved(relay: PeerId, why: str) -> bool:
    log.warning("heartbeat relay=%s says that another node has this key, without proof: %s", relay.short, why)
    return False


def clock_text(ahead_s: float) -> str:
    """What to think of this computer's clock; empty while it is right."""
    if abs(ahead_s) <= WARN_SKEW_S:
        return ""
    way = "behind" if ahead_s > 0 else "ahead of"
    return f"this computer's clock is {abs(ahead_s):.0f} s {way} the relays'"


def describe(beats: Sequence[Signed[Heartbeat]]) -> list[dict[str, Any]]:
    """Active nodes as plain values, for status and `peers`."""
    return [
        {
            "peer_id": str(beat.author),
            "role": beat.record.role,
            "software": beat.record.software,
            "checkpoint_step": beat.record.checkpoint_step,
            "tokens_per_s": beat.record.tokens_per_s,
            "activity": beat.record.activity,
            "at_ms": beat.record.issued_at_ms,
        }
        for beat in beats[:SHOWN]
    ]


def count_text(beats: Sequence[Signed[Heartbeat]], active: int) -> str:
    """How many nodes are active, in a line: of each role, or in all where some were not asked about."""
    if len(beats) < active:
        return str(active)
    counts = Counter(beat.record.role for beat in beats)
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))


async def beat_at_home(pulse: Callable[[], Pulse | None], hear: Callable[[bytes, PeerId], object]) -> None:
    """A relay hears its own heart, once it knows its run."""
    while True:
        made = pulse()
        if made is not None:
            try:
                hear(made.beat(), made.identity.peer_id)
            except (ProtocolError, RefusedError) as error:
                log.info("own heartbeat error=%r", error.message)
        await trio.sleep(BEAT_S)
