"""What a validator remembers of each contributor: departures that no single submission shows."""

import pytest
from factories import make_submission, make_tolerance

from node.validator.suspicion import Suspicions
from protocol.errors import DataDirError
from protocol.identity import Identity

ALICE, BOB = Identity.from_phrase("alice"), Identity.from_phrase("bob")
TOLERANCE = make_tolerance(honest_margin=1e-3, max_mean_margin=0.01, honest_mantissa=0.5, max_rollout_mantissa_mean=1.0)
HONEST = [(1e-4, 0.3, 1e-6)] * 32


@pytest.fixture
def suspicions(tmp_path):
    book = Suspicions(tmp_path / "docket.sqlite")
    yield book
    book.close()


@pytest.fixture
def hand_in(suspicions):
    """A contributor's next submission with this evidence: what is suspected after it."""
    count = iter(range(10**6))

    def handed_in(author, evidence):
        submission = make_submission(author, b"r" * 32, step=next(count) % 200, index=next(count) % 200)
        return suspicions.update(submission, TOLERANCE, evidence=evidence)

    return handed_in


def test_an_honest_node_is_never_suspected(hand_in):
    assert all(hand_in(ALICE, HONEST) is None for _ in range(100))


def test_small_departures_are_suspected_softly(hand_in):
    """A contributor keeps under every limit for single submissions, and above what honest machines have on average."""
    assert any(hand_in(ALICE, [(0.004, 0.3, 0.0)] * 32) for _ in range(3))
    suspicion = hand_in(ALICE, [(0.004, 0.3, 0.0)] * 32)
    assert not suspicion.hard
    assert suspicion.reason.startswith("the margins of its answers to ")
    assert "mantissas" in [hand_in(BOB, [(0.0, 0.9, 0.0)] * 32) for _ in range(5)][-1].reason


def test_a_bias_of_log_probabilities_under_the_limit_is_suspected(hand_in):
    """A contributor makes all its answers a little less likely than they were, so that they weigh more."""
    suspicion = [hand_in(ALICE, [(0.0, 0.0, 3 * TOLERANCE.honest_logprob_shift)] * 32) for _ in range(5)][-1]
    assert (suspicion.hard, "log-probability errors" in suspicion.reason) == (False, True)


def test_odd_hardware_is_never_evicted(hand_in):
    """An honest machine whose mean lies at twice the limit of single submissions for ever is refused, no more."""
    found = [hand_in(ALICE, [(0.02, 2.0, 0.1)] * 32) for _ in range(200)]
    assert found[-1] is not None
    assert not any(suspicion and suspicion.hard for suspicion in found)


def test_departures_that_no_rounding_explains_are_hard(hand_in):
    found = [hand_in(ALICE, [(0.4, 16.0, 0.4)] * 32) for _ in range(4)]
    assert found[-1].hard


def test_contributors_are_apart(hand_in):
    for _ in range(5):
        hand_in(ALICE, [(0.4, 16.0, 0.4)] * 32)
    assert hand_in(BOB, HONEST) is None


def test_one_that_mends_its_ways_is_believed_again(hand_in):
    while hand_in(ALICE, [(0.004, 0.3, 0.0)] * 32) is None:
        pass
    assert any(hand_in(ALICE, HONEST) is None for _ in range(100))


def test_what_was_seen_survives_a_restart_and_is_counted_once(tmp_path):
    """Attack on the test: a validator that crashes and judges a submission again must not count it twice."""
    path = tmp_path / "docket.sqlite"
    submission = make_submission(ALICE, b"r" * 32)
    for _ in range(50):
        suspicions = Suspicions(path)
        found = suspicions.update(submission, TOLERANCE, evidence=[(0.004, 0.3, 0.0)] * 4)
        suspicions.close()
        assert found is None
    suspicions = Suspicions(path)
    late = [
        suspicions.update(make_submission(ALICE, b"r" * 32, step=n), TOLERANCE, evidence=[(0.004, 0.3, 0.0)] * 4)
        for n in range(1, 20)
    ]
    suspicions.close()
    assert late[-1] is not None


def test_whatever_comes_again_is_counted_once(tmp_path):
    """Two submissions of a contributor are judged in turns, again and again, by one without room for verdicts."""
    path, works = tmp_path / "docket.sqlite", [make_submission(ALICE, b"r" * 32, index=n) for n in range(2)]
    for work in works * 50:
        suspicions = Suspicions(path)
        found = suspicions.weigh(work, TOLERANCE, evidence=[(0.004, 0.3, 0.0)] * 4)
        assert suspicions.update(work, TOLERANCE, evidence=[(0.004, 0.3, 0.0)] * 4) is None
        assert found is None
        suspicions.close()


def test_what_is_known_as_counted_is_bounded(hand_in, suspicions, monkeypatch):
    monkeypatch.setattr("node.validator.suspicion.MAX_COUNTED", 5)
    latest = make_submission(BOB, b"r" * 32)
    suspicions.update(latest, TOLERANCE, evidence=HONEST)
    for _ in range(20):
        hand_in(ALICE, HONEST)
    state = suspicions._read(BOB.peer_id.public_key)
    suspicions.update(latest, TOLERANCE, evidence=HONEST)
    assert suspicions._read(BOB.peer_id.public_key) == state
    assert suspicions._db.row("SELECT COUNT(*) FROM counted") == (5,)


def test_weighing_writes_nothing(suspicions):
    work = make_submission(ALICE, b"r" * 32)
    found = [suspicions.weigh(work, TOLERANCE, evidence=[(0.4, 16.0, 0.4)] * 200) for _ in range(2)]
    assert found[0] is not None
    assert found[0] == found[1]
    assert suspicions.update(make_submission(ALICE, b"r" * 32, index=1), TOLERANCE, evidence=HONEST) is None


def test_a_submission_without_evidence_changes_nothing(hand_in):
    assert hand_in(ALICE, []) is None


def test_a_damaged_docket_is_named(tmp_path):
    path = tmp_path / "docket.sqlite"
    suspicions = Suspicions(path)
    suspicions.update(make_submission(ALICE, b"r" * 32), TOLERANCE, evidence=HONEST)
    suspicions._db.change("UPDATE suspicions SET state = x'c1'")
    with pytest.raises(DataDirError, match="damaged"):
        suspicions.update(make_submission(ALICE, b"r" * 32, step=1), TOLERANCE, evidence=HONEST)
    suspicions.close()
