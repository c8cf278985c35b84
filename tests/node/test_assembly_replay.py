"""Starting on a long ledger: its replay holds up nothing else of a node."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from factories import make_manifest

from node import assembly
from node.status import StatusBoard


class Replayed(Exception):
    """The replay came to its end."""


def test_the_loop_goes_on_while_a_ledger_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that comes back answers its peers meanwhile, and its status says what it is at."""
    board = StatusBoard(role="trainer", peer_id="a", run="a/b")

    def replay(*_: object, **__: object) -> None:
        assert "replaying" in trio.from_thread.run_sync(board.snapshot)["activity"]
        raise Replayed

    async def nothing(*_: object, **__: object) -> None:
        await trio.lowlevel.checkpoint()

    recipe = SimpleNamespace(evaluation=SimpleNamespace(every_steps=0))
    monkeypatch.setattr(assembly, "_own_run", lambda node: SimpleNamespace(record=make_manifest()))
    monkeypatch.setattr(assembly, "_compute", nothing)
    monkeypatch.setattr(assembly, "load_recipe", lambda path: recipe)
    monkeypatch.setattr(assembly, "live_ledger", replay)
    node = SimpleNamespace(
        config=SimpleNamespace(role="trainer"),
        board=board,
        path=lambda name: Path("/none") / name,
        data=SimpleNamespace(sub=lambda name: None),
    )
    with pytest.raises(Replayed):
        trio.run(assembly.build_role, node, None, assembly.InferenceKind())
