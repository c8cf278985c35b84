"""Reward workers: a limit, a crash or a lie of a worker costs one answer, told as such, and nothing else."""

import subprocess
import sys
import time

import pytest

from environments.allowance import Allowance
from environments.worker_pool import CouldNotTellError, FailedError, WorkerPool, bare_environment

WORKER = """
import sys, time
from environments.worker_loop import serve
def prepare():
    def handle(request):
        match request:
            case ["spin"]:
                while True:
                    try:
                        while True: pass
                    except BaseException: pass
            case ["swallow"]:
                try:
                    while True: pass
                except BaseException: return "swallowed"
            case ["in C"]: return sum(range(10 ** 12))
            case ["memory"]: return len(bytearray(1 << 30))
            case ["deep"]:
                def down(): return down()
                return down()
            case ["raise"]: raise ValueError("no such answer")
            case ["exit"]: sys.exit(3)
            case ["die"]: __import__("os")._exit(0)
            case ["sleep"]: time.sleep(60)
            case ["print"]: print("{}"); return "printed"
            case ["secret"]: return __import__("os").environ.get("INTELLECT_NODE_PASSPHRASE", "none")
            case ["write", path]:
                with open(path, "w") as file: file.write("x" * 10)
                return "written"
            case _: return request
    return handle
serve(prepare, memory_bytes=512 << 20, cpu_s=0.3)
"""


@pytest.fixture
def pool():
    pool = WorkerPool(("-P", "-c", WORKER), deadline_s=20.0, size=1)
    yield pool
    pool.close()


def test_an_allowance_is_charged_and_ends(pool):
    """Attack: many answers that each use what one may."""
    allowance = Allowance(cpu_s=0.2, wall_s=600.0)
    first, second = pool.map([["swallow"], ["fine"]], allowance=allowance)
    assert "limit of time" in str(first)
    assert "CPU-seconds" in str(second)
    late = Allowance(cpu_s=600.0, wall_s=0.0)
    assert "more than 0 s" in str(pool.map([["fine"]], allowance=late)[0])
    assert pool.map([["fine"]], allowance=Allowance(cpu_s=9.0, wall_s=600.0)) == [["fine"]]


def test_answers_come_in_order(pool):
    assert pool.map([[number, "ä\ud800"] for number in range(20)]) == [[number, "ä\ud800"] for number in range(20)]
    assert pool.call(["print"]) == "printed"


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ("swallow", "limit of time"),
        ("memory", "limit of memory"),
        ("deep", "limit of recursion"),
        ("die", "the worker died"),
        ("exit", "the worker died"),
    ],
)
def test_a_limit_is_told_and_the_next_answer_comes(pool, request_, why):
    with pytest.raises(CouldNotTellError, match=why):
        pool.call([request_])
    assert pool.call(["fine"]) == ["fine"]


@pytest.mark.parametrize(("request_", "lost"), [("spin", 0), ("in C", 1)])
def test_what_an_exception_does_not_stop_is_stopped(pool, request_, lost):
    """Attack: a loop that swallows everything, and arithmetic in C that no signal handler interrupts."""
    with pytest.raises(CouldNotTellError):
        pool.call([request_])
    assert pool.call(["fine"]) == ["fine"]
    assert pool.lost >= lost


def test_past_the_wall_deadline_a_worker_is_killed():
    pool = WorkerPool(("-P", "-c", WORKER), deadline_s=0.5, size=1)
    started = time.monotonic()
    with pytest.raises(CouldNotTellError, match="no answer in time"):
        pool.call(["sleep"])
    assert time.monotonic() - started < 30
    pool.close()


def test_what_the_handler_raises_is_the_answer_to_that_request(pool):
    with pytest.raises(FailedError, match="ValueError: no such answer"):
        pool.call(["raise"])
    assert pool.lost == 0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_module", "the worker died"),
        ("print('hello', flush=True); import time; time.sleep(60)", "broke down"),
        ("print('x' * (2 << 20), flush=True)", "answers with too much"),
        ('print(\'{"error": "ImportError: nothing"}\', flush=True)', "does not start: ImportError: nothing"),
        ("print('{}', flush=True)", "does not start: it says nothing"),
        ("print('[' * 100000, flush=True)", "broke down"),
    ],
)
def test_a_worker_that_does_not_start_is_named(code, why):
    pool = WorkerPool(("-P", "-c", code), deadline_s=5.0, size=1)
    with pytest.raises(CouldNotTellError, match=why):
        pool.call(["x"])
    pool.close()


def test_a_worker_sees_none_of_the_node_s_secrets_and_writes_nothing(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("INTELLECT_NODE_PASSPHRASE", "hunter2")
    assert pool.call(["secret"]) == "none"
    with pytest.raises(FailedError, match="File too large"):
        pool.call(["write", str(tmp_path / "file")])


def test_a_pool_can_be_used_after_it_was_closed(pool):
    assert pool.call(["fine"]) == ["fine"]
    pool.close()
    assert pool.call(["fine"]) == ["fine"]


def test_a_worker_ends_with_its_node():
    """The node is killed: its pipes close, and the worker ends by itself."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=bare_environment()
    ) as process:
        assert process.stdout.readline() == b'{"ready": true}\n'
        process.stdin.close()
        assert process.wait(timeout=30) == 0
