"""What counts as the expected output or value: types are kept apart, and no text or value upsets the comparison."""

import pytest

from environments import code_compare
from environments.code_compare import same_output
from environments.sandbox.inside import values


def same_value(got, expected, **how):
    """Of plain values, by what they encode to."""
    return code_compare.same_value(values.encode(got), values.encode(expected), **how)


@pytest.mark.parametrize(
    ("printed", "expected", "tolerance", "same"),
    [
        (b"1 2\n", "1 2", 0, True),
        (b"1 2  \r\n\n\n", "1 2\n", 0, True),
        (b" 1 2\n", "1 2", 0, False),
        (b"1\n\n2", "1\n2", 0, False),
        (b"1.0", "1", 0, False),
        (b"1.0000001", "1", 1e-6, True),
        (b"1.1", "1", 1e-6, False),
        (b"nan", "1", 1, False),
        (b"inf", "1e999", 1, False),
        (b"1 2", "1", 1, False),
        (b"yes", "no", 1, False),
        ("\u0661\u0660".encode(), "10", 1e-6, False),
        (b"1_0", "10", 1e-6, False),
        (b"1" * 500, "1", 1, False),
        (b"-1.5e1 .5 5.", "-15 0.50 5", 1e-6, True),
        (b"\xff", "\ufffd", 0, False),
    ],
)
def test_output_is_compared_by_line_or_by_word(printed, expected, tolerance, same):
    assert same_output(printed, expected, tolerance=tolerance) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (1, 1, True), (True, 1, False), (1, True, False), (1.0, 1, False), (1, 1.0, True), ("1", 1, False),
        (None, 0, False), ([1], (1,), False), ((1,), (1,), True), ({1}, {1}, True), ({True}, {1}, False),
        ({1: "a"}, {True: "a"}, False), ({1: 2}, {1: 2}, True), ({1: 2}, {1: 2, 3: 4}, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False), (10**400, 1.0, False), (float("nan"), float("nan"), True), (float("inf"), 1.0, False),
        ({(1, True)}, {(1, 1)}, False), (b"a", "a", False), ({}, set(), False), (b"a", b"a", True),
        ({2, 1, "1"}, {"1", 1, 2}, True), ({1}, {1, 2}, False), ({1: "a", "1": "b"}, {"1": "b", 1: "a"}, True),
        ({-0.0}, {0.0}, True), ({1.0}, {1}, False), ({b"1"}, {"1"}, False), ({(1, (2,))}, {(1, (2,))}, True),
        ({1: [1, True]}, {1: [1, 1]}, False), (float("-inf"), float("-inf"), True), ({None}, {"None"}, False),
    ],
)  # fmt: skip
def test_values_are_compared_with_their_types(got, expected, same):
    assert same_value(got, expected) is same


def test_values_written_as_json_know_no_tuples():
    assert same_value((1, [(2, 3)]), [1, [[2, 3]]], tuples_are_lists=True)
    assert not same_value((1, 2), [1, 2])
    assert same_value([0.1 + 0.2], [0.3], tolerance=1e-9)
    assert not same_value([0.1 + 0.2], [0.3])
