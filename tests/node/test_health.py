"""A node's health: what makes it unready, what makes it dead, and that everything else does neither."""

import pytest

from node.health import HEAD_STALE_S, LOOP_STALL_S, HealthWatch, process_facts
from node.status import StatusBoard


class FakeClock:
    now = 1_000_000

    def __call__(self):
        return self.now

    def pass_s(self, seconds):
        self.now += int(seconds * 1000)


@pytest.fixture
def clock():
    return FakeClock()


def new_watch(clock, role="inference", stall_after_s=600.0):
    board = StatusBoard(role=role, peer_id="alice", run="run", clock=clock)
    return board, HealthWatch(board, stall_after_s, clock=clock)


def joined(clock, role="inference", **options):
    board, watch = new_watch(clock, role, **options)
    board.update(step=3, head_sequence=7)
    board.working("generating submission 0")
    watch.look()
    return board, watch


def test_a_node_that_joins_is_live_and_not_ready(clock):
    board, watch = new_watch(clock)
    board.waiting("the run's manifest")
    health = watch.judge()
    assert (health.live, health.ready) == (True, False)
    assert health.reasons == ("not in the run yet: the run's manifest",)
    assert health.head_age_s is None


def test_a_node_at_work_is_well(clock):
    _, watch = joined(clock)
    assert watch.judge().plain() == {"live": True, "ready": True, "reasons": [], "head_age_s": 0.0}


def test_eviction_is_named(clock):
    board, watch = joined(clock)
    board.state("evicted", "toploc: 31 chunks differ")
    assert watch.judge().reasons == ("evicted: toploc: 31 chunks differ",)
    assert watch.judge().live


def test_a_trainer_that_is_silent_makes_nodes_unready_and_not_dead(clock):
    _, watch = joined(clock)
    for _ in range(int(HEAD_STALE_S) + 1):
        clock.pass_s(1)
        watch.look()
    health = watch.judge()
    assert (health.live, health.ready) == (True, False)
    assert "no newer head for 121 s" in health.reasons[0]


@pytest.mark.parametrize(
    ("role", "activity"), [("relay", "serving the run"), ("validator", "submissions at the relays")]
)
def test_what_may_last_is_no_stall(clock, role, activity):
    board, watch = joined(clock, role)
    board.working(activity)
    watch.look()
    clock.pass_s(100_000)
    board.update(head_sequence=8)
    watch.look()
    assert watch.judge().well


def test_a_node_without_any_change_is_stalled_until_something_changes(clock):
    board, watch = joined(clock, "trainer")
    clock.pass_s(601)
    watch.look()
    assert watch.judge().reasons == ("stalled: working for 601 s: generating submission 0",)
    board.update(pending=1)
    watch.look()
    assert watch.judge().well


def test_stalls_can_be_left_out(clock):
    _, watch = joined(clock, "trainer", stall_after_s=0.0)
    clock.pass_s(10**6)
    watch.look()
    assert watch.judge().well


def test_a_loop_that_stands_still_is_dead(clock):
    _, watch = joined(clock, "trainer")
    clock.pass_s(LOOP_STALL_S + 5)
    health = watch.judge()
    assert (health.live, health.ready) == (False, False)
    assert health.reasons[0] == "the event loop stands still for 65 s"


def test_a_finished_run_is_well(clock):
    board, watch = joined(clock)
    board.state("finished", "the run is finished")
    watch.look()
    clock.pass_s(50)
    assert watch.judge().well


def test_a_relay_that_stays_after_the_end_is_well(clock):
    board, watch = joined(clock, "relay")
    board.working("serving the finished run")
    watch.look()
    clock.pass_s(100_000)
    watch.look()
    assert watch.judge().well


def test_facts_of_this_process(tmp_path):
    facts = process_facts(tmp_path)
    assert facts["resident_bytes"] > 1 << 20
    assert facts["cpu_s"] > 0
    assert facts["disk_free_bytes"] > 0
    assert "disk_free_bytes" not in process_facts(tmp_path / "gone" / "away")
