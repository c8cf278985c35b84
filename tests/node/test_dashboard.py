"""The dashboard's server: who may ask, what it streams, and what it reads of strangers' files."""

import contextlib
import re
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
from dashboard_kit import ALICE, BOB, HOSTILE, RUN, add, make_state, showing, train, write_answers, write_tokenizer

from node.dashboard.reading import MAX_WAITING
from node.dashboard.routes import ASSETS
from node.dashboard.sources import Sources
from node.dashboard.stream import MAX_STREAMS
from node.status import StatusBoard, serve_status
from p2p.bridge import AioThread
from p2p.http.listen import listening_socket
from protocol.errors import PortError


def files(path):
    """What a role gives the dashboard to find files with: this one, whatever is asked for."""

    @asynccontextmanager
    async def obtain(key, submission):
        yield path

    return obtain


async def test_every_file_of_the_page_is_served_under_a_policy_without_exceptions(tmp_path):
    with trio.fail_after(30):
        async with showing(tmp_path) as shown:
            status, headers, page = await shown.get("/")
            assert status == 200
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "unsafe" not in policy
            for name in re.findall(r'"(/assets/[^"]+)"', page.decode()):
                status, headers, _ = await shown.get(name)
                assert status == 200
                assert headers["X-Content-Type-Options"] == "nosniff"
            assert (await shown.get("/status"))[0] == 200


def test_the_page_has_no_way_to_write_html_or_inline_anything():
    for path in ASSETS.iterdir():
        text = path.read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert forbidden not in text, path.name
        if path.suffix == ".html":
            assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]+src=)", text)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors"},
    ],
)
async def test_other_sites_pages_get_nothing(tmp_path, headers):
    """Attack: DNS rebinding, and a web page that has the browser ask 127.0.0.1."""
    with trio.fail_after(30):
        async with showing(tmp_path, state=make_state()) as shown:
            for path in ("/api/events", "/status", "/metrics", f"/api/submissions/{'00' * 32}"):
                assert (await shown.get(path, **headers))[0] == 403


async def test_its_own_page_and_a_link_to_it_are_let_in(tmp_path):
    with trio.fail_after(30):
        async with showing(tmp_path) as shown:
            own = {"Origin": f"http://127.0.0.1:{shown.port}", "Sec_Fetch_Site": "same-origin"}
            assert (await shown.get("/status", **own))[0] == 200
            link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
            assert (await shown.get("/", **link))[0] == 200
            assert (await shown.get("/status", **link))[0] == 403


async def test_nothing_can_be_changed_and_no_path_leads_out(tmp_path):
    """Attack: path traversal, other methods, ids and numbers that are none."""
    with trio.fail_after(30):
        async with showing(tmp_path, state=make_state()) as shown:
            for path in (
                "/assets/../routes.py",
                "/assets/..%2froutes.py",
                "/assets/%2e%2e/routes.py",
                "/../etc/passwd",
            ):
                assert (await shown.get(path))[0] == 404
            for method in ("POST", "PUT", "DELETE"):
                assert (await shown.get("/", method=method))[0] == 405
            for path in ("zz", "00", "..%2f..", "00" * 33):
                assert (await shown.get(f"/api/submissions/{path}"))[0] in (400, 404)
            for query in ("first=-1", "first=1e9", "count=99999999999", "count=%D9%A3"):
                path = f"/api/submissions/{'00' * 32}/rollouts?{query}"
                assert (await shown.get(path))[0] == 400


async def test_the_stream_gives_everything_and_then_what_changes(tmp_path):
    state = make_state()
    train(state, 3)
    with trio.fail_after(30):
        async with showing(tmp_path, state=state) as shown:
            stream = await shown.stream()
            assert (await stream.section("node"))["peer_id"] == str(ALICE.peer_id)
            assert (await stream.section("contributors"))[0]["peer_id"] == str(ALICE.peer_id)
            assert (await stream.section("submissions"))[0]["contributor"] == str(BOB.peer_id)
            series = await stream.section("series")
            assert (series["first"], len(series["rows"])) == (0, 3)
            assert shown.sources.wanted.is_set()
            shown.board.waiting("the moon")
            assert (await stream.section("node"))["activity"] == "the moon"
            train(state, 1)
            add(state, ALICE, 3)
            series = await stream.section("series")
            assert (series["first"], len(series["rows"])) == (3, 1)
            again = await shown.stream()
            await again.section("contributors")
            assert len((await again.section("series"))["rows"]) == 4


async def test_what_the_ledger_has_too_is_not_streamed_from_the_board(tmp_path):
    """Attack by success: a trainer of 100 000 steps would copy all of them every second."""
    with trio.fail_after(30):
        async with showing(tmp_path, state=make_state()) as shown:
            shown.board.details(metrics=[{"step": 1}], verdicts=[1], outbox=3)
            shown.board.details(evaluations=[{"step": 4, "pass_at": [{"k": 1, "value": 0.5, "low": 0.4, "high": 0.6}]}])
            stream = await shown.stream()
            assert (await stream.section("node"))["details"].keys() == {"outbox", "dashboard"}
            assert await stream.section("evaluations") == [[4, 0.5, 0.4, 0.6]]


async def test_a_hundred_streams_leave_room_for_everything_else(tmp_path):
    """Attack: a hundred open pages; those beyond the bound are refused, and closed ones make room."""
    with trio.fail_after(30):
        async with showing(tmp_path, state=make_state()) as shown:
            streams = [await shown.stream() for _ in range(MAX_STREAMS)]
            for stream in streams:
                await stream.section("node")
            for _ in range(100):
                refused = await shown.stream()
                assert b" 503 " in await refused.until(b"\r\n")
                await refused.connection.aclose()
            assert (await shown.get("/status"))[0] == 200
            await streams.pop().connection.aclose()
            while True:
                stream = await shown.stream()
                if b" 200 " in await stream.until(b"\r\n"):
                    break
                await stream.connection.aclose()
            await stream.section("node")


async def test_a_port_that_is_taken_is_named_with_the_flag_that_helps(tmp_path):
    board = StatusBoard(role="relay", peer_id=ALICE.peer_id, run="r")
    with contextlib.closing(listening_socket("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with trio.fail_after(30), pytest.RaisesGroup(PortError) as raised:
            async with AioThread() as aio:
                await serve_status(board, aio, data_dir=tmp_path, port=port)
    (error,) = raised.value.exceptions
    assert f"port {port}" in error.message
    assert "--status-port" in error.hint


async def test_rollouts_are_read_as_text_and_nothing_in_them_is_more_than_text(tmp_path):
    """Attack: a completion holds HTML, control characters and a mark that turns the text's direction around."""
    path = write_answers(tmp_path / "file", [([3, 2], 1.0), ([4, 5, 2], float("nan")), ([5, 2], 0.0), ([5, 5, 2], 0.5)])
    tokenizer = write_tokenizer(tmp_path / "policy")
    state = make_state()
    key = next(iter(state.submissions)).hex()
    with trio.fail_after(60):
        async with showing(tmp_path, state=state, obtain=files(path), tokenizer=tokenizer) as shown:
            status, found = await shown.json(f"/api/submissions/{key}/rollouts")
            assert status == 200
            assert (found["total"], found["decoded"]) == (4, True)
            first, second = found["groups"]
            assert first["prompt"]["text"] == "sort three"
            assert [one["reward"] for one in first["answers"]] == [1.0, None]
            assert first["answers"][0]["text"] == HOSTILE
            assert first["answers"][1]["text"] == "\\u202e\\x1b[2J three"
            assert [one["member"] for one in second["answers"]] == [0, 1]
            _, found = await shown.json(f"/api/submissions/{key}/rollouts?first=2&count=1")
            assert [len(group["answers"]) for group in found["groups"]] == [1]

            (tmp_path / "policy" / "tokenizer.json").unlink()
            shown.sources.tokenizer = Sources(RUN).tokenizer
            _, found = await shown.json(f"/api/submissions/{key}/rollouts")
            assert (found["decoded"], found["groups"][0]["prompt"]["text"]) == (False, "1 5")

            path.write_bytes(b"PAR1" + bytes(1000) + b"PAR1")
            status, found = await shown.json(f"/api/submissions/{key}/rollouts")
            assert status == 502
            assert "malformed" in found["error"]


async def test_files_that_cannot_be_read_are_named(tmp_path):
    """Attack: a file of gigabytes, a submission nobody knows, more readers than the node takes."""
    state = make_state()
    key = next(iter(state.submissions))
    with trio.fail_after(60):
        async with showing(tmp_path, state=state) as shown:
            status, found = await shown.json(f"/api/submissions/{'00' * 32}/rollouts")
            assert status == 404
            assert "no such submission" in found["error"]
            status, found = await shown.json(f"/api/submissions/{key.hex()}/rollouts")
            assert (status, found["error"]) == (404, "this node has no way to rollout files yet")
            one = state.submissions[key]
            one.record = msgspec.structs.replace(one.record, size=10**12)
            status, found = await shown.json(f"/api/submissions/{key.hex()}/rollouts")
            assert status == 413
            assert "up to 64 MiB" in found["error"]


async def test_readers_beyond_the_bound_are_told_to_come_again(tmp_path):
    """Attack: a page that asks for a hundred files at once."""
    state = make_state()
    key = next(iter(state.submissions)).hex()
    opened, go_on = trio.Event(), trio.Event()

    @asynccontextmanager
    async def obtain(key, submission):
        opened.set()
        await go_on.wait()
        yield tmp_path / "absent"

    statuses = []
    with trio.fail_after(60):
        async with showing(tmp_path, state=state, obtain=obtain) as shown, trio.open_nursery() as nursery:

            async def ask():
                statuses.append((await shown.json(f"/api/submissions/{key}/rollouts"))[0])
                if statuses.count(503) == 3:
                    go_on.set()

            nursery.start_soon(ask)
            await opened.wait()
            for _ in range(MAX_WAITING + 3):
                nursery.start_soon(ask)
    assert statuses.count(503) == 3
