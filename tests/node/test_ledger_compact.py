"""Submissions kept as bytes: every state, row and verdict is as it is in a plain dict."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from bench.synthetic_ledger import entries, manifest
from node.dashboard.world import find_submission, submission_rows
from node.ledger.compact import AT_ONCE, CompactSubmissions, live_state, looked_at
from node.ledger.rows import leaderboard, submissions_of
from node.relay.standing import standing_of
from protocol.ledger import LedgerMemory, LedgerState, LedgerSubmission, open_entry
from protocol.records import Submission, Verdict

ENTRIES = 1500
HOT = 3


@pytest.fixture(scope="module")
def ledger() -> list[bytes]:
    return list(islice(entries(ENTRIES), ENTRIES))


def states(ledger: list[bytes]) -> Iterator[tuple[LedgerState, LedgerState]]:
    """A plain state and a compact one, after each entry."""
    run = manifest()
    plain = LedgerState(run.id, run.record, signatures_checked=True)
    compact = LedgerState(
        run.id, run.record, memory=LedgerMemory(submissions=CompactSubmissions(HOT)), signatures_checked=True
    )
    for data in ledger:
        plain.apply(data)
        compact.apply(data)
        yield plain, compact


def test_replay_gives_the_same_state(ledger):
    for plain, compact in states(ledger):
        assert list(compact.unaccepted) == list(plain.unaccepted)
    assert plain.length == ENTRIES
    assert list(submissions_of(compact)) == list(submissions_of(plain))
    assert leaderboard(compact) == leaderboard(plain)
    assert submission_rows(compact) == submission_rows(plain)
    assert any(one.used_in is not None for one in compact.submissions.values())
    for key in plain.submissions:
        assert find_submission(compact, key) == find_submission(plain, key)


def test_those_that_are_not_accepted_are_known_without_a_walk(ledger):
    *_, (plain, _) = states(ledger)
    assert list(plain.unaccepted) == [key for key, one in plain.submissions.items() if one.state != "accepted"]
    assert 0 < len(plain.unaccepted) < len(plain.submissions)


def test_only_the_newest_are_objects(ledger):
    """What nobody looked at lately takes bytes, and is an object again for whoever looks."""
    submissions = CompactSubmissions(HOT)
    made = [open_entry(data, signature_checked=True) for data in ledger]
    works = [one for one in made if isinstance(one.record, Submission)]
    votes = {one.record.submission: one for one in made if isinstance(one.record, Verdict)}
    for work in works:
        submissions[work.id] = LedgerSubmission(work.record, work.author)
        if work.id in votes:
            submissions[work.id].verdicts[votes[work.id].author] = votes[work.id]
    assert sum(one is submissions.look(key) for key, one in submissions.items()) == HOT
    assert [one.record for one in submissions.values()] == [work.record for work in works]
    old = submissions[works[0].id]
    assert old is submissions[works[0].id]
    assert [vote.record for vote in old.verdicts.values()] == [votes[works[0].id].record]


def test_a_change_of_what_was_looked_up_stays(ledger):
    submissions = CompactSubmissions(1)
    works = [one for data in ledger if isinstance((one := open_entry(data, signature_checked=True)).record, Submission)]
    for work in works[:4]:
        submissions[work.id] = LedgerSubmission(work.record, work.author)
    submissions[works[0].id].used_in = 7
    for work in works[4:8]:
        submissions[work.id] = LedgerSubmission(work.record, work.author)
    assert submissions[works[0].id].used_in == 7
    del submissions[works[0].id]
    assert works[0].id not in submissions
    assert list(submissions) == [work.id for work in works[1:8]]
    with pytest.raises(KeyError):
        submissions[works[0].id]


def test_what_was_looked_up_is_put_away_a_few_at_a_time(ledger):
    """A walk by look-ups makes objects of all, and no later submission waits until all of them are bytes again."""
    submissions = CompactSubmissions(HOT)
    works = [one for data in ledger if isinstance((one := open_entry(data, signature_checked=True)).record, Submission)]
    assert len(works) > 4 * AT_ONCE
    for work in works[:-2]:
        submissions[work.id] = LedgerSubmission(work.record, work.author)
    for work in works[:-2]:
        submissions[work.id].used_in = 7
    before = objects(submissions)
    submissions[works[-2].id] = LedgerSubmission(works[-2].record, works[-2].author)
    assert objects(submissions) == before + 1 - AT_ONCE
    assert all(submissions.look(work.id).used_in == 7 for work in works[:-2])


def test_answers_to_others_leave_no_objects_behind(ledger):
    """A contributor asks where each of its old submissions stands; somebody opens each of them in the dashboard."""
    *_, (_, compact) = states(ledger)
    before = objects(compact.submissions)
    keys = list(compact.submissions)
    for key in keys:
        author = looked_at(compact.submissions, key).author
        assert [row.submission for row in standing_of(compact, author, [key]).submissions] == [key]
        assert find_submission(compact, key) is not None
    submission_rows(compact)
    assert objects(compact.submissions) == before < len(keys)
    assert looked_at(compact.submissions, b"n" * 32) is None


def objects(submissions):
    return sum(one is submissions.look(key) for key, one in submissions.items())


def test_nodes_keep_it_so():
    assert isinstance(live_state(manifest()).submissions, CompactSubmissions)
