"""Policies: what a node holds, and what it does when its disk is full."""

import trio
from factories import OPERATOR

from node import policies as policies_module
from node.policies import Policies
from node.status import StatusBoard
from p2p.limits import DAY_S, DownloadBudget
from p2p.shardcast.patch_client import Savings
from p2p.shardcast.store import CheckpointStore
from protocol.errors import DataDirError

RUN_ID = b"r" * 32


async def publish(store, directory, *, step):
    await trio.Path(directory).mkdir(exist_ok=True)
    await trio.Path(directory / "config.json").write_bytes(b"{%d}" % step)
    return await store.publish(directory, identity=OPERATOR, run_id=RUN_ID, step=step, shard_bytes=4096)


class Client:
    """Downloads by publishing into the node's own store; says first that the disk is full."""

    def __init__(self, store, source):
        self.store, self.source = store, source
        self.savings = Savings()
        self.asked = []

    async def download(self, checkpoint, *, step=None):
        self.asked.append(checkpoint)
        if len(self.asked) == 1:
            raise DataDirError("the disk is full")
        return await publish(self.store, self.source, step=1)

    async def follow(self, on_installed, *, until_allowed):
        await trio.sleep_forever()


async def test_a_full_disk_is_waited_for_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(policies_module, "DISK_RETRY_S", 0.0)
    store = CheckpointStore(tmp_path / "node")
    board = StatusBoard(role="inference", peer_id=OPERATOR.peer_id, run="x/y")
    client = Client(store, tmp_path / "policy")
    said = []
    monkeypatch.setattr(board, "waiting", said.append)
    policies = Policies(store, client, None, board)
    with trio.fail_after(10):
        path = await policies.fetch(b"c" * 32, deadline_s=0.0)
        assert path is None
        await policies.fetch(b"c" * 32, deadline_s=0.05)
    assert "the disk is full" in said[0]
    assert len(client.asked) > 1
    assert [step for step, _ in store.complete()] == [1]


async def test_a_policy_that_an_engine_loads_is_not_removed_meanwhile(tmp_path):
    store = CheckpointStore(tmp_path / "node", keep=1)
    board = StatusBoard(role="inference", peer_id=OPERATOR.peer_id, run="x/y")
    policies = Policies(store, Client(store, tmp_path), None, board)
    first = await publish(store, tmp_path / "one", step=1)
    with policies.kept(first.id) as path:
        await publish(store, tmp_path / "two", step=2)
        await publish(store, tmp_path / "three", step=3)
        assert (path / "config.json").exists()
    assert store.prune() == [1]
    with policies.kept(first.id) as path:
        assert path is None


class Swarm:
    """Never hears of a head."""

    async def wait_head(self, after):
        await trio.sleep_forever()


async def test_a_node_that_starts_again_goes_on_with_the_newest_policy_that_is_sound(tmp_path):
    """Its disk has damaged the newest policy meanwhile: no engine loads it, and it can be downloaded again."""
    old = CheckpointStore(tmp_path / "node")
    first, second = [await publish(old, tmp_path / str(step), step=step) for step in (1, 2)]
    (old.local_dir(second.id) / "config.json").write_bytes(b"{3}")
    store = CheckpointStore(tmp_path / "node")
    board = StatusBoard(role="inference", peer_id=OPERATOR.peer_id, run="x/y")
    policies = Policies(store, Client(store, tmp_path), Swarm(), board)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(policies.run)
            assert policies.newest(0) == (1, first.id, store.local_dir(first.id))
            nursery.cancel_scope.cancel()


async def test_a_day_whose_bytes_are_spent_is_waited_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(policies_module, "BUDGET_RETRY_S", 0.01)
    day = [DAY_S * 5.5]
    budget = DownloadBudget(bytes_per_day=10, day_clock=lambda: day[0])
    budget.take(11)
    store = CheckpointStore(tmp_path / "node")
    board = StatusBoard(role="inference", peer_id=OPERATOR.peer_id, run="x/y")
    client = Client(store, tmp_path / "policy")
    client.asked.append(b"")  # its disk is not full
    policies = Policies(store, client, None, board, budget=budget)
    with trio.fail_after(10):
        assert await policies.fetch(b"c" * 32, deadline_s=0.05) is None
        assert client.asked == [b""]
        assert board.snapshot()["activity"] == "midnight UTC: the 10 bytes that may be downloaded today have come"
        day[0] += DAY_S
        await policies.fetch(b"c" * 32, deadline_s=0.05)
    assert client.asked[1] == b"c" * 32
