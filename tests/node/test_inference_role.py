"""What a contributor generates, and with which policy: the order that the ledger takes, whatever it hears or holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from factories import make_head, make_manifest, make_submission, make_verdict, sealed
from relay_world import Relay, loopback

from node.inference.outbox import Outbox
from node.inference.role import HeldPolicy, InferenceParts, InferenceRole
from node.status import StatusBoard
from protocol.envelope import Signed, open_envelope
from protocol.errors import ComputeError, RefusedError, RelayError
from protocol.identity import Identity
from protocol.records import Head, Receipt, Submission

ALICE, BOB, OPERATOR = (Identity.from_phrase(name) for name in ("alice", "bob", "operator"))
MANIFEST = sealed(make_manifest(), OPERATOR)


class FakeSwarm:
    """Says the heads that a test has it say; no relay is near."""

    def __init__(self, **head: Any) -> None:
        self.manifest = MANIFEST
        self.clients: list[Any] = []
        self._changed = trio.Event()
        self._sequence = 0
        self.head = self.say(**head)

    def say(self, **head: Any) -> Signed[Head]:
        self._sequence += 1
        self.head = make_head(MANIFEST.id, self._sequence, collecting=True, **head)
        self._changed.set()
        self._changed = trio.Event()
        return self.head

    async def wait_head(self, after: int) -> Signed[Head]:
        while self.head.record.sequence <= after:
            await self._changed.wait()
        await trio.lowlevel.checkpoint()
        return self.head

    async def wait_evicted(self) -> str:
        await trio.sleep_forever()
        raise AssertionError

    def choose_relay(self, **_: object) -> None:
        return None


class FakePolicies:
    """Complete policies by step."""

    def __init__(self, *steps: int) -> None:
        self.steps = list(steps)

    def newest(self, oldest_step: int) -> tuple[int, bytes, Path] | None:
        held = [step for step in self.steps if step >= oldest_step]
        return (max(held), bytes([max(held)]) * 32, Path()) if held else None


class SilentFeeds:
    async def next(self) -> None:
        await trio.sleep_forever()


class Recorder(InferenceRole):
    """Signs at once for whatever it would generate, and notes step, index and policy."""

    def __init__(self, parts: InferenceParts, made: trio.MemorySendChannel[tuple[int, int, int]]) -> None:
        super().__init__(parts)
        self._made = made

    async def produce(self, head: Head, policy: HeldPolicy) -> None:
        index = self._p.outbox.next_index(head.step)
        work = make_submission(ALICE, MANIFEST.id, step=head.step, index=index, checkpoint_step=policy.step)
        self._p.outbox.add(work, self.file(head.step, index))
        await self._made.send((head.step, index, policy.step))


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox.sqlite")


@pytest.fixture
def start(tmp_path: Path, outbox: Outbox, nursery: trio.Nursery) -> Any:
    """Start a contributor; gives what it generates, submission by submission, and its board."""

    def started(swarm: Any, policies: Any) -> tuple[trio.MemoryReceiveChannel[tuple[int, int, int]], StatusBoard]:
        board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run="test")
        compute: Any = None
        feeds: Any = SilentFeeds()
        parts = InferenceParts(ALICE, swarm, policies, compute, outbox, feeds, board, tmp_path / "work")
        sender, receiver = trio.open_memory_channel[tuple[int, int, int]](0)
        nursery.start_soon(Recorder(parts, sender).run)
        return receiver, board

    return started


def has_used(outbox: Outbox, *, step: int, policy: int, index: int = 0) -> None:
    outbox.add(make_submission(ALICE, MANIFEST.id, step=step, index=index, checkpoint_step=policy), Path("gone"))


async def test_after_a_restart_no_older_policy_is_used_than_before(autojump_clock, outbox, start) -> None:
    """The newest policy is not on the disk any more, an older one that the run still takes is."""
    has_used(outbox, step=3, policy=3)
    swarm, policies = FakeSwarm(step=3, checkpoint_step=3, oldest_checkpoint_step=1), FakePolicies(2)
    made, board = start(swarm, policies)
    with trio.fail_after(60):
        await trio.testing.wait_all_tasks_blocked()
        assert "checkpoint 3 from the relays" in board.snapshot()["activity"]
        policies.steps.append(3)
        swarm.say(step=3, checkpoint_step=3, oldest_checkpoint_step=1)
        assert await made.receive() == (3, 1, 3)


async def test_an_older_policy_that_the_run_takes_is_used_by_one_that_used_no_newer(
    autojump_clock, outbox, start
) -> None:
    has_used(outbox, step=2, policy=2)
    made, _ = start(FakeSwarm(step=3, checkpoint_step=3, oldest_checkpoint_step=1), FakePolicies(1, 2))
    with trio.fail_after(60):
        assert await made.receive() == (3, 0, 2)


class Leased(FakePolicies):
    """Knows which policies are in use."""

    def __init__(self, *steps: int) -> None:
        super().__init__(*steps)
        self.in_use: list[bytes] = []

    @contextmanager
    def kept(self, checkpoint: bytes) -> Iterator[Path | None]:
        if checkpoint[0] not in self.steps:
            yield None
            return
        self.in_use.append(checkpoint)
        try:
            yield Path()
        finally:
            self.in_use.remove(checkpoint)


async def test_a_policy_stays_on_the_disk_until_a_submission_is_made(autojump_clock, tmp_path, outbox) -> None:
    """It is read again after it was loaded; and one that was dropped meanwhile is left for a newer one."""
    policies, asked = Leased(3), []

    class Compute:
        restarts = 0

        async def call(self, method: str, **options: object) -> None:
            asked.append((method, list(policies.in_use)))
            if method == "generate":
                raise ComputeError("enough was seen")

    swarm: Any = FakeSwarm(step=3, checkpoint_step=3)
    board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run="test")
    feeds: Any = SilentFeeds()
    others: Any = (policies, Compute())
    role = InferenceRole(InferenceParts(ALICE, swarm, *others, outbox, feeds, board, tmp_path / "work"))
    held = bytes([3]) * 32
    assert await role.generate(3, 0, HeldPolicy(3, held)) is None
    assert asked == [("load", [held]), ("generate", [held])]
    assert policies.in_use == []
    assert await role.generate(3, 0, HeldPolicy(2, bytes([2]) * 32)) is None
    assert len(asked) == 2


class Slow(InferenceRole):
    """Works on its first submission until a test lets it finish."""

    def __init__(self, parts: InferenceParts) -> None:
        super().__init__(parts)
        self.started, self.may_finish = trio.Event(), trio.Event()

    async def produce(self, head: Head, policy: HeldPolicy) -> None:
        self.started.set()
        await self.may_finish.wait()
        self._p.outbox.add(make_submission(ALICE, MANIFEST.id, step=head.step), self.file(head.step, 0))


@pytest.fixture
def slow(tmp_path: Path, outbox: Outbox) -> Any:
    def made(swarm: Any) -> tuple[Slow, StatusBoard]:
        board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run="test")
        compute: Any = None
        feeds: Any = SilentFeeds()
        policies: Any = FakePolicies(3)
        return Slow(InferenceParts(ALICE, swarm, policies, compute, outbox, feeds, board, tmp_path / "work")), board

    return made


async def test_who_leaves_finishes_what_is_under_way_and_begins_nothing(autojump_clock, outbox, slow, nursery) -> None:
    role, board = slow(FakeSwarm(step=3, checkpoint_step=3))
    nursery.start_soon(role.run)
    with trio.fail_after(60):
        await role.started.wait()
        async with trio.open_nursery() as leaving:
            leaving.start_soon(role.leave, 30)
            await trio.testing.wait_all_tasks_blocked()
            assert board.snapshot()["activity"] == "finishing what is being generated, within 30 s"
            role.may_finish.set()
        assert outbox.count("ready") == 1, "no relay is near: it waits for the next start"
        assert board.snapshot()["state"] == "stopping"
        await trio.sleep(20)
        assert outbox.count("ready") == 1


async def test_leaving_has_a_deadline(autojump_clock, outbox, slow, nursery, caplog) -> None:
    caplog.set_level("INFO")
    role, _ = slow(FakeSwarm(step=3, checkpoint_step=3))
    nursery.start_soon(role.run)
    with trio.fail_after(60):
        await role.started.wait()
        began = trio.current_time()
        await role.leave(10)
        assert trio.current_time() - began == 10
    assert "unfinished_work_lost=True" in caplog.text


class Moody:
    """A relay that breaks off the first few times, and notes what it took."""

    peer_id = BOB.peer_id

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.took: list[int] = []

    async def submit(self, envelope: bytes, path: Path) -> Any:
        await trio.lowlevel.checkpoint()
        if self.failures:
            self.failures -= 1
            raise RelayError("broke off", hint="")
        work = open_envelope(envelope, Submission)
        self.took.append(work.record.index)
        return sealed(Receipt(run_id=MANIFEST.id, submission=work.id, head_sequence=1, received_at_ms=1), BOB)


@pytest.mark.parametrize(("failures", "taken"), [(0, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (99, [])])
async def test_who_leaves_hands_in_by_index(failures, taken, autojump_clock, tmp_path, outbox) -> None:
    """What followed one that no relay took would be accepted, and never entered: the ledger goes by index."""
    swarm: Any = FakeSwarm(step=3, checkpoint_step=3)
    relay = Moody(failures)
    swarm.choose_relay = lambda avoid=None: relay
    swarm.failed = lambda peer: None
    policies: Any = FakePolicies(3)
    feeds: Any = SilentFeeds()
    compute: Any = None
    board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run="test")
    role = InferenceRole(InferenceParts(ALICE, swarm, policies, compute, outbox, feeds, board, tmp_path / "work"))
    for index in range(4):
        has_used(outbox, step=3, policy=3, index=index)
    with trio.fail_after(60):
        async with trio.open_nursery() as both:
            both.start_soon(role.leave, 30)
            both.start_soon(role.leave, 30)
    assert relay.took == taken
    assert outbox.count("ready") == 4 - len(taken)


class Refusing(Moody):
    """A relay that refuses the first few times."""

    def __init__(self, code: str, failures: int) -> None:
        super().__init__(0)
        self.code, self.refusals = code, failures

    async def submit(self, envelope: bytes, path: Path) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise RefusedError("no", code=self.code)
        return await super().submit(envelope, path)


def offering(tmp_path: Path, outbox: Outbox, relay: Moody, **head: Any) -> InferenceRole:
    """A contributor with two finished submissions of step 3, and this relay."""
    swarm: Any = FakeSwarm(step=3, checkpoint_step=3, **head)
    swarm.choose_relay = lambda avoid=None: relay
    nothing: Any = None
    policies: Any = FakePolicies(3)
    feeds: Any = SilentFeeds()
    board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run="test")
    for index in range(2):
        has_used(outbox, step=3, policy=2, index=index)
    return InferenceRole(InferenceParts(ALICE, swarm, policies, nothing, outbox, feeds, board, tmp_path / "work"))


@pytest.mark.parametrize("code", ["internal", "http-413", "over-budget", "not-found", "disk-full", "brand-new"])
async def test_work_that_a_relay_may_take_later_is_not_lost(code, autojump_clock, tmp_path, outbox) -> None:
    """A relay's own fault, a proxy before it, a code of a later release: none of that is about the work."""
    relay = Refusing(code, 1)
    with trio.fail_after(60):
        await offering(tmp_path, outbox, relay).leave(30)
    assert relay.took == [0, 1]
    assert outbox.count("received") == 2


@pytest.mark.parametrize("code", ["over-cap", "duplicate-index", "malformed", "stale-step"])
async def test_work_that_no_relay_ever_takes_is_settled(code, autojump_clock, tmp_path, outbox) -> None:
    relay = Refusing(code, 1)
    with trio.fail_after(60):
        await offering(tmp_path, outbox, relay).leave(30)
    assert relay.took == []
    assert outbox.reasons() == {code: 1, "after-refused": 1}


async def test_work_that_is_refused_until_its_policy_is_too_old_is_settled(autojump_clock, tmp_path, outbox) -> None:
    """Sixteen such, waiting for ever, and the node would generate no more."""
    relay = Refusing("brand-new", 99)
    with trio.fail_after(60):
        await offering(tmp_path, outbox, relay, oldest_checkpoint_step=3).leave(30)
    assert outbox.reasons() == {"brand-new": 1, "after-refused": 1}
    assert outbox.count("ready") == 0


@asynccontextmanager
async def with_one_relay(tmp_path: Path, slow: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A role at step 3, and its swarm, of which the one relay does not answer: files are looked at first."""
    swarm: Any = FakeSwarm(step=3, checkpoint_step=3)
    role, _ = slow(swarm)
    async with loopback() as (aio, http):
        relay = Relay(BOB, tmp_path / "relay", aio)
        relay.url = "https://127.0.0.1:1"
        swarm.choose_relay = lambda avoid=None: relay.client(http)
        with trio.fail_after(20):
            yield role, swarm
        relay.close()


async def test_a_file_that_was_deleted_is_given_up_and_what_followed_it(tmp_path, outbox, slow) -> None:
    """Somebody made room on a full disk: the node goes on with the next step, now and after each start."""
    has_used(outbox, step=3, policy=3)
    has_used(outbox, step=3, policy=3, index=1)
    async with with_one_relay(tmp_path, slow) as (role, _):
        assert await role._send_ready()
    assert outbox.reasons() == {"lost": 1, "after-refused": 1}


async def test_a_file_that_cannot_be_read_now_is_kept_for_later(tmp_path, outbox, slow, caplog) -> None:
    (tmp_path / "file").touch()
    outbox.add(make_submission(ALICE, MANIFEST.id, step=3), tmp_path / "file" / "below")
    async with with_one_relay(tmp_path, slow) as (role, swarm):
        assert not await role._send_ready()
        assert outbox.count("ready") == 1
        swarm.say(step=9, checkpoint_step=9, oldest_checkpoint_step=5)
        assert await role._send_ready(), "no relay takes it any more: it stands in nobody's way"
    assert outbox.reasons() == {"lost": 1}
    assert "Not a directory" in caplog.text


async def test_the_first_accepted_work_is_told_with_where_its_proof_lies(outbox, slow) -> None:
    role, board = slow(FakeSwarm(step=3, checkpoint_step=3))
    works = [make_submission(ALICE, MANIFEST.id, step=3, index=index) for index in range(2)]
    for work in works:
        outbox.add(work, Path(work.id.hex()))
        verdict = make_verdict(work)
        assert outbox.judged(verdict)
        role._celebrate(verdict)
        first = board.detail("first_accepted")
        assert (first["submission"], first["kept"]) == (works[0].id.hex(), str(outbox.path))
    assert first["rollouts"] == works[0].record.rollouts


async def test_a_head_that_is_behind_makes_no_work(autojump_clock, outbox, start) -> None:
    """After a restart, the only relay that answers lags a step."""
    has_used(outbox, step=4, policy=3)
    swarm = FakeSwarm(step=3, checkpoint_step=3)
    made, board = start(swarm, FakePolicies(3, 4))
    with trio.fail_after(60):
        await trio.testing.wait_all_tasks_blocked()
        assert "step 4" in board.snapshot()["activity"]
        swarm.say(step=4, checkpoint_step=4)
        assert await made.receive() == (4, 1, 4)
