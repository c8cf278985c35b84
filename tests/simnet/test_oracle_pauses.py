"""Which pauses faults excuse, for exactly how long, and by whose clock; and that the run comes to its last step."""

import msgspec
import pytest
from oracle_world import START_MS, judgement, make_evidence

from simnet.gather import FaultMark, Life, NodeRecord
from simnet.oracles import Evidence


@pytest.fixture
def evidence() -> Evidence:
    return make_evidence()


def pause(evidence, seconds, faults):
    """What is said of a pause after the second step: faults as seconds after it began, node, action, and more."""
    began_ms = evidence.books.steps[-2].trained_ms
    evidence.books.steps[-1].trained_ms = began_ms + 1000 * seconds
    evidence.recording.faults = [
        FaultMark(began_ms + 1000 * at, 1, node, action, **more) for at, node, action, more in faults
    ]
    return judgement(evidence, "steps advance").outcome


def clock(at, seconds=None, node="inference-0"):
    return at, node, "clock", {"seconds": seconds}


def slow(begin, end, sync_ms, node="trainer-0"):
    return [(begin, node, "disk-slow", {"sync_ms": sync_ms}), (end, node, "disk-normal", {})]


def test_a_wrong_clock_excuses_a_pause_until_it_is_right_again(evidence):
    assert pause(evidence, 300, [clock(1, 20), clock(200)]) == "passed"
    assert pause(evidence, 300, [clock(1, 20), clock(200, 0)]) == "passed"
    assert pause(evidence, 300, [clock(1, 20)]) == "failed"


def test_a_clock_that_was_put_right_excuses_nothing_until_the_next_fault(evidence):
    """Setting a clock right is an action of the same name as setting it wrong."""
    faults = [clock(-500, 10), clock(-490), clock(2000, 10), clock(2010)]
    assert pause(evidence, 1000, faults) == "failed"


def test_after_a_fault_a_pause_is_excused_for_as_long_again_and_no_longer(evidence):
    stopped = [(1, "trainer-0", "stop", {}), (51, "trainer-0", "continue", {})]
    assert pause(evidence, 174, stopped) == "passed"
    assert pause(evidence, 178, stopped) == "failed"
    killed = [(1, "trainer-0", "kill", {}), (51, "trainer-0", "join", {})]
    assert pause(evidence, 219, killed) == "passed"  # it is loading
    assert pause(evidence, 223, killed) == "failed"


def every_minute(node, action, undone, **more):
    """Faults of a second each."""
    return [
        mark for at in range(0, 1200, 60) for mark in ((at, node, action, more), (at + 1, node, undone, {}))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("node", "action", "undone", "more"),
    [
        ("trainer-0", "clock", "clock", {"seconds": 1.0}),
        ("trainer-0", "stop", "continue", {}),
        ("validator-0", "partition", "heal", {}),
        ("relay-0", "kill", "join", {}),
    ],
)
def test_short_faults_one_after_another_do_not_add_up_to_a_standstill(evidence, node, action, undone, more):
    """Attack: a run that stands still for twenty minutes, in which something harmless happens each minute."""
    second = NodeRecord("relay-1", "relay", "x", lives=[Life(pid=9, started_ms=START_MS)])
    evidence.recording.nodes.append(second)
    faults = every_minute(node, action, undone, **more)
    assert pause(evidence, 1200, faults) == "failed"
    assert pause(evidence, 70, faults) == "passed"


def test_which_part_of_the_time_faults_would_explain_is_told(evidence):
    killed = [(0, "trainer-0", "stop", {}), (20, "trainer-0", "continue", {})]
    assert pause(evidence, 110, killed) == "passed"
    found = judgement(evidence, "steps advance")
    first_ms, last_ms = evidence.recording.started_ms, evidence.books.steps[-1].trained_ms
    expected = 100 * 55_000 / (last_ms - first_ms)
    assert found.numbers["explained by faults %"] == pytest.approx(expected, abs=0.1)
    assert f"in {expected:.0f} % of the time" in found.finding
    evidence.recording.faults = []
    assert "Faults" not in judgement(evidence, "steps advance").finding


def test_a_stopped_node_that_is_started_anew_is_no_longer_stopped(evidence):
    stopped = [(1, "trainer-0", "stop", {}), (11, "trainer-0", "restart", {}), (12, "trainer-0", "join", {})]
    assert pause(evidence, 300, stopped) == "failed"


@pytest.mark.parametrize(
    ("seconds", "sync_ms", "said"),
    [(100, 50, "passed"), (120, 50, "failed"), (100, 1, "failed"), (3600, 1, "failed"), (65, 5, "passed")],
)
def test_a_slow_disk_excuses_what_a_steps_writes_take_longer(evidence, seconds, sync_ms, said):
    assert pause(evidence, seconds, slow(1, 1800, sync_ms)) == said


def test_a_slow_disk_excuses_no_time_in_which_it_was_not_slow(evidence):
    assert pause(evidence, 100, slow(1, 20, 500)) == "failed"


def test_what_another_fault_excuses_a_slow_disk_does_not_excuse_again(evidence):
    killed = [(1, "trainer-0", "kill", {}), (51, "trainer-0", "join", {})]
    assert pause(evidence, 230, [*slow(0.5, 60, 50), *killed]) == "failed"


@pytest.mark.parametrize(("quorum", "said"), [(2, "passed"), (1, "failed")])
def test_as_many_validators_are_needed_as_must_agree(evidence, quorum, said):
    evidence.books.quorum = quorum
    second = NodeRecord("validator-1", "validator", "x", lives=[Life(pid=9, started_ms=START_MS)])
    evidence.recording.nodes.append(second)
    killed = [(1, "validator-0", "kill", {}), (200, "validator-0", "join", {})]
    assert pause(evidence, 300, killed) == said


def begin_later(evidence, seconds):
    for step in evidence.books.steps:
        step.trained_ms += 1000 * seconds
    return judgement(evidence, "steps advance")


def test_the_time_before_the_first_step_is_looked_at(evidence):
    assert begin_later(evidence, 300).outcome == "passed"
    found = begin_later(evidence, 3600)
    assert found.outcome == "failed"
    assert "from 0 s on" in found.finding


def test_the_first_step_is_waited_for_from_when_everybody_it_needs_was_started(evidence):
    (only,) = [node for node in evidence.recording.nodes if node.name == "inference-0"]
    only.lives[0].started_ms += 3_600_000
    assert begin_later(evidence, 3700).outcome == "passed"


@pytest.mark.parametrize(("quorum", "said"), [(2, "passed"), (1, "failed")])
def test_the_first_step_waits_for_as_many_validators_as_must_agree(evidence, quorum, said):
    evidence.books.quorum = quorum
    late = [Life(pid=9, started_ms=START_MS + 3_600_000)]
    evidence.recording.nodes.append(NodeRecord("validator-1", "validator", "x", lives=late))
    assert begin_later(evidence, 3700).outcome == said


def test_a_run_that_is_said_to_have_finished_has_trained_every_step(evidence):
    evidence.books.total_steps = 50
    found = judgement(evidence, "steps advance")
    assert (found.outcome, "3 of 50" in found.finding) == ("failed", True)
    evidence.recording.outcome, evidence.recording.over_ms = "reached", evidence.books.steps[-1].trained_ms
    assert judgement(evidence, "steps advance").outcome == "passed"


def test_times_are_taken_off_the_trainers_clock(evidence):
    """A trainer whose clock is moved for one step has not paused, and one that paused is not hidden by it."""
    first, second, third = evidence.books.steps
    marks = [
        FaultMark(first.trained_ms + 1000, 1, "trainer-0", "clock", seconds=600),
        FaultMark(second.trained_ms + 1000, 2, "trainer-0", "clock"),
    ]
    second.trained_ms += 600_000
    assert judgement(evidence, "steps advance").outcome == "failed"  # of a clock that nobody moved
    evidence.recording.faults = marks
    found = judgement(evidence, "steps advance")
    assert (found.outcome, found.numbers["longest pause s"]) == ("passed", 10.0)
    third.trained_ms += 1_000_000
    assert judgement(evidence, "steps advance").outcome == "failed"


def test_a_trainers_clock_that_is_wrong_from_the_start_is_no_wait_for_the_first_step(evidence):
    scenario = evidence.recording.scenario
    ahead = msgspec.structs.replace(scenario.fleet[0], clock_ahead_s=3600.0)
    evidence.recording.scenario = msgspec.structs.replace(scenario, fleet=(ahead, *scenario.fleet[1:]))
    evidence.recording.faults = []
    assert begin_later(evidence, 3600).outcome == "passed"


def test_rollouts_of_no_size_have_an_age_all_the_same(evidence):
    for one in evidence.books.submissions:
        one.rollouts = 0
    assert judgement(evidence, "staleness").outcome == "passed"
