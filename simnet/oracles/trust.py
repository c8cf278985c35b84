"""Oracles about trust: the books add up, the honest are left alone, and nobody's lie is trained on."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Final

from simnet.gather import Contributor, Life
from simnet.oracles.books import Account, Books, SubmissionSeen
from simnet.oracles.inputs import FOLLOWS_S, missing_copies, short_copies
from simnet.oracles.judgement import Evidence, Figure, Judgement, listed, no_books
from simnet.oracles.neglect import Neglect, neglect_of

SOUND_AT_TIMES: Final = {
    "replayed-file": "its first file is sound",
    "two-nodes-one-key": "each of its submissions is sound by itself",
    "stale-checkpoint": "while there is one checkpoint only, it has no older one to use",
}
"""Cheats of whose accepted work only some is false; which, their name does not say."""
_SIGNALLED: Final = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM))
"""With these codes a node ends that is asked a second time, or does not come to its end in time."""


def credits_equal_the_replay(evidence: Evidence) -> Judgement:
    """What the trainer says of everyone's credits is what replaying its ledger gives; all copies are that ledger."""
    name, books = "credits equal the ledger's replay", evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    told = {one.peer_id: one for one in evidence.recording.trainer.contributors}
    differing = [evidence.name_of(one.peer_id) for one in books.accounts if not _agree(told.get(one.peer_id), one)]
    differing += [evidence.name_of(peer) for peer in told.keys() - {one.peer_id for one in books.accounts}]
    forks = [copy.node for copy in books.copies if not copy.agrees]
    missing, short = missing_copies(evidence, books), short_copies(evidence, books)
    numbers: dict[str, Figure] = {
        "entries": books.entries,
        "credits": sum(one.credits for one in books.accounts),
        "copies": sum(copy.entries > 0 for copy in books.copies),
        "relays without a copy": len(missing),
        "relays with a short one": len(short),
        "differing": len(differing),
        "breaches": len(books.breaches),
    }
    if books.breaches:
        return Judgement(name, "failed", f"The audit finds {listed(books.breaches, limit=1)}.", numbers)
    if forks:
        return Judgement(name, "failed", f"Another ledger than the trainer's lies at {listed(forks)}.", numbers)
    if differing and not _trainer_was_cut_short(evidence):
        return Judgement(name, "failed", f"The trainer tells others than its ledger of {listed(differing)}.", numbers)
    if differing:
        return Judgement(name, "could not tell", "The trainer's last word is older than its ledger.", numbers)
    if missing:
        finding = f"Not looked at, as it is missing, empty or cannot be read: {listed(missing)}."
        return Judgement(name, "could not tell", finding, numbers)
    if short:
        finding = f"Too short, though that relay ran undisturbed for {FOLLOWS_S:g} s: {listed(short)}."
        return Judgement(name, "could not tell", finding, numbers)
    if not books.accounts:
        return Judgement(name, "could not tell", "Nobody has an account in the ledger.", numbers)
    finding = (
        f"{numbers['credits']} credits of {len(books.accounts)} contributors over {books.entries} entries; the audit "
        f"is clean, and {numbers['copies']} copies agree."
    )
    return Judgement(name, "passed", finding, numbers)


def no_honest_node_punished(evidence: Evidence) -> Judgement:
    """Every honest contributor is in good standing at the end, and its work was judged and hardly ever turned down."""
    name, books = "no honest node punished or ignored", evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    honest = evidence.honest
    out = [evidence.name_of(one.peer_id) for one in books.accounts if one.peer_id in honest and _is_out(one)]
    rejected = [one for one in books.submissions if one.contributor in honest and one.state == "rejected"]
    hard = [one for one in rejected if one.hard]
    soft = [one for one in rejected if not one.hard]
    neglect = neglect_of(evidence, books)
    seen = {one.contributor for one in books.submissions} & honest.keys()
    numbers: dict[str, Figure] = {
        "honest": len(honest),
        "evicted": len(out),
        "hard rejections": len(hard),
        "others": len(soft),
        "settled": neglect.settled,
        "unsettled": len(neglect.unsettled),
        "of these old": len(neglect.old),
        "with nothing settled": len(neglect.kept_out) + len(neglect.unclear),
        "with nothing more settled": len(neglect.shut_out) + len(neglect.quiet),
    }
    if out or hard:
        whom = listed(sorted({*out, *(evidence.name_of(one.contributor) for one in hard)}))
        why = next((f" ({one.reason})" for one in hard), "")
        return Judgement(name, "failed", f"Punished though honest: {whom}{why}.", numbers)
    if ignored := _ignored(neglect, soft):
        return Judgement(name, "failed", ignored, numbers)
    if not seen:
        return Judgement(name, "could not tell", "No honest contributor handed anything in.", numbers)
    if unclear := _unclear(neglect):
        return Judgement(name, "could not tell", unclear, numbers)
    finding = (
        f"All {len(seen)} that handed work in are in good standing; {len(soft)} of their submissions did not count, "
        f"{len(neglect.unsettled)} were not settled by the end."
    )
    return Judgement(name, "passed", finding, numbers)


def _ignored(neglect: Neglect, soft: list[SubmissionSeen]) -> str:
    """Who gets nothing for honest work, in words; empty if nobody."""
    if neglect.kept_out:
        return f"Kept out though honest: of {listed(neglect.kept_out)} nothing was settled, and of others it was."
    if neglect.shut_out:
        whom = listed(neglect.shut_out)
        return f"Shut out though honest: for long nothing more was settled of {whom}, and of others it was."
    if neglect.judged and neglect.is_much(len(neglect.old)):
        states = Counter(one.state for one in neglect.old).most_common()
        counts = listed([f"{count} {state}" for state, count in states])
        return f"Never settled, long after they were handed in: {counts}."
    if neglect.is_much(len(soft)):
        return f"Turned down though honest: {len(soft)} submissions ({soft[0].reason or 'without a reason'})."
    return ""


def no_bad_rollout_in_a_batch(evidence: Evidence) -> Judgement:
    """No batch holds a file of a cheat, or of anyone who is not of the fleet."""
    name, books = "no bad rollout in a batch", evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    batches = evidence.in_batches()
    by_cheats = [one for one in batches if one.contributor in evidence.cheats]
    by_strangers = [one for one in batches if one.contributor not in {*evidence.cheats, *evidence.honest}]
    unclear = [one for one in by_cheats if evidence.cheats[one.contributor].cheat in SOUND_AT_TIMES]
    caught = _caught(evidence, books)
    numbers: dict[str, Figure] = {
        "in batches": len(batches),
        "of cheats": len(by_cheats),
        "rollouts of cheats": sum(one.rollouts for one in by_cheats),
        "cheats": len(evidence.cheats),
        "their submissions rejected": caught,
    }
    if len(by_cheats) > len(unclear) or by_strangers:
        whose = sorted({evidence.name_of(one.contributor) for one in [*by_cheats, *by_strangers]})
        return Judgement(name, "failed", f"Trained on: files of {listed(whose)}.", numbers)
    if unclear:
        cheat = evidence.cheats[unclear[0].contributor].cheat or ""
        finding = f"{len(unclear)} files of {cheat} are in batches; {SOUND_AT_TIMES[cheat]}."
        return Judgement(name, "could not tell", finding, numbers)
    if not batches:
        return Judgement(name, "could not tell", "No batch was made.", numbers)
    cheats = len(evidence.cheats)
    beside = f"{cheats} cheats had {caught} submissions rejected" if cheats else "no cheat took part"
    return Judgement(name, "passed", f"{len(batches)} files were trained on, none of a cheat; {beside}.", numbers)


def _unclear(neglect: Neglect) -> str:
    """What looks like it and may have another cause, in words; empty if nothing does."""
    if neglect.unclear:
        return f"Nothing was settled of {listed(neglect.unclear)}: too late, too briefly there, or disturbed."
    if neglect.quiet:
        return f"For long nothing more was settled of {listed(neglect.quiet)}: too late, or waiting almost throughout."
    if neglect.is_much(len(neglect.old)):
        return f"{len(neglect.old)} old submissions are unsettled, and too few validators ran for long."
    return ""


def _agree(told: Contributor | None, replayed: Account) -> bool:
    if told is None:
        return False
    said = (told.credits, told.accepted, told.standing, told.rejected)
    return said == (replayed.credits, replayed.accepted, replayed.standing, replayed.rejected)


def _is_out(account: Account) -> bool:
    return account.standing != "active"


def _caught(evidence: Evidence, books: Books) -> int:
    return sum(one.contributor in evidence.cheats and one.state == "rejected" for one in books.submissions)


def _trainer_was_cut_short(evidence: Evidence) -> bool:
    """Whether the trainer could not say a last word: it was killed or hurried, or is not known to have ended.

    One that ended by itself writes it, unless its disk is full; that its last word is missing is no excuse.
    """
    lives = [node.lives[-1] for node in evidence.recording.nodes if node.role == "trainer" and node.lives]
    last = lives[-1] if lives else None
    if last is None or last.final:
        return last is None
    return last.exit_code is None or last.exit_code < 0 or _was_hurried(last) or _disk_is_full(evidence)


def _was_hurried(last: Life) -> bool:
    """Whether the simulation had it end before it could: as it was asked a second time, or had not come up yet."""
    if last.ended_by not in ("close", "leave"):
        return False
    return last.exit_code in _SIGNALLED or last.status is None


def _disk_is_full(evidence: Evidence) -> bool:
    trainers = {node.name for node in evidence.recording.nodes if node.role == "trainer"}
    marks = [one.action for one in evidence.recording.faults if one.node in trainers]
    return marks.count("disk-full") > marks.count("disk-free")
