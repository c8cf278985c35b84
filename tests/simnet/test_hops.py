import msgspec
import pytest
from oracle_world import START_MS, make_evidence

from simnet.hops import hops_of, throughput_of
from simnet.oracles import Evidence


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


def test_what_came_before_it_was_sent_is_left_out_and_counted():
    evidence = make_evidence()
    evidence.books.submissions[0].received_ms -= 5000
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
