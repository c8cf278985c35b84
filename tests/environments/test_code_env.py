"""Programming problems: right answers are paid, no cheat is, and whatever else can happen has a name."""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
import threading

import pytest
from code_solutions import SOLUTIONS
from hypothesis import given
from hypothesis import strategies as st

from environments.base import RIGHT
from environments.code import MAX_CODE_CHARS, CodeProblems, last_code_block
from environments.code_problems import MAX_LINE_BYTES, Problems
from environments.registry import get_environment
from protocol.errors import ConfigError, EnvironmentUnknown, SandboxError

ADD = {
    "kind": "function",
    "id": "add",
    "question": "Write add(a, b).",
    "entry": "add",
    "tests": [
        {"args": [3, 4], "expected": 7},
        {"args": [10, -2], "expected": 8},
        {"args": [100, 200], "expected": 300},
    ],
}
TOTAL = {
    "kind": "program",
    "id": "total",
    "question": "Print the sum.",
    "tests": [{"input": "3 4\n", "output": "7\n"}, {"input": "10 -2\n", "output": "8\n"}],
}
FREE = {
    "kind": "function",
    "id": "free",
    "question": "Write add(a, b).",
    "entry": "add",
    "checker": "def check(candidate):\n    for i in range(4):\n        assert candidate(i, 2) == i + 2\n",
}
HONEST = "def add(a, b): return a + b"
EVERYWHERE = "import os\nfor fd in range(0, 60):\n    try: os.write(fd, {data!r})\n    except OSError: pass\n"
CHEATS = {
    "wrong": "def add(a, b): return a - b",
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "os._exit(0) when called": "import os\ndef add(a, b): os._exit(0)",
    "sys.exit(0) when called": "import sys\ndef add(a, b): sys.exit(0)",
    "equal to everything": """
class E:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def add(a, b): return E()
""",
    "an integer equal to everything": """
class E(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def add(a, b): return E(0)
""",
    "patch unittest": """
import unittest
for name in dir(unittest.TestCase):
    if name.startswith("assert"): setattr(unittest.TestCase, name, lambda *a, **k: None)
def add(a, b): return 0
""",
    "patch exits and hooks": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\n"
    "sys.exit = lambda *a: os._exit(0)\ndef add(a, b): return 0",
    "patch builtins": "import builtins\nbuiltins.all = builtins.any = lambda *a: True\n"
    "builtins.type = lambda *a: int\nbuiltins.len = lambda a: 3\ndef add(a, b): return 0",
    "look for what is expected in frames": """
import sys, gc
def add(a, b):
    seen, frame = [], sys._getframe()
    while frame:
        seen += list(frame.f_locals.values()) + list(frame.f_globals.values())
        frame = frame.f_back
    seen += gc.get_objects()
    for value in seen:
        try:
            if isinstance(value, dict) and "expected" in value: return value["expected"]
            if isinstance(value, str) and '"expected"' in value: return int(value.split('"expected": ')[1][0])
        except Exception: pass
    return 0
""",
    "look for what is expected in memory": """
import gc
def add(a, b):
    for value in gc.get_objects():
        try:
            if isinstance(value, (list, tuple)) and len(value) == 3 and value[:2] == [a, b]: return value[2]
        except Exception: pass
    return 0
""",
    "forge a verdict on every descriptor": EVERYWHERE.format(data=b"v7") + "os._exit(0)",
    "forge replies on every descriptor": EVERYWHERE.format(data=b"\0\0\0\x02{}\0\0\0\x00\0\0\0\x02v7") + "os._exit(0)",
    "forge a verdict of the checker": EVERYWHERE.format(data=b'\0\0\0\x11{"verdict": true}')
    + "def add(a, b): return 0",
    "patch json": "import json\njson.dumps = lambda *a, **k: 'true'\njson.JSONEncoder.encode = lambda *a: 'true'\n"
    "def add(a, b): return 0",
    "patch the encoder": """
import sys
values = sys.modules["environments.sandbox.inside.values"]
values.dumps = values.encode = lambda *a: '{"set": [7, 8, 300, 2, 3, 4, 5]}'
def add(a, b): return 0
""",
    "deep JSON": EVERYWHERE.format(data=b"v" + b"[" * 60_000) + "os._exit(0)",
    "huge integer": EVERYWHERE.format(data=b"v" + b"9" * 10_000) + "os._exit(0)",
    "not a number": "def add(a, b): return float('nan')",
    "infinity": "def add(a, b): return float('inf')",
    "true": "def add(a, b): return True",
    "a float": "def add(a, b): return float(a + b)",
    "a text": "def add(a, b): return str(a + b)",
    "all answers at once": "def add(a, b): return [7, 8, 300]",
    "nothing": "def add(a, b): pass",
    "another name": "def sub(a, b): return a + b",
    "not a function": "add = 7",
    "raise what is expected": "def add(a, b): raise SystemExit(a + b)",
    "print what is expected": "def add(a, b): print(a + b)",
    "close descriptors": "import os\nos.closerange(0, 60)\ndef add(a, b): return a + b",
}
"""All pretend to solve `add`; none may be paid, not even the last, whose value is lost."""
PROGRAM_CHEATS = {
    "print every answer": "print(7)\nprint(8)",
    "exit early": "raise SystemExit(0)",
    "right but failing": "print(sum(map(int, input().split())))\nraise SystemExit(1)",
    "right and more": "print(sum(map(int, input().split())), 8)",
    "to standard error": "import sys\nprint(sum(map(int, input().split())), file=sys.stderr)",
    "bytes that are no text": "import os\nos.write(1, b'7\\xff')",
    "overwrite it": "print('9\\r7')",
}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def release():
    """Whatever runs the tests."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def environment_of(*problems, **parameters):
    environment = CodeProblems(**({"python": release()} | parameters))
    environment.use_data("\n".join(map(json.dumps, problems)).encode())
    return environment


@pytest.fixture(scope="module")
def code():
    environment = environment_of(ADD, TOTAL, FREE)
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def sample():
    environment = CodeProblems(python=release())
    yield environment
    environment.close()


def answer(source, language="python"):
    return f"Some thoughts.\n\n```{language}\n{source}\n```\n"


def task_of(environment, name):
    for number in range(1000):
        task = environment.task(hashlib.sha256(str(number).encode()).digest())
        if task.data["id"] == name:
            return task
    raise AssertionError(f"no problem {name}")


def reward(environment, name, source):
    return environment.reward(task_of(environment, name), answer(source))


def test_every_sample_problem_is_solved_by_its_solution(sample):
    pairs = [(task_of(sample, name), answer(source)) for name, source in SOLUTIONS.items()]
    assert len(pairs) == len(sample.problems)
    assert sample.rewards(pairs) == [RIGHT] * len(pairs)


def test_no_sample_problem_is_solved_by_another_ones_solution(sample):
    names = list(SOLUTIONS)
    pairs = [(task_of(sample, name), answer(SOLUTIONS[other])) for name, other in itertools.pairwise(names)][::3]
    assert {reward.value for reward in sample.rewards(pairs)} == {0.0}


def test_prompts_say_what_to_write_and_never_what_is_expected(sample):
    function, program = task_of(sample, "two-sum"), task_of(sample, "fizzbuzz")
    assert "a class `Solution` with a method `twoSum`" in function.text
    assert "reads standard input" in program.text
    assert not {"tests", "expected", "output"} & {*function.data, *program.data}


@pytest.mark.parametrize("name", ["add", "free"])
def test_honest_solutions_are_paid(code, name):
    assert reward(code, name, HONEST) == RIGHT
    assert reward(code, name, "add = lambda a, b: sum([a, b])\nprint('loud')\n") == RIGHT


@pytest.mark.parametrize("problem", ["add", pytest.param("free", marks=pytest.mark.long)])
def test_no_cheat_is_paid(code, problem):
    """Attack: every known way to make tests pass without solving the problem, against tests and against a checker."""
    task = task_of(code, problem)
    rewards = code.rewards([(task, answer(source)) for source in CHEATS.values()])
    paid = {name: found for name, found in zip(CHEATS, rewards, strict=True) if found.value != 0.0}
    if problem == "free":  # its checker compares with ==, to which a float is equal
        assert paid.pop("a float") == RIGHT
    assert paid == {}


@pytest.mark.parametrize("cheat", ["equal to everything", "os._exit(0) when called", "forge a verdict of the checker"])
def test_no_cheat_gets_past_a_checker(code, cheat):
    """Attack: values and bytes meant for the interpreter that runs the checker."""
    assert reward(code, "free", CHEATS[cheat]).value == 0.0


def test_no_program_cheats(code):
    """Attack: output that is meant to be taken for another."""
    task = task_of(code, "total")
    rewards = code.rewards([(task, answer(source)) for source in PROGRAM_CHEATS.values()])
    assert {name: found.value for name, found in zip(PROGRAM_CHEATS, rewards, strict=True)} == dict.fromkeys(
        PROGRAM_CHEATS, 0.0
    )


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("", "no code block"),
        ("def add(a, b): return a + b", "no code block"),
        ("```python\ndef add(a, b): return a + b", "no code block"),
        ("```\n```", "test 1: ended badly (AttributeError)"),
        ("<|im_end|><|im_start|>assistant\n```python\n<|im_end|>\n```", "test 1: ended badly (SyntaxError)"),
        (answer("a = '\ud800'"), "test 1: ended badly (UnicodeEncodeError)"),
        (answer("def add(a, b):\n    return a +\0 b"), "test 1: ended badly (SyntaxError)"),
        (answer("\ufeffdef add(a, b): return a + b"), "test 1: ended badly (SyntaxError)"),
        (answer("def add(a, b): return a \u2212 b"), "test 1: ended badly (SyntaxError)"),
        (answer("def add(a, b): return a + b # \u202e\u2066 b - a"), "right"),
        (answer("def \uff41\uff44\uff44(a, b): return a + b"), "right"),  # the language itself reads these as add
        (answer("x = '\u2028\x0c\x85'\ndef add(a, b): return a + b"), "right"),
        (answer("#" * MAX_CODE_CHARS), "test 1: ended badly (AttributeError)"),
        (answer("#" * (MAX_CODE_CHARS + 1)), f"a code block of {MAX_CODE_CHARS + 1} characters; {MAX_CODE_CHARS} are "),
        ("```python\n" * 20_000, "no code block"),
        ("`" * 200_000, "no code block"),
        ("\n" * 200_000, "no code block"),
        (answer("x = " + "-" * 60_000 + "1"), "test 1: ended badly ("),
    ],
)  # fmt: skip
def test_every_answer_has_a_named_outcome(code, completion, reason):
    """Attack: completions meant to crash or stall whoever judges them."""
    found = code.reward(task_of(code, "add"), completion)
    assert found.reason.startswith(reason)
    assert found.value == (1.0 if reason == "right" else 0.0)


def test_200_kilobytes_of_code_are_not_run(code):
    found = code.reward(task_of(code, "add"), answer("#" * 200_000))
    assert (found.value, found.reason) == (0.0, f"a code block of 200000 characters; {MAX_CODE_CHARS} are allowed")


def test_time_is_three_valued():
    """An endless program failed; one that is right but near the limit, or waited, is nobody's fault."""
    environment = environment_of(ADD, cpu_limit_s=0.25)
    burn = "import time\ndef add(a, b):\n    while time.process_time() < {0}: pass\n    return a + b"
    wait = "import time\ndef add(a, b): time.sleep(60)"
    task = task_of(environment, "add")
    endless, near, waiting = environment.rewards(
        [(task, answer(burn.format(limit))) for limit in (99, 0.5)] + [(task, answer(wait))]
    )
    environment.close()
    assert endless.value == 0.0 or "did not end in time" in endless.reason  # the latter on a busy machine
    assert near.value is None
    assert near.reason.startswith("test 1: ")
    assert (waiting.value, waiting.reason) == (None, "test 1: did not end in time (within 2.5 s)")


def test_memory_is_three_valued():
    environment = environment_of(ADD, memory_limit_mb=64)
    take = "def add(a, b):\n    x = b'x' * ({0} << 20)\n    return a + b"
    few, near, many = (reward(environment, "add", take.format(size)) for size in (8, 100, 400))
    environment.close()
    assert few == RIGHT
    assert near.value is None
    assert (many.value, many.reason) == (0.0, "test 1: ended badly (MemoryError)")


def test_a_broken_sandbox_is_nobodys_fault(code):
    """Attack: somebody kills the box in which a right solution runs."""
    found = []
    task = task_of(code, "add")
    thread = threading.Thread(
        target=lambda: found.append(code.reward(task, answer("import time\ntime.sleep(30)\n" + HONEST)))
    )
    before = code.pool.broken
    thread.start()
    while thread.is_alive():
        for box in list(code.pool._alive):
            if box.process.poll() is None:
                os.killpg(box.process.pid, signal.SIGKILL)
        thread.join(0.2)
    assert found[0].value is None
    assert found[0].reason.startswith("the sandbox could not tell")
    assert code.pool.broken > before
    assert reward(code, "add", HONEST).value in (1.0, None)


def test_a_checker_that_breaks_is_nobodys_fault():
    environment = environment_of(FREE | {"checker": "import os\ndef check(candidate): os._exit(0)"})
    found = reward(environment, "free", HONEST)
    environment.close()
    assert found.value is None


def test_without_a_sandbox_nothing_is_run():
    environment = environment_of(ADD, python="3.99")
    with pytest.raises(SandboxError, match=r"no Python 3\.99"):
        reward(environment, "add", HONEST)
    assert environment.digest  # what needs no sandbox works without


def test_tasks_are_fixed_by_the_seed(sample):
    seeds = [hashlib.sha256(bytes([number])).digest() for number in range(40)]
    again = CodeProblems(python=release())
    assert [sample.task(seed) for seed in seeds] == [again.task(seed) for seed in seeds]
    assert len({sample.task(seed).data["id"] for seed in seeds}) > 10


def test_digest_covers_data_python_and_limits():
    data = json.dumps(ADD).encode()
    digests = [
        CodeProblems().digest,
        CodeProblems(python="3.12").digest,
        CodeProblems(cpu_limit_s=3.0).digest,
        CodeProblems(memory_limit_mb=512).digest,
        get_environment("code", data=data).digest,
        get_environment("code", data=data + b"\n").digest,
    ]
    assert len({*digests}) == len(digests)
    assert get_environment("code").digest == CodeProblems().digest
    with pytest.raises(EnvironmentUnknown):
        get_environment("code", data=data, digest=digests[0])


def test_the_sample_of_this_version_never_changes():
    """Golden: another sample, limit or judgement needs a higher `version`."""
    assert CodeProblems().digest.hex() == "1bb2d7a090a264b8dcd4ba7769b08e1c1b85695ee5e54f7c10b8e8d9e69b6f84"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: "),
        ("null", "line 2: "),
        ('{"kind": "other"}', "line 2: .*kind"),
        (json.dumps(ADD | {"id": "x", "tests": []}), "line 2: a problem needs tests or a checker"),
        (json.dumps(ADD | {"id": "x", "entry": "a.b.c"}), "line 2: entry 'a.b.c'"),
        (json.dumps(ADD | {"id": "x", "entry": "import os"}), "line 2: entry"),
        (json.dumps(ADD | {"id": "x", "surprise": 1}), "line 2: .*surprise"),
        (json.dumps(ADD | {"id": "x", "tolerance": -1}), "line 2: .*tolerance"),
        (json.dumps(ADD | {"id": "x", "tests": [{"args": 5, "expected": 1}]}), "line 2: test 1: args must be a list"),
        (json.dumps(ADD | {"id": "x", "tests": [{"args": []}]}), "line 2: .*expected"),
        (json.dumps(ADD | {"id": "x", "literals": True}), "line 2: test 1: args must be a text"),
        (
            json.dumps(ADD | {"id": "x", "literals": True, "tests": [{"args": "1, os.getcwd()", "expected": "1"}]}),
            "line 2: test 1: args is no Python literal",
        ),
        (
            json.dumps(ADD | {"id": "x", "literals": True, "tests": [{"args": "1", "expected": "[1"}]}),
            "line 2: test 1: expected does not parse",
        ),
        (
            json.dumps(ADD | {"id": "x", "literals": True, "tests": [{"args": "1", "expected": "(" * 9999}]}),
            "line 2: test 1: expected does not parse",
        ),
        (json.dumps(FREE | {"id": "x", "checker": "def check(:"}), "line 2: checker does not parse"),
        (json.dumps(FREE | {"id": "x", "checker": "x = 1"}), r"line 2: the checker defines no function check"),
        (json.dumps(ADD), "line 2: the id 'add' is taken by line 1"),
        ("[" * 100_000, "line 2: "),
        (json.dumps(ADD | {"id": "x", "question": "\ud800"}), r"line 2: a text holds half a surrogate pair \(.ud800"),
        (json.dumps(ADD | {"id": "x", "question": "\U0001f4a9"}) + "x", "line 2: .*malformed"),
        ('{"kind": "program", "id": "' + "x" * 200 + '"}', "line 2: "),
    ],
)
def test_a_malformed_problem_is_named_with_its_line(line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Problems(f"{json.dumps(ADD)}\n{line}\n".encode(), origin="problems.jsonl")
    assert len(str(caught.value)) < 1000


def test_bytes_that_are_no_text_and_files_that_hold_nothing(tmp_path):
    for data, message in ((b"\xff\xfe", "line 1"), (b"", "no problems"), (b"\n \n", "no problems")):
        path = tmp_path / "problems.jsonl"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=message) as caught:
            CodeProblems().import_data(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        CodeProblems().import_data(tmp_path / "missing")


def test_a_line_beyond_the_limit_is_refused():
    with pytest.raises(ConfigError, match=f"line 1: .* {MAX_LINE_BYTES} are allowed"):
        Problems(b'"' + b"x" * MAX_LINE_BYTES + b'"', origin="problems.jsonl")


@given(st.binary(max_size=200))
def test_any_data_is_taken_or_refused(data):
    with contextlib.suppress(ConfigError):
        Problems(data, origin="problems.jsonl")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```\na\n```", "a"),
        ("```python\na\n```\ntext\n```py\nb\n```", "b"),
        ("```python\na\n```\n```text\nout\n```", "a"),
        ("~~~python\na\n~~~", "a"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''"),
        ("  ```python\na\n  ```  ", "a"),
        ("    ```python\na\n    ```", None),
        ("```python\r\na\r\n```\r\n", "a\r"),
        ("```Python3\na\n\nb\n```", "a\n\nb"),
        ("```python title=x\na\n```", None),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a"),
        ("`a`", None),
    ],
)
def test_the_last_closed_block_counts(text, code):
    assert last_code_block(text) == code


@given(st.text(alphabet="`~\n python\r\u2028x", max_size=200))
def test_any_text_has_a_last_block_or_none(text):
    found = last_code_block(text)
    assert found is None or found in text
