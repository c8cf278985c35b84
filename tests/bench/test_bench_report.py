"""What benchmarks write into the documentation stands between its marks, and nothing else changes."""

import pytest

from bench.report import Grid, Section, Statement, write_sections
from protocol.errors import ConfigError

PLACE = "<!-- bench paper {} -->\n{}\n<!-- end -->\n"
PAGE = "# Page\n\n" + PLACE.format("packing", "old") + "\nrest\n\n" + PLACE.format("other", "kept")


def section(name):
    grid = Grid("speeds", ("layout", "tokens"), [("packed", "3"), ("padded", "1")])
    return Section(name, "A setting.", [grid], [Statement("packing beats padding", "reproduced", "3×")])


def test_a_section_is_replaced_and_the_rest_of_the_page_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for _ in range(2):  # again over what was written
        write_sections(page, [section("packing")], bench="paper", options=" --seeds 5", date="2026-01-02")
    text = page.read_text()
    assert text.startswith("# Page\n\n<!-- bench paper packing -->\n")
    assert text.endswith("\n<!-- end -->\n\nrest\n\n<!-- bench paper other -->\nkept\n<!-- end -->\n")
    assert "old" not in text
    assert "`python -m bench paper --only packing --seeds 5`, 2026-01-02. A setting." in text
    assert "| layout | tokens |\n| --- | ---: |\n| packed | 3 |\n| padded | 1 |" in text
    assert "| packing beats padding | **reproduced** | 3× |" in text


def test_a_page_without_the_place_is_refused_and_left_as_it_is(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(ConfigError, match="no place for missing") as caught:
        write_sections(page, [section("packing"), section("missing")], bench="paper", options="", date="2026-01-02")
    assert "<!-- bench paper missing -->" in caught.value.hint
    assert page.read_text() == PAGE
