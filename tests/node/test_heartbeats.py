"""A node's heartbeats: who else is there, whether this is the only node with its key, whether its clock is right."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from factories import OPERATOR, make_head, make_heartbeat, make_manifest, sealed

from node import heartbeats
from node.clock import MAX_NODE_SKEW_S, now_ms
from node.heartbeats import Heartbeats, Pulse, SecondInstance, chosen
from node.instance import own_instance
from node.membership import ACTIVE_S, BeatAnswer
from node.relay_client import RelayClient
from node.status import StatusBoard
from node.swarm import Swarm
from protocol.envelope import Signed, open_envelope
from protocol.errors import ClockError, RefusedError, RelayError
from protocol.identity import Identity
from protocol.records import Head, Heartbeat

ALICE, BOB = Identity.from_phrase("alice"), Identity.from_phrase("bob")
MANIFEST = sealed(make_manifest(), OPERATOR)


def second(
    author: Identity = ALICE, *, run_id: bytes = MANIFEST.id, ago_s: float = 0.0, **changes: Any
) -> RefusedError:
    """What a relay says that hears another node with a key, with its proof."""
    beat = make_heartbeat(author, run_id, issued_at_ms=now_ms() - int(1000 * ago_s), **changes)
    return refusal(beat.data)


def refusal(evidence: bytes) -> RefusedError:
    what = "another node with the key works in this run"
    return RefusedError(what, code="second-instance", hint="stop it", evidence=evidence)


class FakeRelay:
    """A relay whose clock is wrong by so much, or that refuses, or is away."""

    def __init__(self, name: str, *, ahead_s: float = 0.0, problem: Exception | None = None) -> None:
        self.peer_id = Identity.from_phrase(name).peer_id
        self.ahead_s, self.problem = ahead_s, problem
        self.hears = 1
        self.asked_about: list[int] = []
        self.beats: list[Signed[Heartbeat]] = []

    async def post_heartbeat(self, envelope: bytes) -> BeatAnswer:
        await trio.lowlevel.checkpoint()
        if self.problem is not None:
            raise self.problem
        self.beats.append(open_envelope(envelope, Heartbeat))
        return BeatAnswer(now_ms() + int(self.ahead_s * 1000), self.hears)

    async def active(self, most: int) -> list[Signed[Heartbeat]]:
        await trio.lowlevel.checkpoint()
        self.asked_about.append(most)
        return [make_heartbeat(BOB, MANIFEST.id)][:most]


class FakeSwarm:
    def __init__(self, *relays: FakeRelay) -> None:
        self.manifest = MANIFEST
        self.clients = [cast(RelayClient, relay) for relay in relays]
        self.listeners: list[Callable[[Signed[Head]], object]] = []

    def on_head(self, listener: Callable[[Signed[Head]], object]) -> None:
        self.listeners.append(listener)

    def say_head(self, *, ahead_s: float) -> None:
        for listener in self.listeners:
            listener(make_head(MANIFEST.id, 1, issued_at_ms=now_ms() + int(ahead_s * 1000)))


class World:
    def __init__(self, directory: Path, *relays: FakeRelay, **options: Any) -> None:
        self.relays, self.swarm = relays, FakeSwarm(*relays)
        role = options.pop("role", "inference")
        self.board = StatusBoard(role=role, peer_id=ALICE.peer_id, run="test")
        pulse = Pulse(ALICE, MANIFEST.id, self.board, role=role, data_dir=directory)
        self.heart = Heartbeats(pulse, cast(Swarm, self.swarm), self.board, **options)

    async def beat(self, times: int = 1) -> None:
        with trio.fail_after(10):
            for _ in range(times):
                await self.heart._round(chosen(self.swarm.clients, ALICE.peer_id))


async def test_heartbeats_say_what_the_node_does_and_rise(tmp_path: Path) -> None:
    world = World(tmp_path, FakeRelay("relay"))
    world.board.working("generating submission 2 of step 4")
    world.board.update(checkpoint_step=3)
    world.board.details(tokens_per_s=12.5)
    await world.beat(2)
    first, second = (one.record for one in world.relays[0].beats)
    assert (first.role, first.checkpoint_step, first.tokens_per_s) == ("inference", 3, 12.5)
    assert first.activity == "working: generating submission 2 of step 4"
    assert second.sequence > first.sequence


async def test_active_nodes_are_shown(tmp_path: Path, autojump_clock: Any) -> None:
    world = World(tmp_path, FakeRelay("relay"))
    with trio.move_on_after(2 * heartbeats.BEAT_S):
        await world.heart.run()
    assert world.board.detail("active_nodes") == "1 inference"
    assert [row["peer_id"] for row in world.board.detail("active")] == [str(BOB.peer_id)]


async def test_of_many_active_nodes_a_few_are_asked_about_and_all_are_counted(
    tmp_path: Path, autojump_clock: Any
) -> None:
    """If each asked about all others, a swarm of a thousand would send each of them a thousand heartbeats."""
    relay = FakeRelay("relay")
    relay.hears = 1000
    world = World(tmp_path, relay)
    with trio.move_on_after(2 * heartbeats.BEAT_S):
        await world.heart.run()
    assert relay.asked_about == [heartbeats.SHOWN]
    assert world.board.detail("active_nodes") == "1000"


async def test_a_key_speaks_to_the_same_relays_whoever_has_it() -> None:
    relays = [cast(RelayClient, FakeRelay(f"relay {number}")) for number in range(9)]
    own = chosen(relays, ALICE.peer_id)
    assert len(own) == heartbeats.RELAYS
    assert chosen(relays[::-1], ALICE.peer_id) == own
    assert chosen(relays, BOB.peer_id) != own


# One key is one node.


@pytest.mark.parametrize("role", ["inference", "validator", "trainer"])
async def test_newcomer_with_the_key_of_a_working_node_ends(tmp_path: Path, role: str) -> None:
    """A key that was copied to a second computer."""
    world = World(tmp_path, FakeRelay("one"), FakeRelay("two", problem=second()), role=role)
    with pytest.RaisesGroup(SecondInstance, allow_unwrapped=True):
        await world.beat()


async def test_one_relay_that_lies_ends_no_node_that_was_let_in(tmp_path: Path) -> None:
    world = World(tmp_path, FakeRelay("one"), FakeRelay("two"))
    await world.beat()
    world.relays[0].problem = second()
    await world.beat()
    world.relays[1].problem = second()
    with pytest.RaisesGroup(SecondInstance, allow_unwrapped=True):
        await world.beat()


@pytest.mark.parametrize(
    "lie",
    [
        lambda own: refusal(b""),
        lambda own: refusal(b"x" * 4096),
        lambda own: refusal(make_heartbeat(ALICE, MANIFEST.id, issued_at_ms=now_ms()).data[:-1] + b"!"),
        lambda own: refusal(make_head(MANIFEST.id, 1).data),
        lambda own: second(BOB),
        lambda own: second(run_id=b"o" * 32),
        lambda own: second(ago_s=ACTIVE_S + MAX_NODE_SKEW_S + 5),
        lambda own: second(ago_s=-ACTIVE_S - MAX_NODE_SKEW_S - 5),
        lambda own: second(instance=own),
    ],
    ids=["none", "noise", "forged", "no-heartbeat", "of_another", "other-run", "old", "future", "before-the-restart"],
)
@pytest.mark.parametrize("relays", [("lies", "lets in"), ("lies", "lies", "lies")], ids=["one", "all"])
async def test_relays_that_prove_no_second_node_keep_nobody_out(
    tmp_path: Path, lie: Callable[[bytes], RefusedError], relays: Sequence[str]
) -> None:
    """A node starts again, and one of its three relays, or each of them, says that its key works elsewhere."""
    problem = lie(own_instance(tmp_path))
    world = World(
        tmp_path, *(FakeRelay(str(at), problem=problem if one == "lies" else None) for at, one in enumerate(relays))
    )
    await world.beat(3)


async def test_relays_that_are_away_end_nobody(tmp_path: Path) -> None:
    await World(tmp_path, FakeRelay("one", problem=RelayError("away"))).beat(3)


def test_restart_is_the_same_node_and_a_copied_directory_another(tmp_path: Path) -> None:
    """A whole data directory is copied to a second computer and started there."""
    first = tmp_path / "first"
    first.mkdir()
    instance = own_instance(first)
    assert own_instance(first) == instance
    shutil.copytree(first, tmp_path / "second")
    assert own_instance(tmp_path / "second") != instance
    assert own_instance(first) == instance


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"x" * 5000])
def test_damaged_instance_is_made_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "instance").write_bytes(content)
    assert own_instance(tmp_path) == own_instance(tmp_path)


# Clocks.


async def test_clock_is_told_from_ten_seconds_on(tmp_path: Path) -> None:
    world = World(tmp_path, FakeRelay("one", ahead_s=9))
    await world.beat()
    assert world.board.detail("clock") == ""
    world.relays[0].ahead_s = -11
    await world.beat()
    assert world.board.detail("clock") == "this computer's clock is 11 s ahead of the relays'"


@pytest.mark.parametrize("ahead_s", [320.0, -320.0])
async def test_node_whose_clock_is_five_minutes_off_ends(tmp_path: Path, ahead_s: float) -> None:
    world = World(tmp_path, *(FakeRelay(name, ahead_s=ahead_s) for name in ("one", "two")))
    world.swarm.say_head(ahead_s=ahead_s)
    with pytest.RaisesGroup(ClockError, allow_unwrapped=True):
        await world.beat()


async def test_relays_that_lie_about_the_time_end_nobody(tmp_path: Path) -> None:
    """All relays at hand are one attacker's; the trainer signed its heads by the right time."""
    world = World(tmp_path, *(FakeRelay(name, ahead_s=4000) for name in ("one", "two")))
    world.swarm.say_head(ahead_s=-0.2)
    await world.beat()


async def test_trainer_is_only_told(tmp_path: Path) -> None:
    world = World(tmp_path, FakeRelay("one", ahead_s=4000), obeys_clocks=False)
    await world.beat()
    assert "4000 s behind" in world.board.detail("clock")
