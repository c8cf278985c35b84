"""The pages that are made from the code are up to date, and every public error has an entry that helps."""

import re
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tools import docs, messages, reference, troubleshooting
from tools.markdown import replace_part, table

PAGE = troubleshooting.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stale():
    return docs.stale_pages()


@pytest.mark.parametrize("name", sorted(docs.PAGES))
def test_the_page_is_up_to_date(stale, name):
    """If this fails: `make docs`."""
    assert name not in stale, f"docs/{name} is out of date: make docs"


def section(name):
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/troubleshooting.md has no section on {name}"
    return found[1]


@pytest.mark.parametrize("name", sorted(messages.error_classes()))
def test_every_public_error_has_a_cause_and_a_fix(name):
    text = section(name)
    assert len(re.search(r"\*\*Cause\.\*\* (.*)", text)[1]) > 40
    assert len(re.search(r"\*\*Fix\.\*\* (.*)", text)[1]) > 10


def test_every_message_that_the_code_can_say_is_on_the_page():
    known = set(messages.error_classes())
    found = messages.messages()
    assert len(found) > 400
    assert {message.error for message in found} <= known
    for message in found:
        assert " ".join(message.text.split()) in section(message.error)


def test_texts_are_read_with_gaps_where_something_is_put_in(tmp_path):
    source = tmp_path / "sample.py"
    source.write_text(
        "def f(x):\n"
        "    raise ConfigError(f'no {x!r}' + f' in {x}{x}', hint='look ' 'there')\n"
        "    raise RefusedError('a|b `c`' if x else 'd', code='x')\n"
        "    raise Evicted(f'{x}')\n"
        "    raise ValueError('private')\n"
    )
    found = list(messages._in_module(source, {"Evicted": "NodeError"}))
    assert [(each.error, each.text, each.hint) for each in found] == [
        ("ConfigError", "no … in …", "look there"),
        ("RefusedError", "a|b `c` / d", ""),
        ("NodeError", "…", ""),
    ]


def test_errors_that_modules_derive_for_themselves_are_counted_to_their_base():
    assert messages._private_classes()["Evicted"] == "NodeError"


def test_every_setting_and_flag_is_on_the_page():
    page = reference.configuration()
    for name in reference.NodeConfig.__struct_fields__:
        assert page.count(f"\n| `{name}` |") == 2


def test_every_command_is_on_the_page():
    page = reference.commands()
    for command in ("status", "doctor", "run create", "id export", "config show", "dht find"):
        assert re.search(rf"^## `intellect-node {command}\b", page, re.MULTILINE)
    assert "`--json`" in page


def test_every_metric_is_on_the_page_once():
    page = reference.metric_page()
    for metric in reference.metrics.CATALOGUE:
        assert page.count(f"\n| `{metric.name}` |") == 1


def test_cells_cannot_break_out_of_a_table():
    made = table(("a",), [["x | y\n\n# z <operator> `<code>`"]])
    assert made == "| a |\n|---|\n| x \\| y # z &lt;operator> `<code>` |\n"


def test_a_page_without_its_markers_is_named():
    with pytest.raises(ConfigError, match="markers of 'x' 0 times"):
        replace_part("nothing", "x", "")
    assert replace_part("<!-- x -->\nold<!-- end x -->", "x", r"\1") == "<!-- x -->\n\\1<!-- end x -->"


def test_links_between_pages_lead_somewhere():
    root = Path(__file__).parents[2]
    pages = [root / "README.md", root / "deploy" / "README.md", *sorted((root / "docs").rglob("*.md"))]
    broken = []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)", text):
            path = (page.parent / target).resolve() if target else page
            if not path.exists():
                broken.append(f"{page.relative_to(root)}: {target}")
            elif anchor and path.suffix == ".md" and anchor[1:] not in anchors(path):
                broken.append(f"{page.relative_to(root)}: {target}{anchor}")
    assert broken == []


def anchors(path):
    """Names that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
