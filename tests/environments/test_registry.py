"""Environments by name and digest."""

import pytest

from environments.registry import environment_names, get_environment
from protocol.errors import EnvironmentUnknown


def test_finds_an_environment_by_name():
    assert get_environment("sort-digits").name == "sort-digits"


@pytest.mark.parametrize("name", ["sort-digit", "", "../sort_digits", "x" * 10_000])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(EnvironmentUnknown, match="installed are: sort-digits") as caught:
        get_environment(name)
    assert len(str(caught.value)) < 500


def test_refuses_an_environment_with_another_digest():
    right = get_environment("sort-digits").digest
    assert get_environment("sort-digits", digest=right).digest == right
    with pytest.raises(EnvironmentUnknown, match="not the one this run uses"):
        get_environment("sort-digits", digest=bytes(32))


def test_names_are_those_of_the_environments():
    assert [get_environment(name).name for name in environment_names()] == environment_names()
