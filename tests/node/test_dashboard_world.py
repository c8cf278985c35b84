"""The rows that the dashboard makes of a ledger's replay."""

import itertools
import math
from types import SimpleNamespace

import msgspec
from dashboard_kit import ALICE, BOB, RUN, add, make_state, train
from factories import make_submission

from node.dashboard.sections import Sections
from node.dashboard.world import (
    COLUMNS,
    MAX_STEPS,
    MAX_SUBMISSIONS,
    contributor_rows,
    find_submission,
    run_facts,
    series_rows,
    submission_rows,
)
from node.status import StatusBoard


def test_a_run_is_its_address_until_its_ledger_is_known():
    assert run_facts(None, RUN) == {"address": str(RUN), "name": "test", "operator": str(RUN.operator)}
    assert run_facts(make_state(), RUN)["ledger_length"] == 8


def test_a_step_has_a_cell_for_every_column_and_none_for_what_was_not_measured():
    state = make_state()
    train(state, 2, staleness=math.nan, entropy=math.inf)
    first, second = (dict(zip(COLUMNS, row, strict=True)) for row in series_rows(state))
    assert first["tokens_per_s"] is None
    assert second["tokens_per_s"] == 800.0
    assert second["length"] == 100.0
    assert second["kl"] is second["staleness"] is second["entropy"] is None
    msgspec.json.encode([first, second])


def test_a_long_run_is_thinned_evenly_from_its_first_to_its_last_step():
    state = make_state()
    train(state, 1)
    one = state.trained[0]
    state.trained = {step: msgspec.structs.replace(one, step=step) for step in range(3 * MAX_STEPS)}
    steps = [row[0] for row in series_rows(state)]
    assert len(steps) == MAX_STEPS
    assert (steps[0], steps[-1]) == (0, 3 * MAX_STEPS - 1)
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 4


def test_only_new_steps_are_made_into_rows():
    state = make_state()
    sections = Sections(
        StatusBoard(role="watch", peer_id="peer", run=str(RUN)), SimpleNamespace(ledger=lambda: state, run=RUN)
    )
    made = []
    for steps in (3, 40, 1):
        train(state, steps)
        state.apply(make_submission(BOB, state.run_id, index=1 + len(made)).data)
        before, _ = sections._rows, sections.refresh()
        made.append(sum(all(row is not known for known in before) for row in sections._rows))
        assert sections._rows == series_rows(state)
    assert made == [3, 40, 1]


def test_contributors_come_by_credits():
    rows = contributor_rows(make_state())
    assert [row["peer_id"] for row in rows] == [str(ALICE.peer_id), str(BOB.peer_id)]
    assert rows[0]["credits"] > rows[1]["credits"] == 0
    assert rows[1]["rejected"] == {"toploc": 1}


def test_rejections_stay_when_many_acceptances_follow():
    state = make_state(submissions=0)
    keys = [add(state, ALICE, number) for number in range(MAX_SUBMISSIONS + 5)]
    rows = submission_rows(state)
    assert len(rows) == MAX_SUBMISSIONS + 1
    assert rows[0]["id"] == keys[-1].hex()
    assert [row["contributor"] for row in rows if row["state"] == "rejected"] == [str(BOB.peer_id)]


def test_one_submission_is_shown_with_every_check_and_limit():
    state = make_state()
    key = next(key for key, one in state.submissions.items() if one.author == BOB.peer_id)
    found = find_submission(state, key)
    assert found["hard"]
    assert found["verdicts"][0]["checks"]
    assert {"numbers", "limits", "outcome", "name"} <= found["verdicts"][0]["checks"][0].keys()
    msgspec.json.encode(found)
    assert find_submission(state, bytes(32)) is None
