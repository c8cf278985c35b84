"""Loops that are late or stand still, and nodes that run and do not answer: what is found, and what a stop excuses."""

import msgspec
import pytest
from oracle_world import START_MS, judgement, make_evidence

from simnet.gather import DiscoverySeen, FaultMark, Life, LoopSeen
from simnet.oracles import Evidence

S = 1000


@pytest.fixture
def evidence() -> Evidence:
    found = make_evidence()
    found.recording.faults = []
    return found


def node_of(evidence, name):
    (node,) = [one for one in evidence.recording.nodes if one.name == name]
    return node


def loops(evidence, name="inference-0", **changes):
    """What is said when a node's loop was so, in a long life."""
    seen = LoopSeen(**({"pulses": 1200, "p99_ms": 20, "worst_ms": 90, "tasks": 50} | changes))
    node_of(evidence, name).lives[-1].status.details.discovery = DiscoverySeen(seen)
    return judgement(evidence, "loops")


def stop(evidence, begin_s, end_s, name="inference-0"):
    evidence.recording.faults += [
        FaultMark(START_MS + begin_s * S, 1, name, "stop"),
        FaultMark(START_MS + end_s * S, 1, name, "continue"),
    ]


@pytest.mark.parametrize(("p99_ms", "said"), [(99, "passed"), (100, "failed")])
def test_a_loop_may_be_late_by_less_than_a_tenth_of_a_second(evidence, p99_ms, said):
    assert loops(evidence, p99_ms=p99_ms).outcome == said


@pytest.mark.parametrize(("late_ms", "said"), [(50, "failed"), (51, "could not tell")])
def test_a_machine_that_was_late_itself_excuses_a_late_loop(evidence, late_ms, said):
    evidence.recording.late_p99_ms = late_ms
    assert loops(evidence, p99_ms=140).outcome == said


def test_a_node_that_runs_at_a_low_priority_may_be_late(evidence):
    scenario = evidence.recording.scenario
    fleet = [msgspec.structs.replace(one, nice=10 if one.role == "inference" else 0) for one in scenario.fleet]
    evidence.recording.scenario = msgspec.structs.replace(scenario, fleet=tuple(fleet))
    assert loops(evidence, p99_ms=500).outcome == "passed"
    assert loops(evidence, "relay-0", p99_ms=500).outcome == "failed"


def test_lives_that_are_too_brief_to_judge_are_counted(evidence):
    found = loops(evidence, pulses=119, p99_ms=500)
    assert (found.outcome, found.numbers["loops"], found.numbers["too brief"]) == ("passed", 4, 2)
    assert "2 were not judged" in found.finding  # with the relay's first life
    assert loops(evidence, pulses=120, p99_ms=500).outcome == "could not tell"


def test_a_loop_that_is_late_in_a_brief_life_may_have_been_so_as_it_started(evidence):
    """Four late pulses are one percent of a life of less than two minutes."""
    found = loops(evidence, pulses=1199, p99_ms=134)
    assert (found.outcome, found.numbers["late in a brief life"]) == ("could not tell", 1)
    assert "inference-0: up to 134 ms" in found.finding
    node_of(evidence, "validator-0").lives[-1].status.details.discovery.loop.pulses = 1200
    assert loops(evidence, pulses=1199, p99_ms=134).outcome == "could not tell", "another role's loop does other things"
    loops(evidence, "wrong-model-0", pulses=1200)
    found = loops(evidence, pulses=1199, p99_ms=134)
    assert (found.outcome, "1 were late in lives of less" in found.finding) == ("passed", True)
    assert loops(evidence, pulses=1200, p99_ms=134).outcome == "failed"


@pytest.mark.parametrize(("p50_ms", "said"), [(99, "could not tell"), (100, "failed")])
def test_a_loop_of_which_half_the_pulses_are_late_is_late_in_the_briefest_life(evidence, p50_ms, said):
    assert loops(evidence, pulses=120, p50_ms=p50_ms, p99_ms=300).outcome == said


def test_each_stop_asks_for_more_pulses(evidence):
    """The pulse in which a node stood still by plan is late, and must not be one of the one percent."""
    stop(evidence, 10, 15)
    assert loops(evidence, pulses=239, p99_ms=2000, worst_ms=5000).outcome == "passed"
    assert loops(evidence, pulses=240, p99_ms=2000, worst_ms=5000).outcome == "could not tell"
    assert loops(evidence, pulses=1319, p99_ms=2000, worst_ms=5000).outcome == "could not tell"
    assert loops(evidence, pulses=1320, p99_ms=2000, worst_ms=5000).outcome == "failed"


def test_a_node_that_answered_for_long_has_a_loop_that_was_counted(evidence):
    life = node_of(evidence, "inference-0").lives[-1]
    life.status_at_ms = life.started_ms + 130 * S
    found = loops(evidence, pulses=60)
    assert (found.outcome, "inference-0" in found.finding) == ("could not tell", True)
    stop(evidence, 10, 30)
    assert loops(evidence, pulses=60).outcome == "passed"


@pytest.mark.parametrize(("worst_ms", "said"), [(9_999, "passed"), (10_000, "failed"), (600_000, "failed")])
def test_a_loop_that_stands_still_is_found(evidence, worst_ms, said):
    found = loops(evidence, worst_ms=worst_ms)
    assert found.outcome == said
    assert ("inference-0 for" in found.finding) == (said == "failed")


def test_a_block_is_found_in_the_briefest_life(evidence):
    assert loops(evidence, pulses=50, worst_ms=15_000).outcome == "failed"


def test_a_stop_excuses_as_long_a_block_of_that_node_and_no_longer(evidence):
    stop(evidence, 10, 30)
    assert loops(evidence, worst_ms=29_000).outcome == "passed"
    assert loops(evidence, worst_ms=31_000).outcome == "failed"
    loops(evidence)
    assert loops(evidence, "validator-0", worst_ms=29_000).outcome == "failed"


def test_a_stop_of_an_earlier_life_excuses_no_block_of_a_later_one(evidence):
    stop(evidence, 10, 30, "relay-0")  # its first life ended at 40 s
    assert loops(evidence, "relay-0", worst_ms=15_000).outcome == "failed"


def test_stops_between_which_the_loop_did_not_run_are_one(evidence):
    stop(evidence, 10, 30)
    stop(evidence, 30, 60)
    assert loops(evidence, worst_ms=55_000).outcome == "passed"


def silent(evidence, begin_s, end_s, name="inference-0"):
    node_of(evidence, name).lives[-1].silences = [(START_MS + int(begin_s * S), START_MS + int(end_s * S))]
    return judgement(evidence, "falls silent")


@pytest.mark.parametrize(("seconds", "said"), [(60, "passed"), (62, "failed")])
def test_a_node_that_runs_and_does_not_answer_for_a_minute_is_found(evidence, seconds, said):
    """Attack: a node hangs; what it last said of itself was fine."""
    found = silent(evidence, 20, 20 + seconds)
    assert (found.outcome, found.numbers["longest silence s"]) == (said, seconds)
    assert "inference-0" in found.finding


def test_a_node_may_take_longer_to_its_first_answer(evidence):
    assert silent(evidence, 0, 300).outcome == "passed"
    assert silent(evidence, 0, 301).outcome == "failed"


@pytest.mark.parametrize(("first_s", "seconds", "said"), [(72, 71, "passed"), (302, 301, "failed"), (0, 71, "failed")])
def test_the_first_answer_is_what_was_first_read_whenever_asking_began(evidence, first_s, seconds, said):
    """The first relay is started before anybody asks."""
    life = node_of(evidence, "inference-0").lives[-1]
    life.first_status_at_ms = life.started_ms + first_s * S
    assert silent(evidence, 0.4, 0.4 + seconds).outcome == said


@pytest.mark.parametrize(("seconds", "said"), [(15, "could not tell"), (301, "failed")])
def test_a_node_that_was_still_starting_as_it_had_to_be_killed_has_its_time_for_that(evidence, seconds, said):
    node, end_ms = node_of(evidence, "inference-0"), evidence.recording.ended_ms
    begin_ms = end_ms - seconds * S
    node.lives.append(Life(11, begin_ms, end_ms + 4000, -9, "close", silences=[(begin_ms, end_ms)]))
    found = judgement(evidence, "falls silent")
    assert (found.outcome, "had to be killed" in found.finding) == (said, said != "failed")
    assert node.lives[0].first_status_at_ms


def lives_of(evidence, *lengths_s):
    """Lives that a fault ends, after the usual one: negative ones gave a status at last."""
    node, at_ms = node_of(evidence, "inference-0"), evidence.recording.ended_ms
    del node.lives[1:]
    for length_s in lengths_s:
        end_ms = at_ms + abs(length_s) * S
        life = Life(11, at_ms, end_ms, -9, "kill", silences=[(at_ms, end_ms - S)])
        life.first_status_at_ms = end_ms - S if length_s < 0 else None
        node.lives.append(life)
        at_ms = end_ms
    return judgement(evidence, "falls silent")


def test_a_node_that_never_comes_up_again_is_found_however_often_it_is_started(evidence):
    """Attack: a node breaks what it kept, cannot start with it, and each life is shorter than a start may take."""
    assert lives_of(evidence, 120, 119, 60).outcome == "passed"
    found = lives_of(evidence, 151, 151)
    assert (found.outcome, "inference-0" in found.finding) == ("could not tell", True)
    found = lives_of(evidence, 152, 60, 152)
    assert (found.outcome, "did not come up: inference-0 for 302 s" in found.finding) == ("failed", True)
    assert lives_of(evidence, 152, -100, 152).outcome == "could not tell"
    assert lives_of(evidence, 302).finding == "Silent while running: inference-0 for 301 s."
    assert lives_of(evidence, 152, 152, -100, 130).outcome == "failed"


def test_a_life_that_stood_still_by_plan_is_not_expected_to_come_up(evidence):
    stop(evidence, 100, 230)
    assert lives_of(evidence, 200).outcome == "passed"


def test_a_stopped_node_is_silent_by_plan_and_one_beside_it_is_not(evidence):
    stop(evidence, 20, 120)
    assert silent(evidence, 19, 150).outcome == "passed"
    assert silent(evidence, 19, 190).outcome == "failed"
    silent(evidence, 0, 0)
    assert silent(evidence, 19, 150, name="validator-0").outcome == "failed"


def test_one_that_is_never_woken_up_is_silent_for_good(evidence):
    stop(evidence, 20, 0)
    del evidence.recording.faults[-1]
    assert silent(evidence, 19, 3600).outcome == "passed"


def close(evidence, exit_code, name="inference-0"):
    life = node_of(evidence, name).lives[-1]
    life.ended_by, life.exit_code = "close", exit_code


def test_a_node_that_hangs_shortly_before_the_end_has_to_be_killed(evidence):
    close(evidence, -9)
    assert silent(evidence, 80, 99).outcome == "failed"
    stop(evidence, 79, 99)
    assert silent(evidence, 80, 99).outcome == "could not tell"


def test_one_that_answered_until_it_had_to_be_killed_cannot_be_told_from_a_busy_machine(evidence):
    close(evidence, -9)
    found = judgement(evidence, "falls silent")
    assert (found.outcome, found.numbers["killed at the close"]) == ("could not tell", 1)
    close(evidence, -15)
    found = judgement(evidence, "falls silent")
    assert (found.outcome, found.numbers["still there after the end"]) == ("passed", "inference-0")


def test_of_a_node_that_never_answered_nothing_is_claimed(evidence):
    node_of(evidence, "inference-0").lives[-1].status_at_ms = None
    found = judgement(evidence, "falls silent")
    assert (found.outcome, "inference-0" in found.finding) == ("could not tell", True)


def test_what_a_hostile_peer_answers_is_its_own_affair(evidence):
    node_of(evidence, "relay-0").role = "hostile"
    assert silent(evidence, 20, 99, name="relay-0").outcome == "passed"
