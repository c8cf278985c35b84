"""Plain values through JSON: there and back with their types, and any bytes give a value or ValueError."""

import contextlib
import json
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.sandbox.inside import values

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner), max_leaves=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner) | st.sets(KEYS) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


def typed(value):
    """A value with all its types, for comparison."""
    if isinstance(value, dict):
        return "dict", sorted(((repr(typed(key)), typed(item)) for key, item in value.items()), key=repr)
    if isinstance(value, set):
        return "set", sorted(map(repr, map(typed, value)))
    if isinstance(value, list | tuple):
        return type(value).__name__, [typed(item) for item in value]
    return type(value).__name__, repr(value)


@given(VALUES)
def test_values_come_back_as_they_were(value):
    assert typed(values.loads(values.dumps(value))) == typed(value)


@given(VALUES)
def test_what_is_encoded_passes_the_check_and_stays_as_it_is(value):
    assert values.parse(values.dumps(value)) == json.loads(values.dumps(value))


@given(st.binary() | st.text())
def test_any_bytes_give_a_value_or_an_error(data):
    with contextlib.suppress(ValueError):
        values.loads(data)
    with contextlib.suppress(ValueError):
        values.parse(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["tuple", "set", "dict", "bytes", "float", "x"]), inner, max_size=2)
    ),
)


@given(JSON)
def test_any_json_gives_a_value_or_an_error(data):
    """What the check lets through can be built."""
    try:
        encoded = values.parse(json.dumps(data))
    except ValueError:
        return
    values.decode(encoded)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[" * 200 + "]" * 200, "9" * 10_000, "NaN", "Infinity", "{}", '{"a": 1}', '{"set": [[1]]}',
     '{"dict": [[1]]}', '{"dict": [[[1], 2]]}', '{"float": "1"}', '{"bytes": "zz"}', '{"bytes": 5}', '{"tuple": 5}',
     '{"float": []}', "", "\ud800", b"\xff", '{"set": 5}', '{"dict": [[1, 2, 3]]}',
     '{"set": [{"set": []}]}', '{"set": [{"tuple": [[]]}]}', '{"tuple": [], "set": []}'],
)  # fmt: skip
def test_hostile_texts_are_refused(text):
    """Attack: nesting, digits or objects meant to crash whoever reads a result."""
    with pytest.raises(ValueError):  # noqa: PT011
        values.loads(text)
    with pytest.raises(ValueError):  # noqa: PT011
        values.parse(text)


def test_subclasses_count_as_what_they_extend():
    colour = IntEnum("colour", ["red"])
    point = namedtuple("point", "x y")
    given = [colour.red, point(1, 2), Counter("aab"), defaultdict(int, {1: 2}), OrderedDict(a=1), frozenset({1})]
    assert values.loads(values.dumps(given)) == [1, (1, 2), {"a": 2, "b": 1}, {1: 2}, {"a": 1}, {1}]


def test_floats_that_json_lacks():
    text = values.dumps([float("inf"), -float("inf"), float("nan")])
    assert str(values.loads(text)) == "[inf, -inf, nan]"


@pytest.mark.parametrize("value", [object(), print, 1j, {1: object()}, [iter([])]])
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(TypeError, match="not plain data"):
        values.dumps(value)


def test_a_value_that_holds_itself_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="too deeply"):
        values.dumps(endless)
