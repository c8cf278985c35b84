"""Who waited for whom: each node's time, by what it said it waited for.

What nodes say is text for people; what they wait for is recognised by its words, and what is not is called `other`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from simnet.gather import NodeRecord, Recording

FOR_WHOM: Final = (
    ("accepted rollouts", "accepted rollouts", "contributors, validators"),
    ("verdicts about the last", "the last verdicts", "validators"),
    ("enough rollouts", "the next step", "the trainer"),
    ("checkpoint", "a checkpoint", "relays, the trainer"),
    ("submissions at the relays", "submissions", "contributors"),
    ("beacons, files or policies", "beacons, files, policies", "the trainer, relays"),
    ("bootstrap peers", "a way into the run", "relays (discovery)"),
    ("trainer to find this relay", "the trainer's visit", "the trainer"),
    ("head", "the run's head", "the trainer, relays"),
    ("news from the trainer", "the run's head", "the trainer, relays"),
    ("finished", "the others to leave", "everyone"),
    ("all steps are trained", "the others to leave", "everyone"),
    ("starting", "a start", "its own"),
    ("the engine", "the engine", "its own"),
    ("room on the disk", "room on the disk", "its own"),
)
"""Words, what is waited for, and who has it. The first that fits counts."""
OTHER: Final = ("other things", "somebody")


class Wait(Struct):
    """One role's nodes together, waiting for one thing."""

    role: str
    what: str
    whom: str
    seconds: float
    share: float
    """Of the time that the role's nodes were there."""
    nodes: int


def spells(node: NodeRecord, end_ms: int) -> Iterator[tuple[int, int, str, str]]:
    """From when until when a node did what: begin, end, `working` or `waiting`, and what, life by life.

    Until its first word it started, and what it did last it did until its end.
    """
    for life in node.lives:
        until_ms = life.ended_ms or end_ms
        words = [(life.started_ms, "waiting", "starting")]
        words += [entry for entry in node.timeline if life.started_ms <= entry[0] < until_ms]
        ends = [word[0] for word in words[1:]] + [until_ms]
        for (at_ms, kind, what), stop_ms in zip(words, ends, strict=True):
            if stop_ms > at_ms:
                yield at_ms, stop_ms, "working" if kind == "working" else "waiting", what


def waits_of(recording: Recording) -> list[Wait]:
    """Every role's waiting, longest first within a role, until the outcome was known."""
    end_ms = recording.closed_ms
    seconds: dict[tuple[str, str, str], float] = {}
    nodes: dict[tuple[str, str, str], set[str]] = {}
    there: dict[str, float] = {}
    for node in recording.nodes:
        for begin_ms, stop_ms, kind, what in spells(node, end_ms):
            spent_s = max(0, min(stop_ms, end_ms) - begin_ms) / 1000
            there[node.role] = there.get(node.role, 0.0) + spent_s
            if kind == "waiting" and spent_s:
                key = (node.role, *_meaning(what))
                seconds[key] = seconds.get(key, 0.0) + spent_s
                nodes.setdefault(key, set()).add(node.name)
    rows = [
        Wait(*key, seconds=round(spent, 1), share=round(spent / there[key[0]], 4), nodes=len(nodes[key]))
        for key, spent in seconds.items()
    ]
    order = list(dict.fromkeys(node.role for node in recording.nodes))
    return sorted(rows, key=lambda row: (order.index(row.role), -row.seconds))


def _meaning(what: str) -> tuple[str, str]:
    return next(((thing, whom) for words, thing, whom in FOR_WHOM if words in what), OTHER)
