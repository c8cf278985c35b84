"""What relays' reports about themselves come to."""

import pytest

from node.version_check import Reported, conclude, print_check, release


@pytest.mark.parametrize(
    ("relays", "outcome", "code"),
    [
        ([], "nobody asked", 1),
        ([("intellect-node/0.0.0", 1)], "newest", 0),
        ([("intellect-node/0.0.0", 1), ("intellect-node/99.0.0", 1)], "newer release", 1),
        ([("intellect-node/99.0.0", 2)], "newer protocol", 3),
        ([("another-program/99.0.0", 1)], "newest", 0),
        ([("intellect-node/0.0.0", 0)], "newest", 0),
    ],
)
def test_outcomes(relays, outcome, code, capsys):
    found = conclude([Reported(f"peer{number}", *said) for number, said in enumerate(relays)])
    assert (found.outcome, found.exit_code) == (outcome, code)
    print_check(found)
    assert "peer0" in capsys.readouterr().out or not relays


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("intellect-node/1.22.333", (1, 22, 333)),
        ("intellect-node/1.2.3rc1", (1, 2, 3)),
        ("intellect-node/" + "9" * 5000, ()),
        ("", ()),
    ],
)
def test_releases(text, numbers):
    """The third is an attack: a number that is costly to read."""
    assert release(text) == numbers


def test_the_command_prints_the_version(run_cli):
    assert run_cli("version").out.startswith("intellect-node/")
    assert '"protocol": 1' in run_cli("version", "--json").out
