"""Looking on without a role: the ledger is followed once somebody looks, and the board says where the run stands."""

from contextlib import asynccontextmanager

import pytest
import trio
from dashboard_kit import ALICE, MANIFEST, RUN, make_state
from factories import make_submission
from relay_world import make_head
from test_ledger_follow import FakeSwarm, entries_of, following, head_over, until_length
from typer.testing import CliRunner

from cli import app
from node.dashboard.sources import Sources, from_relays
from node.dashboard.watch import WatchParts, WatchRole
from node.inference.outbox import Outbox
from node.status import StatusBoard
from protocol.errors import ConfigError, RelayError
from protocol.ledger import LedgerSubmission


@asynccontextmanager
async def watching(swarm, ledger):
    """An onlooker of these relays whose ledger is this one."""
    board = StatusBoard(role="watch", peer_id=ALICE.peer_id, run=str(RUN))
    sources = Sources(RUN)
    role = WatchRole(WatchParts(swarm=swarm, sources=sources, board=board))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sources.follow, lambda: ledger)
        nursery.start_soon(role.run)
        yield board, sources
        nursery.cancel_scope.cancel()


async def until(board, state, text):
    while not (board.brief()["state"] == state and text in board.brief()["activity"]):  # noqa: ASYNC110
        await trio.sleep(0.01)


async def test_an_onlooker_says_where_the_run_stands_and_stays_when_it_is_over(tmp_path):
    entries = entries_of(ALICE)
    with trio.fail_after(30):
        async with following(tmp_path, entries) as (swarm, follower), watching(swarm, follower) as (board, sources):
            await until(board, "waiting", "a relay")
            swarm.set_head(head_over(entries, 2))
            await until_length(follower, len(entries))
            assert sources.ledger() is follower.state
            swarm.set_head(make_head(3, step=7, ledger_length=len(entries), ledger_tip=follower.state.tip))
            await until(board, "working", "following step 7")
            assert board.snapshot()["accepted"] == 3
            swarm.set_head(make_head(4, ledger_length=len(entries), ledger_tip=follower.state.tip, finished=True))
            await until(board, "finished", "the run is finished")


async def test_a_silent_trainer_is_said_to_be_silent(tmp_path, autojump_clock):
    class Ledger:
        state = make_state()

        async def run(self):
            await trio.sleep_forever()

    swarm = FakeSwarm([])
    async with watching(swarm, Ledger()) as (board, _):
        swarm.set_head(make_head(1, step=4, ledger_length=0))
        await trio.sleep(1)
        assert "following step 4" in board.snapshot()["activity"]
        await trio.sleep(60)
        assert "news from the trainer" in board.snapshot()["activity"]


async def test_files_are_this_nodes_own_where_it_has_them(tmp_path):
    outbox = Outbox(tmp_path / "outbox.sqlite")
    made = make_submission(ALICE, MANIFEST.id)
    path = tmp_path / "file"
    path.write_bytes(b"content")
    outbox.add(made, path)
    one = LedgerSubmission(made.record, made.author)
    with trio.fail_after(10):
        async with from_relays(FakeSwarm([]), tmp_path / "shown", own=outbox)(made.id, one) as found:
            assert found == path
    assert path.exists()
    outbox.close()


async def test_a_file_that_no_relay_has_is_an_error_with_the_reason(tmp_path):
    key, one = next(iter(make_state().submissions.items()))
    with trio.fail_after(10), pytest.raises(RelayError, match="no relay gives this file: none is known"):
        async with from_relays(FakeSwarm([]), tmp_path)(key, one):
            raise AssertionError("there is no file")


@pytest.mark.parametrize("arguments", [["--run", "x/y"], []])
def test_the_command_wants_a_runs_address(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = CliRunner().invoke(app, ["watch", *arguments])
    assert isinstance(found.exception, ConfigError)
    assert "--run" in found.exception.hint
    assert list(tmp_path.iterdir()) == []
