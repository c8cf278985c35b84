import pytest

from protocol.errors import NodeError
from simnet.tools import run_tool

HIT_AT_FIRST = 'test -e "$0" && exit 0; touch "$0"; kill -INT $$'


def test_a_tool_that_an_interrupt_hit_as_it_started_is_started_again(tmp_path):
    run_tool(["sh", "-c", HIT_AT_FIRST, str(tmp_path / "begun")])
    assert (tmp_path / "begun").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "kill -INT $$"], "ended with code -2"),
        (["sh", "-c", "cat >&2; exit 3"], "no such link"),
        (["/nowhere/ip"], "cannot be run"),
    ],
)
def test_what_a_tool_said_is_the_error(command, words):
    with pytest.raises(NodeError, match=words):
        run_tool(command, "no such link")
