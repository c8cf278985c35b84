"""Validators of the zoo among real relays: what they say without looking, and what of it gets anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from factories import VALIDATOR
from validator_world import world

from protocol.identity import Identity
from protocol.records import Verdict
from simnet.zoo.validators import ForgedVotes, Framer, RubberStamp, Uncalled

ALICE = Identity.from_phrase("alice")


@pytest.mark.parametrize(
    ("role", "said"),
    [(Framer, ("reject", True)), (Uncalled, ("reject", True)), (RubberStamp, ("accept", False))],
    ids=["framer", "uncalled", "rubber-stamp"],
)
async def test_liars_judge_what_they_never_saw(tmp_path: Path, role: type[Framer], said: tuple[str, bool]) -> None:
    with trio.fail_after(30):
        async with world(tmp_path, role=role) as made:
            verdict = await made.verdict(await made.submit(ALICE, 0))
            assert (verdict.outcome, verdict.hard) == said
            assert verdict.draw.drawn
            assert made.compute.asked == made.screening.asked == []


async def test_forged_votes_reach_nobody_or_say_nothing_of_the_submission(tmp_path: Path) -> None:
    """A false signature, another contributor, a submission that is not there; the validator works on meanwhile."""
    with trio.fail_after(30):
        async with world(tmp_path, role=ForgedVotes) as made:
            handed_in = {(one.id, ALICE.peer_id.public_key) for one in [await made.submit(ALICE, n) for n in range(3)]}
            relay = made.relays[0].identity.peer_id
            while made.docket.outcomes() != {"accept": 3} or made.docket.unposted(relay):  # noqa: ASYNC110
                await trio.sleep(0.01)
            said = [item.signed for item in await made.client().feed(0) if isinstance(item.signed.record, Verdict)]
            assert [one.author for one in said] == [VALIDATOR.peer_id] * 2
            assert handed_in.isdisjoint((one.record.submission, one.record.contributor) for one in said)
