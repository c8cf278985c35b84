"""What programs give must not depend on the machine, as far as that goes, and must not hold up the node."""

import json
import sys
import time

import hostile
import pytest

from environments import code_judge
from environments.allowance import Allowance
from environments.base import RIGHT
from environments.code import CodeProblems
from environments.sandbox.launch import Kind, find_bwrap

ADD = {
    "kind": "function",
    "id": "add",
    "question": "Write add(a, b).",
    "entry": "add",
    "tests": [{"args": [1, 2], "expected": 3}],
}
SET = ADD | {"literals": True, "tests": [{"args": "1, 2", "expected": "{3}"}]}
CHECKED = {key: value for key, value in ADD.items() if key != "tests"} | {
    "checker": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
}
COLLIDING = """
import os
step = (1 << 61) - 1
data = memoryview(("v" + '{"set":[' + ",".join(str(step * k) for k in range(1, 40000)) + "]}").encode())
while data: data = data[os.write(3, data):]
os._exit(0)
"""
"""Numbers that all have the hash 0: a set of them takes half a minute to build."""
NODE_CPU_S = 5.0
"""Reading a megabyte takes a tenth of it."""
SAME = {
    "chance": "import os, random, secrets, uuid\nprint(os.urandom(8), secrets.token_hex(8), uuid.uuid4())\n"
    "print(random.random(), random.Random().random(), random.SystemRandom().random())\n"
    "random.seed()\nprint(random.random())",
    "order": "print({'a', 'b', 'c', 'd', 'e'})",
    "machine": "import os, platform\nprint(os.uname()[:4], platform.node(), os.cpu_count(), os.sched_getaffinity(0))",
}
NOT_SEEN = """
import os, sys
places = [f"{above}/{name}" for above in (*sys.path, *PLACES) for name in ("site-packages", "dist-packages")]
for place in (*places, *PACKAGES):
    try:
        found = [name for name in os.listdir(place) if os.access(place + "/" + name, os.R_OK)]
        for name in found:
            path = place + "/" + name
            os.listdir(path) if os.path.isdir(path) else open(path).close()
    except OSError:
        continue
    if found:
        print("ESCAPED", place, found[:5])
print("BLOCKED")
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def environment_of(problem, **parameters):
    environment = CodeProblems(python=f"{sys.version_info.major}.{sys.version_info.minor}", _boxes=1, **parameters)
    environment.use_data(json.dumps(problem).encode())
    return environment, environment.task(bytes(32))


def fenced(source):
    return f"```python\n{source}\n```"


@pytest.mark.parametrize(
    ("problem", "reward"), [(ADD, 0.0), (SET, 0.0), (CHECKED, None)], ids=["list", "set", "checker"]
)
def test_numbers_that_collide_do_not_stall_the_node(problem, reward):
    """Attack: a value whose hashes are all the same; whoever makes a set of it works for minutes."""
    environment, task = environment_of(problem, cpu_limit_s=0.25)
    began = time.process_time()
    found = environment.reward(task, fenced(COLLIDING))
    assert time.process_time() - began < NODE_CPU_S
    assert found.value == reward  # a checker that is ended at its limit cannot tell
    environment.close()


@pytest.fixture(params=[Kind.BUBBLEWRAP, Kind.LANDLOCK], ids=["bubblewrap", "landlock"])
def pool(request):
    if request.param is Kind.BUBBLEWRAP and not find_bwrap():
        pytest.skip("bubblewrap is not installed")
    pool = hostile.pool_of(request.param)
    yield pool
    pool.close()


def printed(pool, source):
    with pool.box() as box:
        return box.run_program(source).output.decode()


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_what_honest_programs_ask_for_is_the_same_in_every_box(pool, source):
    first = printed(pool, source)
    assert first == printed(pool, source) != ""


def test_chance_is_the_same_in_both_kinds_of_boxes():
    found = []
    for kind in Kind:
        pool = hostile.pool_of(kind)
        found.append(printed(pool, SAME["chance"]))
        pool.close()
    assert found[0] == found[1] or not find_bwrap()


def test_no_program_sees_what_packages_are_installed(pool):
    """Attack: a solution that is right where a package is installed."""
    interpreter = hostile.isolation_of(pool._isolation.kind).interpreter
    assert interpreter.packages or not find_bwrap()
    packages = list(map(str, interpreter.packages))
    source = f"PLACES = {['/usr/lib/python3', '/usr/local/lib/python3']}\nPACKAGES = {packages}\n{NOT_SEEN}"
    assert printed(pool, source) == "BLOCKED\n"


def test_answers_together_have_an_allowance():
    """Attack: many answers that each use all they may."""
    environment, task = environment_of(ADD, cpu_limit_s=0.25)
    right = fenced("def add(a, b): return a + b")
    environment.allowance = Allowance(cpu_s=0.01, wall_s=600.0)
    spent = environment.rewards([(task, fenced("def add(a, b):\n    while True: pass"))])[0]
    after = environment.rewards([(task, right)])[0]
    environment.allowance = Allowance(cpu_s=600.0, wall_s=0.0)
    late = environment.rewards([(task, right)])[0]
    environment.allowance = None
    assert [spent.value, after.value, late.value] == [None, None, None]
    assert "CPU-seconds" in after.reason
    assert "more than 0 s" in late.reason
    assert environment.reward(task, right) == RIGHT
    environment.close()


@pytest.mark.parametrize(
    ("work", "limit", "why"),
    [
        ("while time.process_time() < 0.06: pass", {"TOTAL_CPU_LIMITS": 4}, "too near the limits"),
        ("time.sleep(0.3)", {"TOTAL_WALL_LIMITS": 0.5}, "did not end in time, with those before it"),
    ],
)
def test_all_tests_of_a_problem_have_limits_together(monkeypatch, work, limit, why):
    """Attack: a solution that uses nearly the whole limit on every test, or waits nearly as long on each."""
    for name, value in limit.items():
        monkeypatch.setattr(code_judge, name, value)
    environment, task = environment_of(ADD | {"tests": ADD["tests"] * 12}, cpu_limit_s=0.15)
    found = environment.reward(task, fenced(f"import time\ndef add(a, b):\n    {work}\n    return a + b"))
    environment.close()
    assert found.value is None
    assert why in found.reason
    assert not found.reason.startswith("test 1:")
