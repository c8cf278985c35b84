"""Answers of several turns: the environment replies to a turn, and the policy goes on (a tool's output, for one).

A turn is an answer of its own to an engine: what came before is its prompt, the run's `max_new_tokens` is its limit,
and its noise is that of member m + t · group size. So engines, proofs and the check of sampling know nothing of turns,
and a reply's tokens are never sampled, proved or trained on; a validator computes them again. Leaves out rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from environments.base import Message, Task
from node.engines.assignment import Assignment, Work
from node.engines.base import Generation, GenerationRequest
from protocol.errors import ModelError
from protocol.records import Manifest
from protocol.rollouts import Rollout, emitted_spans

Ask = Callable[[Sequence[GenerationRequest]], list[Generation]]


class Room(NamedTuple):
    """What a turn must fit into, in tokens."""

    max_new_tokens: int
    """That a turn may have."""
    max_model_len: int
    """Of a prompt with all turns and replies."""


@dataclass(frozen=True)
class Played(Generation):
    """An answer of several turns; `turns` as in protocol.rollouts.Rollout."""

    turns: list[int] = field(default_factory=list)


@dataclass
class _Game:
    """One answer while its turns are played."""

    prompt_index: int
    member: int
    played: Played
    reply: list[int] | None = None
    """Tokens between its last turn and its next one; None where it has ended."""


def play_turns(work: Work, manifest: Manifest, first: Sequence[Generation], ask: Ask) -> list[Generation]:
    """Go on from the first turns of all answers of a submission, in order, as long as the environment replies."""
    answers = [divmod(number, work.group_size) for number in range(len(first))]
    return go_on(work, room_of(manifest), answers, first, ask)


def go_on(
    work: Work, room: Room, answers: Sequence[tuple[int, int]], first: Sequence[Generation], ask: Ask
) -> list[Generation]:
    """Go on from the first turns of some answers, each (prompt index, member), as long as the environment replies.

    Raises ModelError where the work has no tokenizer, and what `ask` does.
    """
    if work.environment.max_turns < 2:
        return list(first)
    games = [_Game(*answer, played=_played(generation)) for answer, generation in zip(answers, first, strict=True)]
    for turn in range(1, work.environment.max_turns):
        for game in games:
            if turn == 1 or game.reply is not None:
                game.reply = _reply_to(work, room, game)
        going_on = [game for game in games if game.reply is not None]
        if not going_on:
            break
        for game, generation in zip(going_on, ask([_request(work, game, turn) for game in going_on]), strict=True):
            game.played = _longer(game.played, game.reply or [], generation)
    return [game.played for game in games]


def room_of(manifest: Manifest) -> Room:
    """What the turns of a run's answers must fit into."""
    return Room(manifest.rollout.max_new_tokens, manifest.model.max_model_len)


def turns_of(generation: Generation) -> list[int]:
    """Where the policy's turns lie in an answer, as in protocol.rollouts.Rollout."""
    return generation.turns if isinstance(generation, Played) else []


def _played(generation: Generation) -> Played:
    return Played(generation.output_ids, generation.logprobs, generation.finish_reason, generation.proofs)


def _reply_to(work: Work, room: Room, game: _Game) -> list[int] | None:
    if game.played.finish_reason != "stop":
        return None
    assignment = work.assignments[game.prompt_index]
    return reply_ids(work, room, assignment, output_ids=game.played.output_ids, turns=game.played.turns)


def reply_ids(
    work: Work, room: Room, assignment: Assignment, *, output_ids: Sequence[int], turns: Sequence[int]
) -> list[int] | None:
    """The reply to an answer so far, whose last turn ended with a stop token; None where the answer ends with it.

    It ends, too, where another turn would not fit the model.
    """
    if work.tokenizer is None:
        raise ModelError("replies to turns need the policy's tokenizer")
    spans = list(zip(turns[::2], turns[1::2], strict=True)) or [(0, len(output_ids))]
    if len(spans) >= work.environment.max_turns:
        return None
    text = work.environment.reply(assignment.task, transcript(work, assignment.task, output_ids, spans))
    if not text:
        return None
    ids = work.tokenizer.encode_reply(text, plain=assignment.task.plain, ended_by=output_ids[-1])
    needed = len(assignment.prompt_ids) + len(output_ids) + len(ids) + room.max_new_tokens
    return ids if ids and needed <= room.max_model_len else None


def transcript(work: Work, task: Task, output_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[Message]:
    """The turns of an answer as text: the policy's, each without its stop token, and the environment's between them."""
    if work.tokenizer is None:
        raise ModelError("turns need the policy's tokenizer")
    messages: list[Message] = []
    for start, stop in spans:
        if messages:
            messages.append({"role": "user", "content": work.environment.reply(task, messages) or ""})
        text = work.tokenizer.decode(output_ids[start:stop], stop_ids=output_ids[stop - 1 : stop])
        messages.append({"role": "assistant", "content": text})
    return messages


def _request(work: Work, game: _Game, turn: int) -> GenerationRequest:
    prompt = [*work.assignments[game.prompt_index].prompt_ids, *game.played.output_ids, *(game.reply or [])]
    return GenerationRequest(prompt, work.noise_seed(game.prompt_index, game.member + turn * work.group_size))


def _longer(played: Played, reply: Sequence[int], generation: Generation) -> Played:
    end = len(played.output_ids)
    start = end + len(reply)
    return replace(
        played,
        output_ids=[*played.output_ids, *reply, *generation.output_ids],
        logprobs=[*played.logprobs, *[0.0] * len(reply), *generation.logprobs],
        finish_reason=generation.finish_reason,
        proofs=[*played.proofs, *generation.proofs],
        turns=[*(played.turns or [0, end]), start, start + len(generation.output_ids)],
    )


def replay_fault(work: Work, manifest: Manifest, rollout: Rollout) -> str:
    """Why a rollout's turns are not those that the environment's replies make; empty if they are.

    Each turn by itself is checked elsewhere: it ends with its first stop token, or at the run's limit.
    """
    assignment, ids = work.assignments[rollout.prompt_index], rollout.output_ids
    spans = emitted_spans(len(ids), rollout.turns)
    for number, (_, stop) in enumerate(spans, start=1):
        reply = None
        if ids[stop - 1] in manifest.model.stop_ids:
            turns = [place for span in spans[:number] for place in span]
            reply = reply_ids(work, room_of(manifest), assignment, output_ids=ids[:stop], turns=turns)
        if number == len(spans):
            return "ends where the environment replies" if reply is not None else ""
        following = spans[number][0]
        if reply is None or ids[stop:following] != reply:
            return f"goes on after turn {number} with another reply than the environment's"
        if any(rollout.logprobs[stop:following]):
            return f"has log-probabilities for the reply to turn {number}"
    return ""
