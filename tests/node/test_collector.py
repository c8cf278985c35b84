"""The trainer's collector: from feeds to the ledger, in whatever order relays and validators speak."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from collector_world import ALICE, BOB, CARL, DAVE, RUN, World, worlds
from factories import make_batch, make_manifest, make_submission, make_verdict

from node.ledger.memory import node_memory
from node.ledger.scratch import ScratchMap


@pytest.fixture
def world(tmp_path: Path) -> World:
    return worlds(tmp_path)


async def test_accepted_submission_enters_with_its_verdict_after_its_file(world: World) -> None:
    submission = make_submission(ALICE, RUN)
    await world.hear(submission, make_verdict(submission))
    assert world.state.shelf.usable(0) == [submission.id]
    assert world.collector.file(submission.id).read_bytes() == b"rollouts"


async def test_a_file_that_cannot_be_deleted_ends_no_trainer(world: World, caplog: pytest.LogCaptureFixture) -> None:
    submission = make_submission(ALICE, RUN)
    world.collector.file(submission.id).mkdir(parents=True)  # as good as a disk that refuses it
    world.collector.discard(submission.id)
    assert "cannot be deleted" in caplog.text


async def test_verdict_may_come_before_its_submission(world: World) -> None:
    """Two relays: one announces the verdict before the other announces the submission."""
    submission = make_submission(ALICE, RUN)
    await world.hear(make_verdict(submission), submission)
    assert world.state.shelf.usable(0) == [submission.id]


async def test_nothing_is_accepted_before_its_file_is_on_disk(world: World) -> None:
    submission = make_submission(ALICE, RUN)
    world.relay.away = True
    await world.hear(submission, make_verdict(submission))
    assert world.state.length == 0
    world.relay.away = False
    await world.hear(make_verdict(submission))
    assert world.state.shelf.usable(0) == [submission.id]


async def test_later_indices_wait_for_earlier_ones(world: World) -> None:
    """Verdicts come out of order; the ledger takes one contributor's submissions by index."""
    first, second, third = (make_submission(ALICE, RUN, index=index) for index in range(3))
    await world.hear(third, make_verdict(third), second, make_verdict(second))
    assert world.state.length == 0
    await world.hear(first, make_verdict(first))
    assert [one.record.index for one in world.state.submissions.values()] == [0, 1, 2]


async def test_repeats_change_nothing(world: World) -> None:
    submission = make_submission(ALICE, RUN)
    await world.hear(submission, make_verdict(submission), submission, make_verdict(submission))
    assert world.state.length == 2
    assert world.relay.fetched == 1


async def test_hard_rejection_evicts_and_costs_no_download(world: World) -> None:
    submission = make_submission(ALICE, RUN)
    await world.hear(submission, make_verdict(submission, outcome="reject", hard=True, reason="toploc: other model"))
    assert world.state.evicted == {ALICE.peer_id}
    assert world.relay.fetched == 0


async def test_undecided_is_noted_and_holds_nobody_up(world: World) -> None:
    first, second = make_submission(ALICE, RUN), make_submission(ALICE, RUN, index=1)
    await world.hear(first, make_verdict(first, outcome="undecided", reason="the engine failed"))
    await world.hear(second, make_verdict(second))
    assert world.state.shelf.usable(0) == [second.id]
    assert world.state.evicted == set()


async def test_pending_counts_what_a_batch_could_still_use(world: World) -> None:
    waiting, judged = make_submission(ALICE, RUN), make_submission(BOB, RUN)
    await world.hear(waiting, judged, make_verdict(judged))
    assert world.collector.pending(0) == 1
    assert world.collector.pending(5) == 0, "its policy is too old for step 5"
    assert not world.collector.has_all()


async def test_the_end_waits_for_work_that_is_too_old_to_be_trained(world: World) -> None:
    """Accepted work is credited, however late: the last look at the feeds asks for no policy's age."""
    for step in range(3):
        filler = make_submission(BOB, RUN, step=step, checkpoint_step=step)
        world.ledger.append([filler.data, make_verdict(filler).data, make_batch(RUN, step, [filler])])
    late = make_submission(ALICE, RUN)
    await world.hear(late)
    assert world.collector.pending(3) == 0
    assert not world.collector.has_all()
    await world.hear(make_verdict(late))
    assert world.collector.has_all()


async def test_the_end_waits_for_what_is_accepted_and_not_yet_in_the_ledger(world: World) -> None:
    """Its verdict came before the one about the submission before it, or before its file."""
    first, second = (make_submission(ALICE, RUN, index=index) for index in range(2))
    await world.hear(second, make_verdict(second))
    assert not world.collector.has_all()
    await world.hear(first, make_verdict(first))
    assert world.collector.has_all()


async def test_evicted_contributors_are_not_waited_for(world: World) -> None:
    """Back-pressure: a cheat's unjudged submissions must not make honest contributors pause."""
    bad, rest = make_submission(ALICE, RUN), make_submission(ALICE, RUN, index=1)
    await world.hear(bad, make_verdict(bad, outcome="reject", hard=True, reason="seed: another"), rest)
    assert world.collector.pending(0) == 0
    assert world.collector.has_all()
    await world.hear(make_verdict(rest, outcome="reject", hard=True, reason="seed: another"))
    await world.hear(make_verdict(rest, outcome="reject", hard=True, reason="seed: another"))
    assert world.collector.has_all(), "a second relay repeats what the ledger does not take from somebody evicted"


async def test_stale_rollouts_are_counted_and_deleted_and_never_in_a_batch(world: World) -> None:
    submission = make_submission(ALICE, RUN)
    await world.hear(submission, make_verdict(submission))
    assert [world.collector.drop_stale(step) for step in range(2)] == [0, 0]
    assert world.collector.file(submission.id).exists()
    assert world.state.shelf.usable(1) == [submission.id]
    assert world.collector.drop_stale(2) == submission.record.rollouts
    assert not world.collector.file(submission.id).exists()
    assert world.state.shelf.usable(2) == []


async def test_a_file_too_old_for_the_step_is_not_fetched(world: World) -> None:
    """A slow contributor's work costs a line in the ledger, and no traffic."""
    for step in range(2):
        filler = make_submission(BOB, RUN, step=step, checkpoint_step=step)
        world.ledger.append([filler.data, make_verdict(filler).data, make_batch(RUN, step, [filler])])
    late = make_submission(ALICE, RUN)
    await world.hear(late, make_verdict(late))
    assert world.state.submissions[late.id].state == "accepted"
    assert world.relay.fetched == 0
    assert world.state.shelf.usable(2) == []
    assert world.collector.drop_stale(2) == late.record.rollouts


async def test_what_relays_repeat_after_a_restart_leaves_no_old_submission_in_memory(tmp_path: Path) -> None:
    """A trainer that starts again hears its relays' feeds from their beginning, and all of it is in its ledger."""
    scratch, memory = node_memory(tmp_path, hot=2, at_once=1)
    with closing(scratch):
        world = World(tmp_path, make_manifest(), memory=memory)
        items = []
        for number in range(16):
            work = make_submission((ALICE, BOB, CARL, DAVE)[number // 4], RUN, index=number % 4)
            good = bool(number % 3)
            verdict = make_verdict(
                work, outcome="accept" if good else "reject", reason="" if good else "reward: differs"
            )
            items += [work, verdict]
        await world.hear(*items)
        assert {one.state for one in world.state.submissions.values()} == {"accepted", "rejected"}
        before = in_memory(world)
        await world.hear(*items)
        assert in_memory(world) == before < len(world.state.submissions) == 16


def in_memory(world: World) -> int:
    submissions = world.state.submissions
    assert isinstance(submissions, ScratchMap)
    return sum(one is submissions.look(key) for key, one in submissions.items())
