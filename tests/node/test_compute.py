"""Compute processes: calls, failures, crashes, hangs, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress

import pytest
import trio
import trio.testing

from node.compute.framing import encode_frame, frame_length
from node.compute.process import ChildDiskError, ComputeProcess, NoChildError
from protocol.errors import ComputeCrashed, ComputeError

WORKER = """
import os, subprocess, sys, time
from node.compute.serve import serve
from protocol.errors import DataDirError, ModelError

def add(a, b): return a + b
def echo(value): return value
def pid(): return os.getpid()
def environment(): return dict(os.environ)
def count(to, progress):
    for number in range(to):
        print("chatter", number)
        progress(number)
    return "done"
def fail(): raise ValueError("boom")
def refuse(): raise ModelError("no such model", hint="pick another")
def store(): raise DataDirError("no room", hint="make some")
def crash(): os._exit(7)
def forget(): raise MemoryError
def hog(size): return len(bytearray(size))
def hang():
    while True: pass
def unencodable(): return object()
def flood(size): sys.stderr.write("x" * size)
def spawn(): return subprocess.Popen(["sleep", "600"]).pid
os.write(2, b"starting\\n")
serve(dict(add=add, echo=echo, pid=pid, environment=environment, count=count, fail=fail, refuse=refuse, store=store,
    crash=crash, forget=forget, hog=hog, hang=hang, unencodable=unencodable, flood=flood, spawn=spawn))
"""


@pytest.fixture
def make(tmp_path):
    def make_process(source=WORKER, **options):
        (tmp_path / "worker_module.py").write_text(source)
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        env = {"PYTHONPATH": path, **options.pop("env", {})}
        return ComputeProcess("worker_module", name="worker", log_path=tmp_path / "w.log", env=env, **options)

    return make_process


@pytest.fixture
async def worker(make, nursery):
    process = make()
    await nursery.start(process.run)
    return process


async def call(process, method, **params):
    with trio.fail_after(60):
        return await process.call(method, timeout_s=30, **params)


async def until_gone(pid):
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with trio.fail_after(10):
        await trio.lowlevel.wait_readable(process)
    os.close(process)


async def test_call_returns_what_the_handler_returns(worker):
    assert await call(worker, "add", a=2, b=3) == 5
    assert await call(worker, "echo", value={"ids": [1, 2], "raw": b"\x00\xff", "text": "é"}) == {
        "ids": [1, 2],
        "raw": b"\x00\xff",
        "text": "é",
    }
    assert worker.restarts == 0


async def test_calls_are_answered_one_at_a_time_in_order(worker):
    order = []

    async def one(number):
        order.append(await call(worker, "echo", value=number))

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(one, number)
            await trio.testing.wait_all_tasks_blocked()
    assert order == [0, 1, 2, 3, 4]


async def test_progress_and_prints_do_not_disturb_the_result(worker):
    seen = []
    with trio.fail_after(60):
        assert await worker.call("count", timeout_s=30, on_progress=seen.append, to=3) == "done"
    assert seen == [0, 1, 2]
    await call(worker, "echo", value=0)
    assert "chatter 2" in worker.log_path.read_text()


@pytest.mark.parametrize(
    ("method", "text"),
    [("fail", "ValueError: boom"), ("refuse", "ModelError: no such model"), ("unencodable", "cannot be encoded")],
)
async def test_a_failing_handler_is_reported_and_the_child_lives_on(worker, method, text):
    before = await call(worker, "pid")
    with pytest.raises(ComputeError, match=text):
        await call(worker, method)
    assert await call(worker, "pid") == before


async def test_hints_cross_the_border(worker):
    with pytest.raises(ComputeError) as caught:
        await call(worker, "refuse")
    assert caught.value.hint == "pick another"


async def test_an_unknown_method_names_the_known_ones(worker):
    with pytest.raises(ComputeError, match=r"no method 'ad'.*add"):
        await call(worker, "ad")


async def test_wrong_parameters_are_an_error_not_a_crash(worker):
    with pytest.raises(ComputeError, match="TypeError"):
        await call(worker, "add", a=1)
    assert worker.restarts == 0


@pytest.mark.parametrize(("method", "text"), [("crash", "exit code 7"), ("forget", "ran out of memory")])
async def test_a_crash_costs_one_call(worker, method, text):
    with pytest.raises(ComputeCrashed, match=text):
        await call(worker, method)
    assert await call(worker, "add", a=1, b=1) == 2
    assert worker.restarts == 1


async def test_a_child_killed_from_outside_is_replaced(worker):
    pid = await call(worker, "pid")
    os.kill(pid, signal.SIGKILL)
    await until_gone(pid)
    with suppress(ComputeCrashed):  # the first call may still go to the dead one
        assert await call(worker, "pid") != pid
    assert await call(worker, "pid") != pid


async def test_a_call_past_its_deadline_kills_the_stuck_child(worker):
    pid = await call(worker, "pid")
    with trio.fail_after(30), pytest.raises(ComputeError, match=r"did not finish 'hang' within 0\.3 s"):
        await worker.call("hang", timeout_s=0.3)
    await until_gone(pid)
    assert await call(worker, "add", a=1, b=1) == 2


async def test_a_cancelled_call_frees_the_child(worker):
    pid = await call(worker, "pid")
    with trio.move_on_after(0.2):
        await call(worker, "hang")
    await until_gone(pid)
    assert await call(worker, "add", a=1, b=1) == 2


async def test_a_child_that_cannot_start_says_why(make, nursery):
    process = make("raise SystemExit('no accelerator here')")
    await nursery.start(process.run)
    with pytest.raises(NoChildError, match="before it was ready: no accelerator here"):
        await call(process, "add", a=1, b=1)


async def test_a_child_without_a_log_is_not_started(tmp_path, nursery):
    (tmp_path / "file").touch()
    process = ComputeProcess("worker_module", name="worker", log_path=tmp_path / "file" / "w.log")
    await nursery.start(process.run)
    with pytest.raises(NoChildError, match="cannot be started"):
        await call(process, "add", a=1, b=1)


async def test_a_disk_that_refuses_the_child_is_told_from_other_failures(worker):
    with pytest.raises(ChildDiskError, match="no room") as told:
        await call(worker, "store")
    assert told.value.hint == "make some"
    for method in ("refuse", "fail"):
        with pytest.raises(ComputeError) as other:
            await call(worker, method)
        assert not isinstance(other.value, ChildDiskError)


async def test_memory_limit_ends_the_child(make, nursery):
    process = make(memory_bytes=512 << 20)
    await nursery.start(process.run)
    with pytest.raises(ComputeCrashed, match="ran out of memory"):
        await call(process, "hog", size=1 << 30)
    assert await call(process, "hog", size=1 << 20) == 1 << 20


async def test_the_child_gets_threads_but_no_settings(make, nursery, monkeypatch):
    monkeypatch.setenv("INTELLECT_NODE_PASSPHRASE", "secret")
    process = make(threads=3)
    await nursery.start(process.run)
    environment = await call(process, "environment")
    assert environment["OMP_NUM_THREADS"] == "3"
    assert not [name for name in environment if name.upper().startswith(("INTELLECT_", "_INTELLECT_"))]


async def test_the_log_stays_small(worker):
    for _ in range(3):
        await call(worker, "flood", size=3 << 20)
    sizes = [path.stat().st_size for path in worker.log_path.parent.glob("w.log*")]
    assert len(sizes) == 2
    assert max(sizes) <= 4 << 20


async def test_cancelling_run_kills_child_and_grandchild(make):
    process = make()
    async with trio.open_nursery() as nursery:
        await nursery.start(process.run)
        pids = [await call(process, "pid"), await call(process, "spawn")]
        nursery.cancel_scope.cancel()
    for pid in pids:
        await until_gone(pid)


ORPHANING_NODE = """
import os, signal, sys, trio
from pathlib import Path
from node.compute.process import ComputeProcess

async def main():
    process = ComputeProcess("worker_module", name="worker", log_path=Path(sys.argv[1]))
    async with trio.open_nursery() as nursery:
        await nursery.start(process.run)
        pids = [await process.call("pid", timeout_s=60), await process.call("spawn", timeout_s=60)]
        nursery.start_soon(lambda: process.call("hang", timeout_s=600))
        print(*pids, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def start_a_node_and_kill_it(tmp_path):
    """Process ids of its child and grandchild."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-c", ORPHANING_NODE, str(tmp_path / "w.log")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as node:
        pids = [int(word) for word in node.stdout.readline().split()]
        node.kill()
    return pids


async def test_a_node_killed_outright_leaves_no_process_behind(make, tmp_path):
    """Attack: the node is killed with signal 9 while its child is busy; child and grandchild must not live on."""
    make()
    with trio.fail_after(120):
        pids = await trio.to_thread.run_sync(start_a_node_and_kill_it, tmp_path)
        assert len(pids) == 2
        for pid in pids:
            await until_gone(pid)


def test_serve_refuses_to_be_started_by_hand():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("from node.compute.serve import serve\nserve({})")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot be started by hand" in done.stderr


def test_frames_are_bounded():
    """Attack: a taken-over child announces a message of 4 GiB."""
    with pytest.raises(ComputeError, match="at most"):
        frame_length(b"\xff\xff\xff\xff")
    assert frame_length(encode_frame([1, 2])[:4]) == 3


async def test_child_that_never_comes_up_is_given_up_with_its_reason(tmp_path):
    """A device that this machine has not, a library that is missing: the person must read why, not wait for ever."""
    process = ComputeProcess("no_such_module_anywhere", name="engine", log_path=tmp_path / "log")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(process.run)
            with pytest.raises(ComputeError, match="no_such_module_anywhere"):
                await process.wait_first_start()
            nursery.cancel_scope.cancel()
