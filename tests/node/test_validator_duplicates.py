"""Copies of long answers are found, chance is not punished, and who came first is not either."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from node.validator.duplicates import COINCIDENCE_NATS, Answer, AnswerIndex, Origin, similarity, sketch_answer
from protocol.errors import DataDirError
from protocol.identity import Identity

ALICE, BOB = (Identity.from_phrase(name).peer_id for name in ("alice", "bob"))
PROMPT = [1, 5, 9]


@pytest.fixture
def index(tmp_path: Path) -> AnswerIndex:
    return AnswerIndex(tmp_path / "answers.sqlite")


def text(seed: int, length: int = 200) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def answer(tokens: list[int], *, prompt: list[int] = PROMPT, nats_a_token: float = 1.0) -> Answer:
    return sketch_answer(prompt, tokens, [-nats_a_token] * len(tokens))


def first(peer=ALICE, *, beat: int = 5, tag: bytes = b"1") -> Origin:
    return Origin(peer, tag * 32, beat)


def second(peer=BOB, *, beat: int = 9, tag: bytes = b"2") -> Origin:
    return Origin(peer, tag * 32, beat)


def test_copy_of_an_earlier_answer_is_named(index: AnswerIndex) -> None:
    index.add(first(), [answer(text(1))])
    likeness = index.compare(second(), [answer(text(1)), answer(text(2))])
    assert (likeness.compared, likeness.copies, likeness.alike) == (2, 1, 0)
    assert ALICE.short in likeness.source
    result = likeness.result(proved=False)
    assert (result.name, result.outcome) == ("duplicate", "fail")
    assert likeness.result(proved=True).outcome == "pass"


def test_earlier_one_is_never_called_a_copy(index: AnswerIndex) -> None:
    """The copier's submission was judged first, though the relay had the original before."""
    index.add(first(BOB, beat=9), [answer(text(1))])
    for beat in (5, 9):
        likeness = index.compare(second(ALICE, beat=beat), [answer(text(1))])
        assert (likeness.copies, likeness.alike) == (0, 1)
        assert likeness.result(proved=False).outcome == "pass"


def test_near_copy_is_flagged_with_numbers(index: AnswerIndex) -> None:
    """A copier changes a few words."""
    changed = text(1)
    changed[100] = 1001
    index.add(first(), [answer(text(1))])
    likeness = index.compare(second(), [answer(changed)])
    assert (likeness.copies, likeness.alike) == (0, 1)
    assert likeness.closest > 0.8
    result = likeness.result(proved=False)
    assert result.outcome == "pass"
    assert "resemble" in result.detail
    assert result.numbers["closest"] == likeness.closest


def test_answers_that_the_policy_all_but_forces_may_be_equal(index: AnswerIndex) -> None:
    """A policy that has converged gives everybody the same answer."""
    index.add(first(), [answer(text(1), nats_a_token=COINCIDENCE_NATS / 400)])
    likeness = index.compare(second(), [answer(text(1), nats_a_token=3.0)])
    assert not likeness.suspicious


def test_copier_cannot_call_its_copy_probable(index: AnswerIndex) -> None:
    """A copier records log-probabilities near 0, as if there had been no choice."""
    index.add(first(), [answer(text(1))])
    assert index.compare(second(), [answer(text(1), nats_a_token=0.0)]).copies == 1


def test_equal_answers_to_other_prompts_are_no_copies(index: AnswerIndex) -> None:
    index.add(first(), [answer(text(1), prompt=[1, 2])])
    assert not index.compare(second(), [answer(text(1))]).suspicious


def test_own_answer_given_again_is_flagged(index: AnswerIndex) -> None:
    """A contributor fills a group with its one good answer."""
    likeness = index.compare(first(), [answer(text(1)), answer(text(1)), answer(text(2))])
    assert (likeness.copies, likeness.alike, likeness.source) == (0, 1, "one another")
    index.add(first(), [answer(text(1))])
    assert index.compare(second(ALICE), [answer(text(1))]).alike == 1


def test_submission_does_not_resemble_itself(index: AnswerIndex) -> None:
    """A case is examined again after a crash."""
    for _ in range(2):
        index.add(first(), [answer(text(1))])
        assert not index.compare(first(), [answer(text(1))]).suspicious


def test_index_survives_a_restart_and_is_bounded(tmp_path: Path) -> None:
    small = AnswerIndex(tmp_path / "answers.sqlite", max_answers=10)
    for number in range(30):
        small.add(Origin(ALICE, bytes([number]) * 32, 1), [answer(text(number))])
    small.close()
    again = AnswerIndex(tmp_path / "answers.sqlite", max_answers=10)
    assert again.compare(second(), [answer(text(29))]).copies == 1
    assert again.compare(second(), [answer(text(0))]).copies == 0


def test_similarity_estimates_what_is_shared() -> None:
    half = answer(text(1)[:100] + text(2)[:100])
    assert similarity(answer(text(1)).sketch, answer(text(1)).sketch) == 1.0
    assert 0.15 < similarity(answer(text(1)).sketch, half.sketch) < 0.55
    assert similarity(answer(text(1)).sketch, answer(text(2)).sketch) < 0.1


@pytest.mark.parametrize("tokens", [[7], [7] * 8, [7] * 5000, list(range(9))])
def test_any_answer_has_a_sketch(tokens: list[int]) -> None:
    assert len(answer(tokens).sketch) == 256


def test_golden_sketch() -> None:
    """Sketches lie on disk across releases."""
    assert answer(list(range(40))).sketch[:8].hex() == "e2dee112b4b1ab0e"


def test_damaged_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataDirError, match="index of answers"):
        AnswerIndex(tmp_path / "answers.sqlite")
