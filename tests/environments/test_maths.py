"""Mathematics: the last box, exact numbers, algebra in workers; faults of the library; bombs."""

import resource
import time

import pytest

from environments.base import Task
from environments.maths import SAMPLE, Maths, compare
from environments.maths_text import is_finished, last_box, plain_number, rising, split_unit
from environments.problems import decode_problems
from protocol.errors import ConfigError

BOMBS = [
    "9^{9^{9^{9}}}", "9^{9^{9^{9^{9}}}}", "10^{10^{10}}", "10^{10^{10^{10}}}", "(10^8)!", "10^8!", "((10!)!)!", "5!!!!",
    "\\binom{10^9}{5\\cdot 10^8}", "\\binom{10^{12}}{10^{11}}", "\\binom{x^{99}}{y^{99}}", "2^{2^{2^{2^{2^{2}}}}}",
    "\\sqrt[10^9]{2^{10^9}}", "(x+y+z+w)^{200}", "(1+x)^{100000}", "(a+b+c+d+e+f+g)^{99}", "\\int e^{x^{x^{x}}} dx",
    "\\int_0^1 \\frac{\\sin(x^{9})\\ln(x)}{x^{7}+\\cos(x)} dx", "\\int\\int\\int e^{xyz}\\sin(xyz) dx dy dz",
    "\\sum_{n=1}^{10^{9}} \\frac{1}{n^{n}}", "\\sum_{n=1}^{\\infty} \\frac{\\sin(n^{n})}{n!}",
    "\\prod_{n=1}^{10^{8}} (n^2+1)", "\\lim_{x\\to 0} \\frac{x^{x^{x^{x}}}}{\\sin(\\sin(\\sin x))}",
    "\\frac{d}{dx} x^{x^{x^{x^{x}}}}", "\\log_{2}(3^{10^{9}})", "\\sin(10^{10^{9}})", "e^{e^{e^{e^{10}}}}",
    "\\gcd(10^{999}!, 7)", "\\lfloor \\pi \\cdot 10^{10^{6}} \\rfloor", "x^{1000000}-1", "(x^{500}-1)(x^{499}-1)",
    "\\frac{x^{9999}-1}{x-1}", "\\sqrt{\\sqrt{\\sqrt{" * 15 + "x" + "}" * 45, "\\frac{1}{" * 40 + "2" + "}" * 40,
    "(" * 150 + "1" + ")" * 150, "{" * 150 + "1" + "}" * 150, "1+" * 150 + "x", "x^{" * 80 + "2" + "}" * 80, "9" * 380,
    "\\{" + ",".join(f"x_{{{number}}}" for number in range(40)) + "\\}", "0." + "9" * 380, "|" * 200 + "x" + "|" * 199,
    "\\begin{pmatrix}" + "&".join("x^9" for _ in range(60)) + "\\end{pmatrix}^{99}",
]  # fmt: skip
CPU_LIMIT_S = 2.0
OPEN_GOLDS = {
    "\\int": "\\int x dx",
    "\\sum": "\\sum_{n=1}^{3} n",
    "\\prod": "\\prod_{n=1}^{3} n",
    "\\lim": "\\lim_{x\\to 0} x",
}
"""Right answers that have what else would make an answer wrong before the library sees it."""


@pytest.fixture(scope="module")
def maths():
    maths = Maths()
    maths._pool.size = 1
    yield maths
    maths.close()


def judged(maths, gold, answer):
    return maths.reward(Task([], {"answer": gold}), f"So it is $\\boxed{{{answer}}}$.").value


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{1} or \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} is right", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\fbox{4}", "4"),
        ("\\boxed{5", None),
        ("\\boxed5", None),
        ("\\boxed{}", ""),
        ("5", None),
        ("\\boxed{1}" + " " * 30_000, None),
    ],
)
def test_the_last_box_counts(completion, answer):
    assert last_box(completion) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", 1000), ("1{,}000.5", 1000.5), ("-\\frac{1}{2}", -0.5), ("\\frac12", 0.5), ("1\\frac{1}{2}", 1.5),
        ("3/4", 0.75), (".5", 0.5), ("$ 7 $", 7), ("\\$5.00", 5), ("2.5\\times10^{3}", 2500), ("3\\cdot 10^2", 300),
        ("5.", 5), ("007", 7), ("+3", 3),
    ],
)  # fmt: skip
def test_numbers_that_are_written_out(text, value):
    assert plain_number(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "-", ".", "1,00", "1/0", "\\frac{1}{0}", "2^{10}", "1+1", "\\sqrt{4}", "x", "1e3", "٣", "５", "1 or 2", "--1"],
)
def test_what_is_not_written_out(text):
    assert plain_number(text) is None


def test_units_have_one_spelling():
    assert split_unit("5 \\text{ centimeters}") == ("5", "cm")
    assert split_unit("5\\,\\mathrm{cm}^2") == ("5", "cm^2")
    assert split_unit("30^\\circ") == ("30", "degree")
    assert split_unit("5 \\text{ apples}") == ("5", "")
    assert split_unit("2x") == ("2x", "")


def test_several_words_are_no_unit_but_for_a_few():
    assert split_unit("5 \\text{ square units}") == ("5", "")
    assert split_unit("5 \\text{ sq. cm}") == ("5", "cm^2")
    assert split_unit("5 \\text{ km per hour}") == ("5", "km/h")
    assert split_unit("5 \\text{ or 6}") == ("5 \\text{ or 6}", "")
    assert split_unit("5 \\text{ percent}") == ("5\\%", "")


def test_chains_of_inequalities_rise():
    assert rising("3 > x \\ge 1").replace(" ", "") == "1\\leqx<3"
    assert rising("1<x<3") == "1<x<3"
    assert rising("\\left(1, 2\\right)") == "\\left(1, 2\\right)"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("\\frac{1}{2}", "0.5"), ("0.333333", "\\frac{1}{3}"), ("1000", "1,000"), ("5", "x = 5"), ("x=5", "5"),
        ("2\\sqrt{3}", "\\sqrt{12}"), ("x^2-4", "(x-2)(x+2)"), ("\\{1,2\\}", "\\{2,1\\}"), ("1<x<3", "3>x>1"),
        ("25\\text{ cm}", "25"), ("25", "25\\text{ cm}"), ("5", "5 \\text{ apples}"), ("\\frac{1}{2}", "50\\%"),
        ("[0,1)", "[0,1)"), ("\\log_2 10", "\\frac{\\ln 10}{\\ln 2}"),
        ("\\begin{pmatrix}7\\\\4\\end{pmatrix}", "\\begin{pmatrix}7\\\\4\\end{pmatrix}"),
        ("\\sqrt{-1}", "i"), ("3+4i", "3+\\sqrt{-16}"), ("2\\sqrt{3}", "x_1 = 2\\sqrt{3}"), ("x^2", "f(x) = x^2"),
        ("y=2x", "2x-y=0"), ("x\\le 3", "x<=3"), ("AB", "\\text{AB}"), ("\\sum_{n=1}^k n", "\\sum_{n=1}^k n"),
        ("5\\%", "5\\%"), ("5\\%", "0.05"), ("0.05", "5 \\text{ percent}"), ("5", "500\\%"), ("0.333", "33.3\\%"),
        ("12\\text{ cm}^2", "12 \\text{ square cm}"), ("60", "60 \\text{ miles per hour}"), ("\\text{even}", "even"),
    ],
)  # fmt: skip
def test_the_same_in_other_words_is_right(maths, gold, answer):
    assert judged(maths, gold, answer) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5\\text{ cm}", "5\\text{ m}"), ("5\\text{ cm}^2", "5\\text{ cm}"), ("1024", "2^{10}"), ("162", "3^4\\cdot 2"),
        ("6", "1+2+3"), ("3", "\\sqrt{9}"), ("[0,1)", "[0,1]"), ("1<x<3", "1<x<4"), ("2", "\\frac{1}{2}"), ("5", "５"),
        ("x^2", "x^3"), ("5", ""), ("5", "5" * 500), ("(1,2)", "(2,1)"),
        ("\\frac{\\pi}{4}", "\\int_0^1 \\frac{1}{1+x^2} dx"), ("e", "\\sum_{n=0}^{\\infty}\\frac{1}{n!}"),
        ("e", "\\lim_{n\\to\\infty}(1+\\frac{1}{n})^n"), ("x^2", "\\prod_{n=1}^{2} x"), ("2\\sqrt{3}", "5=2\\sqrt{3}"),
        ("2\\sqrt{3}", "2\\sqrt{3}=5"), ("x=2\\sqrt{3}", "5=2\\sqrt{3}"), ("5", "5 \\text{ or 6 or 7}"),
        ("5", "5 \\text{ or more}"), ("5", "5\\%"), ("5\\%", "5"), ("5\\%", "500"), ("8", "2^{3}\\%"),
        ("\\sqrt{2}", "\\sqrt{2}\\%"), ("AB", "BA"), ("\\sqrt{-1}", "j"),
        ("12\\text{ cm}^2", "12 \\text{ cubic cm}"), ("60\\text{ miles per hour}", "60 \\text{ feet per second}"),
    ],
)  # fmt: skip
def test_what_is_not_the_same_is_wrong(maths, gold, answer):
    """Among them what the library takes: other units, and questions in place of answers."""
    assert judged(maths, gold, answer) == 0.0


def test_a_right_answer_that_cannot_be_read_judges_nobody(maths):
    reward = maths.reward(Task([], {"answer": "\\frac{1}{"}), "\\boxed{1}")
    assert reward.value is None
    assert "right answer cannot be read" in reward.reason


def test_numbers_need_no_worker():
    assert compare("42", "\\boxed{42}").value == 1.0
    assert compare("42", "\\boxed{43}").value == 0.0
    assert compare("42", "42").value == 0.0


def test_a_library_that_is_missing_is_could_not_tell(maths, monkeypatch):
    """The worker does not start: nobody is scored by that."""
    broken = Maths()
    broken._pool.command = ("-P", "-c", "import no_such_module")
    assert judged(broken, "x", "x+1") is None
    broken.close()


@pytest.mark.parametrize("bomb", BOMBS[:1])
def test_a_bomb_is_stopped_and_the_next_answer_is_judged(maths, bomb):
    """Attack: an answer that takes for ever to compute. Of nine in ten numbers it never reaches the library."""
    assert judged(maths, "x+1", bomb) is None
    assert judged(maths, "7", bomb) == 0.0
    assert judged(maths, "x+1", "1+x") == 1.0


@pytest.mark.long
@pytest.mark.parametrize("third", range(3))
def test_forty_three_bombs(maths, third):
    """Attack: all ways known to make a computer algebra system burn time or memory, against a formula."""
    assert len(BOMBS) == 43
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in BOMBS[third::3]:
        gold = next((formula for sign, formula in OPEN_GOLDS.items() if sign in bomb), "x^2+y")
        assert not is_finished(bomb, "x^2+y") or gold == "x^2+y"
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        assert judged(maths, gold, bomb) in (None, 0.0)
        assert time.monotonic() - started < 60
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - children.ru_utime < 60
        assert judged(maths, "x+1", "1+x") == 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def test_code_in_an_answer_is_not_run(maths, tmp_path):
    """Attack: formulas that a parser built on eval would run."""
    target = tmp_path / "ran"
    for payload in (
        f"\\text{{__import__('os').system('touch {target}')}}",
        f"__import__('os').system('touch {target}')",
        f"(lambda: open('{target}','w'))()",
        f"\\operatorname{{exec}}(\"open('{target}','w')\")",
    ):
        assert judged(maths, "x+1", payload) in (None, 0.0)
    assert not target.exists()


def test_the_sample_can_be_checked_against(maths, tmp_path):
    assert maths.import_data(SAMPLE) == SAMPLE.read_bytes()
    problems = decode_problems(SAMPLE.read_bytes())
    tasks = [Task([], {"answer": problem.answer}) for problem in problems]
    rewards = maths.rewards([(task, f"\\boxed{{{task.data['answer']}}}") for task in tasks])
    assert [reward.value for reward in rewards] == [1.0] * len(problems)


def test_right_answers_that_do_not_parse_are_refused_with_their_lines(maths, tmp_path):
    source = tmp_path / "data.jsonl"
    source.write_text(
        '{"problem": "a", "answer": "1"}\n\n{"problem": "b", "answer": "\\\\frac{1}{"}\n'
        '{"problem": "c", "answer": "x^{"}\n{"problem": "d", "answer": "x+1"}\n'
    )
    with pytest.raises(ConfigError, match=r"2 of 4 answers cannot be checked against: line 3: .*; line 4: ") as caught:
        maths.import_data(source)
    assert str(source) in caught.value.message
