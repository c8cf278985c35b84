"""A status server with a dashboard on loopback, a ledger to show, and ways to ask it."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import tokenizers
import trio
from factories import OPERATOR, make_batch, make_manifest, make_submission, make_trained, make_verdict, sealed

from node.dashboard.routes import Dashboard
from node.dashboard.sources import Sources
from node.status import StatusBoard, serve_status
from p2p.bridge import AioThread
from protocol.envelope import open_envelope
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import Batch, Trained
from protocol.rollouts import Rollout, write_rollouts
from protocol.run import RunAddress

ALICE, BOB = (Identity.from_phrase(name) for name in ("alice", "bob"))
MANIFEST = sealed(make_manifest(), OPERATOR)
RUN = RunAddress(OPERATOR.peer_id, "test")
HOSTILE = "<img src=x onerror=document.title='owned'>"
WORDS = ("<pad>", "sort", "</s>", HOSTILE, "\u202e\x1b[2J", "three")


def make_state(*, submissions: int = 3) -> LedgerState:
    """Alice handed in so many submissions, accepted each; Bob one, rejected with a hostile reason."""
    state = LedgerState(MANIFEST.id, MANIFEST.record)
    for number in range(submissions):
        add(state, ALICE, number)
    add(state, BOB, 0, outcome="reject", hard=True, reason=f"toploc: {HOSTILE}")
    return state


def add(state: LedgerState, who: Identity, number: int, **verdict: Any) -> bytes:
    """One more submission and its verdict; its id."""
    per_step = state.manifest.rollout.max_submissions_per_step
    step, index = divmod(number, per_step)
    made = make_submission(who, MANIFEST.id, step=step, index=index, sha256=who.sign(number.to_bytes(8, "big"))[:32])
    for before in range(len(state.batches), step):
        state.committed[before] = open_envelope(make_batch(MANIFEST.id, before, [made]), Batch).record
    state.apply(made.data)
    state.apply(make_verdict(made, **verdict).data)
    return made.id


def train(state: LedgerState, steps: int, **metrics: float) -> None:
    """Steps as the ledger would have them after their batches."""
    for step in range(len(state.trained), len(state.trained) + steps):
        record = open_envelope(make_trained(MANIFEST.id, step), Trained).record
        measured = {"tokens": 800.0, "rollouts": 8.0, "loss": 0.1, **metrics}
        state.trained[step] = msgspec.structs.replace(
            record, mean_reward=min(1.0, step / steps), metrics=measured, issued_at_ms=1000 * (step + 1)
        )


def write_tokenizer(directory: Path) -> Path:
    """A tokenizer of a few words, one of which is HTML."""
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizers.Tokenizer(model).save(str(directory / "tokenizer.json"))
    return directory


def write_answers(path: Path, answers: list[tuple[list[int], float]]) -> Path:
    """A rollout file of groups of two."""
    rollouts = [
        Rollout(
            prompt_index=at // 2, member=at % 2, prompt_ids=[1, 5], output_ids=ids, logprobs=[-0.5] * len(ids),
            reward=reward, finish_reason="stop", proofs=[b"p"],
        )
        for at, (ids, reward) in enumerate(answers)
    ]  # fmt: skip
    write_rollouts(path, rollouts)
    return path


class Shown:
    """A dashboard that is served."""

    def __init__(self, url: str, board: StatusBoard, sources: Sources, streams: AsyncExitStack) -> None:
        self.url, self.board, self.sources, self._streams = url, board, sources, streams
        self.port = int(urlsplit(url).port or 0)

    async def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        return await trio.to_thread.run_sync(self._get, path, method, headers)

    async def json(self, path: str) -> tuple[int, Any]:
        status, _, body = await self.get(path)
        return status, json.loads(body)

    async def stream(self) -> Events:
        """An open stream of events."""
        connection = await self._streams.enter_async_context(await trio.open_tcp_stream("127.0.0.1", self.port))
        await connection.send_all(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        return Events(connection)

    def _get(self, path: str, method: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.putrequest(method, path, skip_host="Host" in sent)
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            return response.status, dict(response.headers), response.read()
        finally:
            connection.close()


class Events:
    """Reads server-sent events; chunk sizes lie between them and are skipped with everything that is no field."""

    def __init__(self, connection: trio.SocketStream) -> None:
        self.connection = connection
        self._data = b""

    async def until(self, text: bytes) -> bytes:
        """Everything up to a text, which is taken too."""
        while text not in self._data:
            more = await self.connection.receive_some(65536)
            if not more:
                raise EOFError(self._data[-500:])
            self._data += more
        before, found, self._data = self._data.partition(text)
        return before + found

    async def section(self, name: str) -> Any:
        """The data of the next event of a kind."""
        await self.until(f"event: {name}\ndata: ".encode())
        return json.loads(_without_chunks(await self.until(b"\n\n")))


def _without_chunks(data: bytes) -> bytes:
    """JSON has no raw line breaks: what lies between two of them is a chunk's frame."""
    return b"".join(data.split(b"\r\n")[::2])


@asynccontextmanager
async def showing(
    directory: Path, *, state: LedgerState | None = None, obtain: Any = None, tokenizer: Path | None = None
) -> AsyncIterator[Shown]:
    """A contributor's page. `state` is its ledger."""
    board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run=str(RUN))

    async def find() -> Path | None:
        return tokenizer

    sources = Sources(RUN)
    sources.ledger = lambda: state
    sources.obtain = obtain
    sources.tokenizer = find
    async with AioThread() as aio, trio.open_nursery() as nursery:

        async def serve(task_status: trio.TaskStatus[str]) -> None:
            dashboard = Dashboard(board, sources, log_path=directory / "dashboard.log", period_s=0.05)
            await serve_status(board, aio, data_dir=directory, dashboard=dashboard, task_status=task_status)

        url = await nursery.start(serve)
        async with AsyncExitStack() as streams:
            yield Shown(url.removesuffix("status"), board, sources, streams)
        nursery.cancel_scope.cancel()
