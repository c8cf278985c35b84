import msgspec
import pytest
from oracle_world import START_MS, make_evidence

from simnet.gather import FaultMark
from simnet.hops import Hop, hops_of, throughput_of
from simnet.oracles import Evidence
from simnet.page import MOST_FAULTS, render_page
from simnet.report import build_report


def hop(evidence, name):
    (found,) = [one for one in hops_of(evidence) if one.name == name]
    return found


@pytest.mark.parametrize(
    ("name", "seconds", "count"),
    [
        ("made → received", 0.1, 4),
        ("received → judged", 1.0, 4),
        ("judged → trained", 8.9, 3),
        ("made → trained", 10.0, 3),
        ("published → first relay", 0.5, 3),
        ("first relay → last node", 0.4, 3),
        ("published → last node", 0.9, 3),
    ],
)
def test_every_hop_has_its_time(name, seconds, count):
    found = hop(make_evidence(), name)
    assert (found.count, found.left_out) == (count, 0)
    assert found.p50_s == found.p99_s == found.longest_s == pytest.approx(seconds)


@pytest.mark.parametrize("earlier_ms", [101, 5000])
def test_what_came_before_it_was_sent_is_left_out_and_counted(earlier_ms):
    evidence = make_evidence()
    evidence.books.submissions[0].received_ms -= earlier_ms
    found = hop(evidence, "made → received")
    assert (found.count, found.left_out, found.p50_s) == (3, 1, pytest.approx(0.1))


def test_a_node_that_took_a_newer_checkpoint_in_place_of_one_counts_with_that():
    evidence = make_evidence()
    del evidence.checkpoints[1].held["validator-0"]
    assert hop(evidence, "published → last node").longest_s == pytest.approx(10.7)


def test_a_node_that_was_away_is_not_waited_for():
    evidence = make_evidence()
    del evidence.checkpoints[1].held["validator-0"], evidence.checkpoints[2].held["validator-0"]
    validator = next(node for node in evidence.recording.nodes if node.name == "validator-0")
    validator.lives[0].ended_ms = START_MS + 5000
    assert hop(evidence, "published → last node").longest_s == pytest.approx(0.9)


def test_a_node_that_never_got_a_policy_is_not_left_out_of_the_last_node():
    """One that is stuck since the first policy: what came to all others did not come to all."""
    evidence = make_evidence()
    del evidence.checkpoints[1].held["inference-0"], evidence.checkpoints[2].held["inference-0"]
    found = hop(evidence, "published → last node")
    assert (found.count, found.missing) == (1, 2)
    assert hop(evidence, "first relay → last node").missing == 2
    assert hop(evidence, "published → first relay").missing == 0
    evidence.checkpoints[0].held.clear()
    assert hop(evidence, "published → last node").missing == 3


def test_the_newest_policy_may_be_on_its_way_at_the_end_and_cheats_need_none():
    evidence = make_evidence()
    del evidence.checkpoints[2].held["inference-0"]
    evidence.recording.over_ms = evidence.checkpoints[2].published_ms + 59_000
    assert (hop(evidence, "published → last node").count, hop(evidence, "published → last node").missing) == (2, 0)
    evidence.recording.over_ms += 2000
    assert hop(evidence, "published → last node").missing == 1
    assert evidence.recording.nodes[-1].cheat  # and holds none of them


def test_the_page_says_what_never_came_to_a_node(recording):
    report = build_report(recording)
    report.hops = [Hop("checkpoint", "published → last node", 1, 1.0, 1.0, 1.0, missing=7)]
    assert "7 checkpoints never came" in render_page(report, recording)


@pytest.mark.parametrize("count", [MOST_FAULTS, MOST_FAULTS + 1])
def test_a_long_list_of_faults_is_folded(recording, count):
    recording.faults = [FaultMark(START_MS + at, at, "far-0", "kill") for at in range(count)]
    page = render_page(build_report(recording), recording)
    assert page.count("<b>far-0</b> kill at step") == count
    assert (f"{count} faults and what undid them" in page) is (count > MOST_FAULTS)


def test_percentiles_are_the_nearest_rank():
    evidence = make_evidence()
    one = evidence.books.submissions[0]
    times = [one.made_ms + 1000 * seconds for seconds in range(1, 101)]
    evidence.books.submissions = [msgspec.structs.replace(one, received_ms=at_ms) for at_ms in times]
    found = hop(evidence, "made → received")
    assert (found.p50_s, found.p99_s, found.longest_s) == (50.0, 99.0, 100.0)


def test_speed_is_what_was_trained_after_the_first_step():
    found = throughput_of(make_evidence())
    assert (found.steps_per_min, found.rollouts_per_s, found.tokens_per_s) == (6.0, 0.8, 10.0)
    assert sum(piece.rollouts for piece in found.pieces) == 24


def test_without_steps_there_is_no_speed(recording):
    assert throughput_of(Evidence(recording)).pieces == []
    assert hops_of(Evidence(recording)) == []
