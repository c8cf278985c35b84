"""Oracles about trust: the books add up, the honest are left alone, and nobody's lie is trained on."""

from __future__ import annotations

from typing import Final

from simnet.gather import Contributor
from simnet.oracles.books import Account, Books
from simnet.oracles.judgement import Evidence, Figure, Judgement, listed, no_books

SOUND_AT_TIMES: Final = {
    "replayed-file": "its first file is sound",
    "two-nodes-one-key": "each of its submissions is sound by itself",
    "stale-checkpoint": "while there is one checkpoint only, it has no older one to use",
}
"""Cheats of whose accepted work only some is false; which, their name does not say."""


def credits_equal_the_replay(evidence: Evidence) -> Judgement:
    """What the trainer says of everyone's credits is what replaying its ledger gives; all copies are that ledger."""
    name, books = "credits equal the ledger's replay", evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    told = {one.peer_id: one for one in evidence.recording.trainer.contributors}
    differing = [evidence.name_of(one.peer_id) for one in books.accounts if not _agree(told.get(one.peer_id), one)]
    differing += [evidence.name_of(peer) for peer in told.keys() - {one.peer_id for one in books.accounts}]
    forks = [copy.node for copy in books.copies if not copy.agrees]
    numbers: dict[str, Figure] = {
        "entries": books.entries,
        "credits": sum(one.credits for one in books.accounts),
        "copies": len(books.copies),
        "differing": len(differing),
        "breaches": len(books.breaches),
    }
    if books.breaches:
        return Judgement(name, "failed", f"The audit finds {listed(books.breaches, limit=1)}.", numbers)
    if forks:
        return Judgement(name, "failed", f"Another ledger than the trainer's lies at {listed(forks)}.", numbers)
    if differing and _trainer_is_final(evidence):
        return Judgement(name, "failed", f"The trainer tells others than its ledger of {listed(differing)}.", numbers)
    if differing or not books.accounts:
        return Judgement(name, "could not tell", "The trainer's last word is older than its ledger.", numbers)
    finding = (
        f"{numbers['credits']} credits of {len(books.accounts)} contributors over {books.entries} entries; the audit "
        f"is clean, and {len(books.copies)} copies agree."
    )
    return Judgement(name, "passed", finding, numbers)


def no_honest_node_punished(evidence: Evidence) -> Judgement:
    """Every honest contributor is in good standing at the end, without a hard rejection that stands."""
    name, books = "no honest node punished", evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    honest = evidence.honest
    out = [evidence.name_of(one.peer_id) for one in books.accounts if one.peer_id in honest and _is_out(one)]
    hard = [one for one in books.submissions if one.contributor in honest and one.hard and one.state == "rejected"]
    soft = sum(one.contributor in honest and one.state == "rejected" and not one.hard for one in books.submissions)
    seen = {one.contributor for one in books.submissions} & honest.keys()
    numbers = {"honest": len(honest), "evicted": len(out), "hard rejections": len(hard), "others": soft}
    if out or hard:
        whom = listed(sorted({*out, *(evidence.name_of(one.contributor) for one in hard)}))
        why = next((f" ({one.reason})" for one in hard), "")
        return Judgement(name, "failed", f"Punished though honest: {whom}{why}.", numbers)
    if not seen:
        return Judgement(name, "could not tell", "No honest contributor handed anything in.", numbers)
    finding = f"All {len(seen)} that handed work in are in good standing; {soft} of their submissions did not count."
    return Judgement(name, "passed", finding, numbers)


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


def _agree(told: Contributor | None, replayed: Account) -> bool:
    if told is None:
        return False
    return (told.credits, told.accepted, told.standing) == (replayed.credits, replayed.accepted, replayed.standing)


def _is_out(account: Account) -> bool:
    return account.standing != "active"


def _caught(evidence: Evidence, books: Books) -> int:
    return sum(one.contributor in evidence.cheats and one.state == "rejected" for one in books.submissions)


def _trainer_is_final(evidence: Evidence) -> bool:
    trainers = (node for node in evidence.recording.nodes if node.role == "trainer")
    return any(node.lives and node.lives[-1].final for node in trainers)
