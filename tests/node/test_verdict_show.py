"""Finding and showing verdicts, from every role's data directory and from a file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from factories import VALIDATOR, make_draw_evidence, make_head, make_submission, make_verdict, receipt_of
from rich.console import Console
from typer.testing import CliRunner

from cli import app
from node.inference.outbox import Outbox
from node.relay.store import RelayStore
from node.validator.docket import Docket
from node.verdict_show import describe_verdict, find_verdicts, render
from protocol.draw import beacon_of, is_drawn
from protocol.envelope import Signed
from protocol.errors import ConfigError, DataDirError, ProtocolError
from protocol.identity import Identity
from protocol.records import CheckResult, Submission

RUN = b"r" * 32
ALICE = Identity.from_phrase("alice")
SUBMISSION = make_submission(ALICE, RUN)
CHECKS = (
    CheckResult(name="schema", outcome="pass"),
    CheckResult(
        name="sampling",
        outcome="fail",
        detail="a token of rollout 3 lost by 2.5",
        numbers={"max_margin": 2.5, "tokens": 320.0},
        limits={"max_margin": 0.001},
    ),
)
REJECTION = make_verdict(SUBMISSION, outcome="reject", hard=True, reason="sampling: lost by 2.5", checks=CHECKS)


def shown(what: str, data_dir: Path) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for found in find_verdicts(what, data_dir):
            console.print(render(found))
    return capture.get()


def in_docket(directory: Path) -> None:
    Docket(directory / "docket.sqlite").add(REJECTION)


def in_outbox(directory: Path) -> None:
    outbox = Outbox(directory / "outbox.sqlite")
    outbox.add(SUBMISSION, directory / "0.parquet")
    outbox.judged(REJECTION)


def in_relay(directory: Path) -> None:
    (directory / "relay").mkdir()
    RelayStore(directory / "relay", max_bytes=1 << 20).add_verdict(REJECTION)


PLACES = {"docket": in_docket, "outbox": in_outbox, "relay": in_relay}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", ["last", SUBMISSION.id.hex(), SUBMISSION.id.hex()[:8]])
def test_verdict_is_found_wherever_it_lies(tmp_path: Path, place: str, what: str) -> None:
    PLACES[place](tmp_path)
    text = shown(what, tmp_path)
    assert "reject (hard: it evicts)" in text
    assert "sampling: lost by 2.5" in text
    assert str(VALIDATOR.peer_id) in text
    assert place in text


def test_numbers_stand_beside_their_limits(tmp_path: Path) -> None:
    in_docket(tmp_path)
    lines = [line.split() for line in shown("last", tmp_path).splitlines()]
    assert ["sampling", "fail", "max_margin", "2.5", "≤", "0.001"] in [line[:6] for line in lines]
    assert ["tokens", "320"] in lines


def test_draw_is_made_again(tmp_path: Path) -> None:
    beacon = make_head(RUN, 2)
    tries = (make_submission(ALICE, RUN, index=index) for index in range(64))
    submission = next(one for one in tries if not is_drawn(beacon_of(beacon), one.id, rate=0.25))
    draw = make_draw_evidence(submission, beacon, rate=0.25)
    (tmp_path / "verdict").write_bytes(make_verdict(submission, draw=draw).data)
    text = shown(str(tmp_path / "verdict"), tmp_path)
    assert "no, at a rate of 0.25: not drawn" in text
    assert "head 2" in text
    assert "it does not draw it" in text
    assert receipt_of(submission).author.short in json.dumps(
        describe_verdict(find_verdicts(str(tmp_path / "verdict"), tmp_path)[0])
    )


def test_json_is_whole(tmp_path: Path) -> None:
    in_docket(tmp_path)
    done = CliRunner().invoke(app, ["verdict", "show", "last", "--data-dir", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.output)
    assert found["outcome"] == "reject"
    assert found["submission"] == SUBMISSION.id.hex()
    assert found["checks"][1]["limits"] == {"max_margin": 0.001}
    assert found["draw"]["why"] == "newcomer"


def test_validators_that_disagree_are_all_shown(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    outbox.add(SUBMISSION, tmp_path / "0.parquet")
    for name, outcome in (("v1", "undecided"), ("v2", "accept")):
        outbox.judged(make_verdict(SUBMISSION, by=Identity.from_phrase(name), outcome=outcome))
    outcomes = {found.verdict.record.outcome for found in find_verdicts(SUBMISSION.id.hex(), tmp_path)}
    assert outcomes == {"undecided", "accept"}


def test_prefix_of_several_submissions_asks_for_more_digits(tmp_path: Path) -> None:
    docket = Docket(tmp_path / "docket.sqlite")
    one, other = twins(digits=6)
    for submission in (one, other):
        docket.add(make_verdict(submission))
    with pytest.raises(ConfigError, match="begins 2 submissions"):
        find_verdicts(one.id.hex()[:6], tmp_path)
    assert len(find_verdicts(one.id.hex(), tmp_path)) == 1


def twins(*, digits: int) -> tuple[Signed[Submission], Signed[Submission]]:
    """Two submissions whose ids begin alike."""
    seen: dict[str, Signed[Submission]] = {}
    for number in itertools.count():
        submission = make_submission(ALICE, RUN, sha256=number.to_bytes(32, "big"))
        twin = seen.setdefault(submission.id.hex()[:digits], submission)
        if twin is not submission:
            return twin, submission
    raise AssertionError


@pytest.mark.parametrize("what", ["", "abc", "nonsense", "../etc", "ABCDEF12", "g" * 64, "a" * 65])
def test_what_names_nothing_is_a_usage_error(tmp_path: Path, what: str) -> None:
    with pytest.raises(ConfigError, match="neither a file"):
        find_verdicts(what, tmp_path)


def test_missing_verdict_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(DataDirError) as caught:
        find_verdicts("a" * 64, tmp_path)
    assert "--data-dir" in caught.value.hint


def test_file_that_is_no_verdict_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff" * 90)
    with pytest.raises(ProtocolError):
        find_verdicts(str(tmp_path / "x"), tmp_path)
    (tmp_path / "docket.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataDirError, match="cannot be read"):
        find_verdicts("last", tmp_path)


def test_texts_of_others_are_escaped(tmp_path: Path) -> None:
    """A verdict's reason holds an escape sequence that would rewrite the terminal."""
    verdict = make_verdict(SUBMISSION, outcome="reject", reason="schema: \x1b[2J[bold]boo")
    Docket(tmp_path / "docket.sqlite").add(verdict)
    text = shown("last", tmp_path)
    assert "\x1b[2J" not in text
    assert "[bold]boo" in text
