"""Boxes, their pool, the canary, and refusal where nothing isolates: real boxes throughout."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import hostile
import pytest

from environments.sandbox.box import Box, CandidateError, Ended
from environments.sandbox.canary import prove_isolation
from environments.sandbox.inside import values
from environments.sandbox.launch import BoxSpec, Isolation, Kind, find_bwrap
from environments.sandbox.limits import Limits
from environments.sandbox.pool import SandboxPool
from environments.sandbox.status import establish, sandbox_status
from protocol.errors import BoxError, SandboxError

ROOT = Path(__file__).parents[2]
LIMITS = Limits(cpu_s=0.5, cpu_end_s=1, wall_s=20, output_bytes=1 << 16)
ALLOW_ALL = struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000).hex()
SHOW_STATUS = """
import sys
from environments.sandbox.bpf import Assembler
from environments.sandbox.inside.confine import filter_calls
from environments.sandbox.status import sandbox_status
filters = Assembler()
filters.emit(0x20, 0)
for number in map(int, sys.argv[1:]):
    filters.jump(0x15, number, otherwise=f"not {number}")
    filters.emit(0x06, 0x00050000 | 1)
    filters.label(f"not {number}")
filters.emit(0x06, 0x7FFF0000)
filter_calls(filters.build())
print(repr(sandbox_status()))
"""
X86_MOUNT, X86_UNSHARE, X86_LANDLOCK = 165, 272, 444

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(scope="module")
def pool():
    pool = SandboxPool(BoxSpec(limits=LIMITS), size=2)
    yield pool
    pool.close()


@pytest.fixture(params=[Kind.BUBBLEWRAP, Kind.LANDLOCK], ids=["bubblewrap", "landlock"])
def isolation(request):
    if request.param is Kind.BUBBLEWRAP and not find_bwrap():
        pytest.skip("bubblewrap is not installed")
    return hostile.isolation_of(request.param)


@pytest.fixture
def open_box():
    boxes = []

    def start(isolation, **changes):
        boxes.append(Box(isolation, replace(BoxSpec(limits=LIMITS), **changes)))
        boxes[-1].wait_ready(30)
        return boxes[-1]

    yield start
    for box in boxes:
        box.kill()


def run(pool, source, stdin=""):
    with pool.box() as box:
        return box.run_program(source, stdin)


def call(pool, source, entry, *arguments):
    with pool.box() as box:
        return box.call(source, entry, arguments)


def test_a_program_reads_and_prints(isolation, open_box):
    box = open_box(isolation)
    outcome = box.run_program("import sys\nprint(sum(map(int, sys.stdin)))", "1\n2\n")
    assert (outcome.ended, outcome.output) == (Ended.WELL, b"3\n")
    assert 0 < outcome.cpu_s < 2
    assert outcome.peak_bytes > 1 << 20


def test_a_function_is_called_with_values_and_gives_one(isolation, open_box):
    box = open_box(isolation)
    outcome = box.call("def f(a, b): return (a, b, {1: {2}})", "f", [[1, None], {"x": (True, 2.5)}])
    assert values.loads(outcome.result) == ([1, None], {"x": (True, 2.5)}, {1: {2}})
    method = box.call("class S:\n    def m(self, x): return x + 1", "S.m", [1])
    assert values.loads(method.result) == 2


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("print(open(0).read())", b"in\n"),
        ("import os\nos.write(1, os.read(0, 9))", b"in"),
        ("import threading\nthreading.Thread(target=lambda: print(input())).start()", b"in\n"),
        ("import sys\nsys.setrecursionlimit(20000)\nf = lambda n: n and f(n - 1)\nprint(f(15000))", b"0\n"),
        ("import atexit\natexit.register(lambda: print('last'))\nprint('first')", b"first\nlast\n"),
        ("print('a')\nexit()", b"a\n"),
        ("print('a')\nraise SystemExit(0)", b"a\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1))", b"P(x=1)\n"),
        ("import datetime, decimal, fractions, statistics, string\nprint(decimal.Decimal('0.1') * 3)", b"0.3\n"),
        ("print('\u20ac\u202e\U0001f4a9')", "\u20ac\u202e\U0001f4a9\n".encode()),
        ("if __name__ == '__main__': print('main')", b"main\n"),
    ],
)
def test_what_honest_programs_do_works(pool, source, printed):
    outcome = run(pool, source, "in")
    assert (outcome.ended, outcome.detail) == (Ended.WELL, "")
    assert outcome.output.rstrip(b"\n") == printed.rstrip(b"\n")


@pytest.mark.parametrize("source", ["print({'a', 'b', 'c', 'd', 'e'})", "import random\nprint(random.random())"])
def test_order_and_chance_are_the_same_in_every_box(pool, source):
    first, second = run(pool, source), run(pool, source)
    assert first.output == second.output != b""


@pytest.mark.parametrize(
    ("source", "ended", "detail"),
    [
        ("1 / 0", Ended.BADLY, "ZeroDivisionError"),
        ("import sys\nsys.exit(3)", Ended.BADLY, "exit status 3"),
        ("import sys\nsys.exit('no')", Ended.BADLY, "exit status 1"),
        ("this is no Python", Ended.BADLY, "SyntaxError"),
        ("a = 'x\0y'", Ended.BADLY, "SyntaxError"),
        ("a = '\ud800'", Ended.BADLY, "UnicodeEncodeError"),
        ("", Ended.WELL, ""),
        ("import numpy", Ended.BADLY, "ModuleNotFoundError"),
        ("class E(Exception): pass\nE.__name__ = 'x\\n\\x1b[31m' * 9\nraise E", Ended.BADLY, None),
        ("x = bytearray(1 << 33)", Ended.BADLY, "MemoryError"),
        ("import ctypes\nctypes.string_at(0)", Ended.CRASH, "SIGSEGV"),
        ("while True: print('x' * 9999)", Ended.OUTPUT, None),
        ("while True: pass", Ended.CPU, None),
    ],
)
def test_every_end_has_a_name(pool, source, ended, detail):
    outcome = run(pool, source)
    assert outcome.ended is ended
    assert detail is None or outcome.detail == detail
    assert outcome.detail.isascii()
    assert outcome.detail.isprintable()


def test_waiting_ends_at_the_wall_limit(isolation, open_box):
    box = open_box(isolation, limits=replace(LIMITS, wall_s=0.5))
    assert box.run_program("import time\ntime.sleep(99)").ended is Ended.WALL


def test_jobs_of_one_box_do_not_see_each_other(pool):
    with pool.box() as box:
        box.run_program("import builtins, sys\nbuiltins.leak = 1\nsys.modules['leak'] = 1")
        second = box.run_program("try: print(leak)\nexcept NameError: print('clean')")
    assert second.output == b"clean\n"


def test_a_megabyte_goes_in_and_is_counted(pool):
    assert run(pool, "print(len(open(0).read()))", "x" * (1 << 20)).output == b"1048576\n"
    assert run(pool, "pass", "x" * (1 << 20)).ended is Ended.WELL


def test_a_checker_asks_and_decides(pool):
    source = (
        "def check(candidate):\n    assert candidate(2, [3]) == [2, 3]\n"
        "    try: candidate(0, [])\n    except SolutionFailed: return"
    )

    def answer(arguments):
        if arguments[0] == 0:
            raise CandidateError("ZeroDivisionError")
        return [arguments[0], *arguments[1]]

    with pool.box() as box:
        assert box.check(source, answer).passed
    with pool.box() as box:
        assert box.check(source, lambda arguments: 5).error == "AssertionError"
    with pool.box() as box:
        assert not box.check("def check(candidate): return False", answer).passed
    with pool.box() as box, pytest.raises(BoxError):
        box.check("import os\ndef check(candidate): os._exit(0)", answer)


def test_a_box_that_was_killed_is_an_error_of_its_own(isolation, open_box):
    box = open_box(isolation)
    os.killpg(box.process.pid, signal.SIGKILL)
    with pytest.raises(BoxError):
        box.run_program("print(1)")


def test_the_pool_replaces_boxes_that_ended_while_they_waited(pool):
    run(pool, "pass")
    for box in list(pool._alive):
        os.killpg(box.process.pid, signal.SIGKILL)
        box.process.wait()
    results = [None, None]
    for number in range(2):
        try:
            results[number] = run(pool, "print(1)").output
        except BoxError:
            results[number] = run(pool, "print(1)").output
    assert results == [b"1\n", b"1\n"]


def test_shared_boxes_are_used_again():
    with closing_pool(jobs_share_box=True) as pool:
        pids = {run_and_pid(pool) for _ in range(4)}
    assert len(pids) <= 2


def run_and_pid(pool):
    with pool.box() as box:
        assert box.run_program("print(1)").output == b"1\n"
        return box.process.pid


@contextlib.contextmanager
def closing_pool(**settings):
    pool = SandboxPool(BoxSpec(limits=LIMITS, **settings), size=2)
    yield pool
    pool.close()


def test_many_threads_share_a_pool(pool):
    assert pool.map(lambda number: run(pool, f"print({number})").output, list(range(12))) == [
        f"{number}\n".encode() for number in range(12)
    ]


def test_a_closed_pool_leaves_no_process():
    with closing_pool() as pool:
        run(pool, "print(1)")
        boxes = list(pool._alive)
    assert boxes
    assert all(box.process.poll() is not None for box in boxes)


@dataclass(frozen=True)
class Lying(Isolation):
    """Starts a driver that says what it likes."""

    script: str = ""

    def command(self, spec):
        return [sys.executable, "-c", "import os, struct, time\nw = lambda b: os.write(1, b)\n" + self.script]


@pytest.mark.parametrize(
    "script",
    [
        "w(struct.pack('>I', 1 << 31))",
        "w(struct.pack('>I', 4) + b'[[[[')",
        "w(struct.pack('>I', 2) + b'[]')",
        "w(struct.pack('>I', 2) + b'{}')",
        "w(b'\\0\\0')",
        "pass",
        "w(struct.pack('>I', 9) + b'{'); time.sleep(60)",
    ],
)
def test_a_driver_that_lies_breaks_its_box_alone(isolation, script):
    """Attack: whoever got hold of the driver floods or starves the node."""
    with pytest.raises(BoxError):
        begin(Lying(isolation.kind, isolation.interpreter, script=script))


def begin(isolation):
    """Start a box and wait for it: a driver that is quick to end is noticed in the first of the two."""
    box = Box(isolation, BoxSpec(limits=LIMITS))
    try:
        box.wait_ready(1)
    finally:
        box.kill()


@dataclass(frozen=True)
class Weakened(Isolation):
    """An isolation with a hole."""

    hole: str = ""

    def settings(self, spec):
        changes = {
            "no filter": {"filter": ALLOW_ALL},
            "all files": {"readable": ["/"], "listed": [], "needs_landlock": False},
            "no limits": {"limits": {}},
        }
        return super().settings(spec) | changes[self.hole]


@pytest.mark.parametrize(
    ("kind", "hole", "found"),
    [
        (Kind.BUBBLEWRAP, "no filter", "start a process"),
        (Kind.LANDLOCK, "no filter", "open a TCP socket"),
        (Kind.LANDLOCK, "all files", "read a secret"),
        (Kind.LANDLOCK, "no limits", "start too many threads"),
    ],
)
def test_the_canary_finds_a_hole(kind, hole, found, open_box):
    """Attack: a machine whose kernel does not do what it was asked to."""
    if kind is Kind.BUBBLEWRAP and not find_bwrap():
        pytest.skip("bubblewrap is not installed")
    whole = hostile.isolation_of(kind)
    box = open_box(Weakened(whole.kind, whole.interpreter, whole.bwrap, hole=hole))
    with pytest.raises(BoxError, match=f"isolation does not hold: a program could .*{found}"):
        prove_isolation(box)


@pytest.mark.skipif(not find_bwrap(), reason="bubblewrap is not installed")
def test_bubblewrap_unshares_everything():
    command = hostile.isolation_of(Kind.BUBBLEWRAP).command(BoxSpec(limits=LIMITS))
    wanted = {"--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"}
    assert wanted <= {*command}
    assert "--unshare-user" in command or os.getuid() == 0


@pytest.mark.skipif(not find_bwrap(), reason="bubblewrap is not installed")
def test_without_landlock_installed_packages_are_still_out_of_sight(open_box):
    whole = hostile.isolation_of(Kind.BUBBLEWRAP)
    box = open_box(Weakened(whole.kind, whole.interpreter, whole.bwrap, hole="all files"))
    packages = list(map(str, whole.interpreter.packages))
    assert packages
    printed = box.run_program(f"import os\nprint([os.listdir(path) for path in {packages}])").output.decode()
    assert printed == f"{[[] for _ in packages]}\n"


@pytest.mark.skipif(not find_bwrap(), reason="bubblewrap is not installed")
def test_without_a_filter_there_is_still_no_network(open_box):
    """Attack: a program that got around the seccomp filter; its namespace has one interface, and nobody behind it."""
    whole = hostile.isolation_of(Kind.BUBBLEWRAP)
    box = open_box(Weakened(whole.kind, whole.interpreter, whole.bwrap, hole="no filter"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = (
            "import socket\nprint([name for _, name in socket.if_nameindex()])\n"
            f"try: print(socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 9))\n"
            "except OSError: print('BLOCKED')"
        )
        assert box.run_program(source).output == b"['lo']\nBLOCKED\n"


def test_the_canary_is_held_by_both_kinds(isolation, open_box):
    prove_isolation(open_box(isolation))


def test_the_status_of_this_machine():
    status = sandbox_status()
    assert status.works
    assert status.kind == "bubblewrap" if find_bwrap() else "landlock"
    assert status.python.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")


def status_without(*calls):
    """What `sandbox_status` says in a process to which the kernel refuses calls."""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86-64")
    command = [sys.executable, "-c", SHOW_STATUS, *map(str, calls)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


def test_without_namespaces_it_falls_back():
    shown = status_without(X86_MOUNT, X86_UNSHARE)
    assert "kind='landlock'" in shown
    assert "fix=''" not in shown


def test_where_nothing_isolates_it_refuses_and_says_what_to_do():
    shown = status_without(X86_MOUNT, X86_UNSHARE, X86_LANDLOCK)
    assert "kind='none'" in shown
    assert "the kernel has no Landlock" in shown
    assert "fix=''" not in shown


def test_a_release_of_python_that_is_not_here_is_refused():
    with pytest.raises(SandboxError, match=r"no Python 3\.99") as caught:
        establish(BoxSpec(python="3.99"))
    assert "install" in caught.value.hint


def test_a_machine_whose_calls_are_unknown_is_refused(monkeypatch):
    from environments.sandbox import launch

    monkeypatch.setattr(launch.platform, "machine", lambda: "riscv64")
    launch.call_filter.cache_clear()
    with pytest.raises(SandboxError, match="riscv64"):
        launch.call_filter()
    monkeypatch.undo()
    launch.call_filter.cache_clear()


def test_a_box_is_told_nothing_that_its_owner_did_not_say():
    spec = BoxSpec(limits=replace(LIMITS, cpu_end_s=7))
    isolation = hostile.isolation_of(Kind.LANDLOCK)
    settings = isolation.settings(spec)
    assert settings["limits"]["CPU"] == 7
    assert json.dumps(settings)
    assert not {"PATH", "HOME", "PYTHONPATH"} & isolation.environment().keys()
    assert threading.active_count() < 100
