"""Memory, descriptors and tasks that grow late, at once, or a little: what is found, and what is spared."""

import random

import pytest
from oracle_world import START_MS, judgement, make_evidence, process

from simnet.gather import Life, NodeRecord
from simnet.oracles import Evidence

HOUR = 360
"""Looks, of which there is one every ten seconds."""


@pytest.fixture
def evidence() -> Evidence:
    return make_evidence()


def memory(evidence, values_mb):
    evidence.recording.nodes[0].processes = [process([round(1e6 * value) for value in values_mb])]
    return judgement(evidence, "memory")


@pytest.mark.parametrize(
    ("looks", "from_look", "mb_per_min", "words"),
    [
        (258, 198, 120, "over"),
        (HOUR, 300, 10, "in the last"),
        (HOUR, 300, 4, "in the last"),
        (50, 30, 40, "over"),
    ],
)
def test_memory_that_leaks_late_is_found(evidence, looks, from_look, mb_per_min, words):
    found = memory(evidence, [50 + max(0, at - from_look) * mb_per_min / 6 for at in range(looks)])
    assert found.outcome == "failed", found
    assert "trainer-0 grows" in found.finding
    assert words in found.finding


def test_memory_that_jumps_and_stays_is_found_and_one_that_comes_back_is_spared(evidence):
    found = memory(evidence, [50 if at < 200 else 2050 for at in range(HOUR)])
    assert found.outcome == "failed"
    assert "2050 MB at last and had 50 MB" in found.finding
    assert memory(evidence, [2050 if 200 <= at < 330 else 50 for at in range(HOUR)]).outcome == "passed"
    assert memory(evidence, [50 + 400 * (at % 12 == 0) for at in range(HOUR)]).outcome == "passed"


@pytest.mark.parametrize(
    ("begin_mb", "more_mb", "said"),
    [(50, 110, "passed"), (50, 114, "failed"), (400, 245, "passed"), (400, 252, "failed")],
)
def test_a_jump_of_64_mb_or_of_half_is_spare_beside_what_the_slope_allows(evidence, begin_mb, more_mb, said):
    """That is 47.9 MB over the 2870 s after the warm-up."""
    assert memory(evidence, [begin_mb + more_mb * (at >= 280) for at in range(HOUR)]).outcome == said


def test_a_cache_that_fills_late_is_spared(evidence):
    assert memory(evidence, [120 if at < 200 else 160 for at in range(HOUR)]).outcome == "passed"
    late = [100 + min(20, max(0, at - 310)) for at in range(HOUR)]
    assert memory(evidence, late).outcome == "passed"


@pytest.mark.parametrize(("mb_per_min", "said"), [(0.95, "passed"), (1.1, "failed")])
def test_a_process_may_grow_by_less_than_a_megabyte_a_minute(evidence, mb_per_min, said):
    assert memory(evidence, [50 + at * mb_per_min / 6 for at in range(120)]).outcome == said


@pytest.mark.parametrize(("noise_mb", "said"), [(4.0, "failed"), (20.0, "could not tell")])
def test_growth_is_sure_when_it_is_a_few_times_what_memory_moves_by(evidence, noise_mb, said):
    rng = random.Random(3)
    found = memory(evidence, [90 + at * 1.5 / 6 + rng.uniform(-noise_mb, noise_mb) for at in range(120)])
    assert found.outcome == said, found


def filling(looks, mb_per_min):
    return process([round(1e6 * (90 + at * mb_per_min / 6)) for at in range(looks)])


def test_a_process_that_was_just_started_again_may_still_be_filling(evidence):
    """Heaps and caches take some minutes; a longer life of the same kind tells whether that ends."""
    brief, relay, other = filling(60, 2.5), evidence.recording.nodes[1], evidence.recording.nodes[0]
    relay.processes, other.processes = [brief], [filling(HOUR, 0.1)]
    found = judgement(evidence, "memory")
    assert (found.outcome, "of its kind" in found.finding) == ("could not tell", True)
    relay.processes = [brief, filling(HOUR, 0.1)]
    found = judgement(evidence, "memory")
    assert found.outcome == "passed"
    assert "1 that had been there briefly were still filling" in found.finding
    assert "with 0.10 MB a minute" in found.finding
    relay.processes = [brief, filling(HOUR, 1.1)]
    assert judgement(evidence, "memory").outcome == "failed"
    relay.processes = [filling(60, 7), filling(HOUR, 0.1)]
    assert judgement(evidence, "memory").outcome == "failed", "no heap fills at that pace"
    relay.processes = [filling(60, 0.9)]
    assert judgement(evidence, "memory").outcome == "passed"


def test_what_fills_in_the_first_ten_minutes_of_a_long_life_is_spared(evidence):
    assert memory(evidence, [90 + min(at, 55) for at in range(120)]).outcome == "passed"


def levels(evidence, what, values):
    for node in evidence.recording.nodes:
        node.lives[-1].ended_ms = node.lives[-1].ended_ms and START_MS + 10_000 * len(values)
        node.processes = []
    evidence.recording.nodes[1].processes = [process([1] * len(values), **{what: values})]
    return judgement(evidence, "descriptors").outcome


@pytest.mark.parametrize("what", ["descriptors", "tasks"])
def test_a_leak_of_the_last_minutes_is_found(evidence, what):
    assert levels(evidence, what, [30 + max(0, at - 330) * 50 for at in range(HOUR)]) == "failed"


@pytest.mark.parametrize(
    ("begin", "end", "said"), [(30, 42, "passed"), (30, 44, "failed"), (200, 250, "passed"), (200, 253, "failed")]
)
def test_a_dozen_descriptors_or_a_quarter_is_spare(evidence, begin, end, said):
    assert levels(evidence, "descriptors", [begin] * 20 + [end] * 40) == said


def up(pid, *, from_s, up_s):
    """A life that gave its first status after a while."""
    return Life(pid, START_MS + 1000 * from_s, first_status_at_ms=START_MS + 1000 * up_s)


def add_watcher(evidence, *lives):
    evidence.recording.nodes.append(NodeRecord("watch-0", "watch", "x", lives=list(lives)))


@pytest.mark.parametrize(("more", "said"), [(36, "passed"), (38, "failed")])
def test_each_node_that_comes_explains_a_dozen_tasks(evidence, more, said):
    add_watcher(evidence, Life(9, START_MS, START_MS + 1), up(9, from_s=200, up_s=201))
    assert levels(evidence, "tasks", [50] * 20 + [50 + more] * 40) == said


def test_nodes_that_come_back_at_the_very_end_explain_what_they_take_there(evidence):
    add_watcher(evidence, Life(9, START_MS, START_MS + 1), up(9, from_s=3360, up_s=3361))
    assert levels(evidence, "tasks", [50] * 335 + [84] * 25) == "passed"


@pytest.mark.parametrize(
    ("looks", "at_last", "said"), [(60, 268, "passed"), (28, 268, "could not tell"), (60, 400, "failed")]
)
def test_a_level_is_taken_when_every_node_had_come_up_and_found_the_others(evidence, looks, at_last, said):
    """Many nodes load for minutes on a busy machine, and then connect as slowly: a relay has more tasks with each."""
    for _ in range(12):
        add_watcher(evidence, up(9, from_s=10, up_s=110))
    values = [78 if at < 12 else 78 + 19 * (at - 12) if at < 22 else 268 for at in range(looks)]
    values[40:] = [at_last] * len(values[40:])
    assert levels(evidence, "tasks", values) == said


@pytest.mark.parametrize(("looks", "said"), [(60, "failed"), (36, "could not tell")])
def test_one_that_never_comes_up_is_waited_for_no_longer_than_it_may_take(evidence, looks, said):
    add_watcher(evidence, Life(9, START_MS))
    assert levels(evidence, "tasks", [50 + 10 * at for at in range(looks)]) == said


def test_a_node_counts_as_one_more_from_when_it_has_come_up(evidence):
    add_watcher(evidence, Life(9, START_MS, START_MS + 1), up(9, from_s=20, up_s=300))
    assert levels(evidence, "tasks", [50] * 30 + [86] * 30) == "passed"


def test_a_relay_that_was_started_again_takes_its_time_to_come_up(evidence):
    relay = evidence.recording.nodes[1]
    values = [50] * 15 + [120] * 25
    assert levels(evidence, "tasks", values) == "failed"
    relay.lives = [relay.lives[0], up(10, from_s=0, up_s=70)]
    assert levels(evidence, "tasks", values) == "passed"


def test_a_hostile_peer_answers_nobody_and_is_not_waited_for_and_counts(evidence):
    lives = [Life(9, START_MS, START_MS + 1), Life(9, START_MS + 200_000)]
    evidence.recording.nodes.append(NodeRecord("flood-0", "hostile", "x", lives=lives))
    assert levels(evidence, "tasks", [50] * 20 + [86] * 40) == "passed"
    evidence.recording.nodes[-1].lives = [Life(9, START_MS)]
    assert levels(evidence, "tasks", [50 + 10 * at for at in range(30)]) == "failed"
