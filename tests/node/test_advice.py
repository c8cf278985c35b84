"""The next step that a status suggests: the gravest thing first."""

import pytest

from node.advice import next_step

WELL = {
    "role": "inference",
    "state": "working",
    "accepted": 10,
    "rejected": {},
    "now_ms": 0,
    "since_ms": 0,
    "details": {},
}
LONG = {"state": "waiting", "now_ms": 400_000}
REACHED = {"discovery": {"peers": [{}]}}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "let it run"),
        ({"state": "waiting", "details": REACHED}, "it goes on by itself"),
        ({"state": "evicted", "rejected": {"toploc": 9}}, "verdict show last"),
        ({"state": "evicted"}, "an honest node appeals: intellect-node appeal last"),
        ({"state": "finished"}, "the run is finished"),
        ({"state": "stopping"}, "leave --now"),
        (LONG, "nobody was reached yet: intellect-node doctor"),
        ({**LONG, "details": REACHED}, "it has waited long"),
        ({"rejected": {"toploc": 5}}, "intellect-node calibrate"),
        ({"rejected": {"reward": 5}}, "shows what was measured"),
        ({"rejected": {"toploc": 1}}, "let it run"),
        ({"details": {"outbox": 9}}, "9 finished submissions reach no relay"),
        (
            {"role": "relay", "details": {"discovery": {"reachability": "others cannot reach this relay"}}},
            "let others in",
        ),
        ({"details": None, "rejected": None, "accepted": None}, "let it run"),
    ],
)
def test_what_to_do(change, text):
    assert text in next_step(WELL | change)


def test_a_status_that_says_nothing_suggests_nothing():
    assert next_step({}) == ""
