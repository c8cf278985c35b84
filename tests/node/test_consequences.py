"""Evictions and reinstatements are written whatever a crash cuts off: the next start finds them owed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from collector_world import ALICE, BOB, CARL, DAVE, RUN, THREE, World, hard, worlds
from factories import VALIDATOR, make_answer, make_appeal, make_manifest, make_submission, make_verdict

from node.ledger.duties import left
from protocol.envelope import Signed, kind_of
from protocol.ledger import LedgerState
from protocol.records import Verdict


def story() -> list[Signed[Any]]:
    """Alice is wronged and comes back; bob is caught, and appeals in vain; one of alice's rejections is soft."""
    good, wronged, bad = (make_submission(who, RUN, index=number) for who, number in ((ALICE, 0), (ALICE, 1), (BOB, 0)))
    later = make_submission(ALICE, RUN, index=2)
    lie, caught = hard(wronged, CARL), hard(bad, CARL)
    asks, in_vain = make_appeal(ALICE, lie), make_appeal(BOB, caught)
    refusal = make_answer(bad, in_vain, by=DAVE, outcome="reject", hard=True, reason="seed: made up")
    softly = [make_verdict(later, by=judge, outcome="reject", reason="reward: another") for judge in (VALIDATOR, DAVE)]
    return [
        *(good, make_verdict(good), make_verdict(good, by=DAVE)),
        *(wronged, hard(wronged, VALIDATOR), lie),
        *(bad, hard(bad, VALIDATOR), caught),
        *(asks, make_answer(wronged, asks, by=DAVE)),
        *(in_vain, refusal),
        *(later, *softly),
    ]


def court(directory: Path) -> World:
    directory.mkdir(exist_ok=True)
    return worlds(directory, validators=THREE, quorum=2)


def outcome(state: LedgerState) -> dict[str, tuple[str, int, int]]:
    return {str(peer): (one.standing, one.credits, one.balance.forfeited) for peer, one in state.contributors.items()}


def undone(state: LedgerState) -> list[str]:
    """What an audit of a run that is over would name."""
    return [duty.kind for duty in left(state, over=True)]


def whole(directory: Path) -> tuple[list[bytes], dict[str, tuple[str, int, int]]]:
    """The ledger of a trainer that nothing befalls."""
    world = court(directory)
    with closing(world.ledger):
        trio.run(partial(world.hear, *story()))
        return world.ledger.entries(0, 99), outcome(world.state)


def start_again(directory: Path, entries: Sequence[bytes] = ()) -> World:
    """What the trainer's next start does with what a crash left: `entries`, where the files are not there yet."""
    world = court(directory)
    world.ledger.append(entries)
    world.collector.catch_up()
    return world


def test_nothing_is_owed_after_a_cut_at_any_entry(tmp_path: Path) -> None:
    """The trainer dies after any entry of a run with verdicts, evictions, appeals and reinstatements."""
    entries, wanted = whole(tmp_path / "whole")
    kinds, owed_at = [kind_of(entry) for entry in entries], []
    for cut in range(len(entries) + 1):
        before = LedgerState(RUN, make_manifest(validators=THREE, quorum=2))
        for entry in entries[:cut]:
            before.apply(entry)
        owed_at += [cut] if undone(before) else []
        world = start_again(tmp_path / str(cut), entries[:cut])
        with closing(world.ledger):
            assert undone(world.state) == []
            assert world.state.length == cut + (cut in owed_at)
            trio.run(partial(world.hear, *story()))
            assert (outcome(world.state), undone(world.state)) == (wanted, [])
            assert sorted(map(kind_of, world.ledger.entries(0, 99))) == sorted(kinds)
    consequences = [number for number, kind in enumerate(kinds) if kind in ("eviction", "reinstatement")]
    assert owed_at == consequences
    assert len(consequences) == 3


def die(directory: Path, kind: str, number: int) -> None:
    """A trainer that is killed as soon as its ledger has that many votes, or answers, of a kind."""
    world, seen = court(directory), 0
    append = world.ledger.append

    def append_and_die(entries: Sequence[bytes]) -> None:
        nonlocal seen
        append(entries)
        seen += kind_of(entries[-1]) == kind
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    world.ledger.append = append_and_die  # type: ignore[method-assign]
    trio.run(partial(world.hear, *story()))


@pytest.mark.parametrize(
    ("kind", "number", "owed"), [(Verdict.KIND, 4, "eviction"), (Verdict.KIND, 7, "reinstatement")]
)
def test_a_killed_trainer_writes_what_it_owes(tmp_path: Path, kind: str, number: int, owed: str) -> None:
    """kill -9 between an entry and its consequence, with the files as the process left them."""
    _, wanted = whole(tmp_path / "whole")
    code = f"import test_consequences as t; t.die(t.Path({str(tmp_path / 'killed')!r}), {kind!r}, {number})"
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, timeout=60)
    assert done.returncode == -signal.SIGKILL
    world = court(tmp_path / "killed")
    with closing(world.ledger):
        assert [duty.kind for duty in world.state.owed()] == [owed]
        world.collector.catch_up()
        assert undone(world.state) == []
        trio.run(partial(world.hear, *story()))
        assert outcome(world.state) == wanted
