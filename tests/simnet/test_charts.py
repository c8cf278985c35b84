from hypothesis import given
from hypothesis import strategies as st

from simnet.charts import Bar, escape, merge_bars, round_up, ticks


def test_short_bars_become_mixed_ones_and_long_ones_stay():
    bars = [
        Bar(0, 10, "working", "a"),
        Bar(10, 10.2, "waiting", "b"),
        Bar(10.2, 10.4, "working", "c"),
        Bar(10.4, 20, "waiting", "d"),
    ]
    merged = merge_bars(bars, min_width=1)
    assert [bar.kind for bar in merged] == ["working", "mixed2", "waiting"]
    assert (merged[1].start, merged[1].end) == (10, 10.4)


def test_bars_with_a_gap_between_them_are_not_joined():
    bars = [Bar(0, 0.1, "working", "a"), Bar(5, 5.1, "working", "b")]
    assert merge_bars(bars, min_width=1) == bars


@given(st.lists(st.floats(min_value=0.001, max_value=5), max_size=300))
def test_merged_bars_cover_the_same_time(widths):
    bars, at = [], 0.0
    for number, width in enumerate(widths):
        bars.append(Bar(at, at + width, ("working", "waiting")[number % 2], "x"))
        at += width
    merged = merge_bars(bars, min_width=1)
    assert len(merged) <= 2 * at + 2
    assert [bar.start for bar in merged[1:]] == [bar.end for bar in merged[:-1]]
    assert (not bars) or (merged[0].start, merged[-1].end) == (0.0, at)


@given(st.floats(min_value=0, max_value=1e9))
def test_ticks_are_few_and_within_the_axis(end):
    marks = ticks(end)
    assert 1 <= len(marks) <= 20
    assert marks[-1] <= max(end, 0)


@given(st.integers(min_value=1, max_value=10**9))
def test_an_axis_ends_above_the_largest_value(value):
    assert value <= round_up(value) <= 2.5 * value


@given(st.text())
def test_escaped_text_holds_no_markup_and_nothing_unprintable(text):
    escaped = escape(text)
    assert not set(escaped) & set("<>\"'")
    assert escaped.isprintable()
