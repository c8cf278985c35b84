import pytest

from simnet.gather import Life, NodeRecord
from simnet.waits import spells, waits_of

S = 1000


def test_spells_begin_with_the_start_and_end_with_the_life(recording):
    node = NodeRecord("a", "relay", "x")
    node.lives = [Life(1, 0, 10 * S), Life(2, 20 * S, None)]
    node.timeline = [(4 * S, "working", "w"), (25 * S, "waiting", "z")]
    assert list(spells(node, 30 * S)) == [
        (0, 4 * S, "waiting", "starting"),
        (4 * S, 10 * S, "working", "w"),
        (20 * S, 25 * S, "waiting", "starting"),
        (25 * S, 30 * S, "waiting", "z"),
    ]


def test_waiting_is_added_by_what_is_waited_for(recording):
    start = recording.started_ms
    for node in recording.nodes:
        node.timeline = []
    trainer = recording.nodes[0]
    trainer.timeline = [
        (start + 10 * S, "waiting", "accepted rollouts for step 0"),
        (start + 30 * S, "working", "training step 0"),
        (start + 40 * S, "waiting", "accepted rollouts for step 1"),
        (start + 50 * S, "waiting", "<b>nobody knows</b>"),
    ]
    rows = [(row.what, row.whom, row.seconds, row.share) for row in waits_of(recording) if row.role == "trainer"]
    assert rows == [
        ("other things", "somebody", 50.0, 0.5),
        ("accepted rollouts", "contributors, validators", 30.0, 0.3),
        ("a start", "its own", 10.0, 0.1),
    ]


@pytest.mark.parametrize("role", ["trainer", "relay", "validator", "inference"])
def test_roles_come_in_the_order_of_the_fleet(recording, role):
    roles = list(dict.fromkeys(row.role for row in waits_of(recording)))
    assert role in roles
    assert roles == list(dict.fromkeys(node.role for node in recording.nodes))
