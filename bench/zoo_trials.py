"""Trying one cheat after another in a court of its own, and honest contributors beside them (bench.zoo shows it)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.court import Court, HandedIn, Single, Trial, open_court, reading
from node.compute.reader import RolloutReader
from node.engines.torch_engine import TorchEngine
from node.inference.compute import RolloutWorker
from protocol.identity import Identity
from protocol.rollouts import Rollout, read_rollouts
from simnet.cheats import CHEATS, FILES, ROLES, WEIGHTS
from simnet.zoo.compute import WORKERS
from simnet.zoo.roles import CANDIDATES
from trainer.recipe import Recipe

SURELY: Final = 0.999
HISTORIES: Final = 4
_Z: Final = 1.645
"""Of the normal distribution: 95 % lie below."""
OTHER_DRAWS: Final = ("other-temperature", "other-seed", "best-of-n", "draft-model")


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    seeds: int
    """Contributors of each cheat; each hands in a first lie."""
    history: int
    """Submissions that a contributor hands in at most, while nothing stops it; so do the first HISTORIES of a cheat."""
    honest: int
    """Submissions of each honest control."""
    names: Sequence[str] = tuple(CHEATS)


@dataclass
class Finding:
    """What is known of one cheat, or of an honest control."""

    first: list[Trial] = field(default_factory=list)
    """What became of each contributor's first lie; of an honest one's submissions."""
    singles: list[Single] = field(default_factory=list)
    """Rollouts one by one: those that an honest worker would not have handed in."""
    lasted: list[int | None] = field(default_factory=list)
    """Where the first lie passed: rollouts until one did not; None if none was stopped."""

    @property
    def per_submission(self) -> float:
        return sum(not trial.accepted for trial in self.first) / len(self.first)

    @property
    def per_rollout(self) -> float | None:
        return sum(one.caught for one in self.singles) / len(self.singles) if self.singles else None

    @property
    def evicting(self) -> float:
        """Share of the first lies after which the contributor is out."""
        return sum(trial.hard for trial in self.first) / len(self.first)

    @property
    def caught_by(self) -> str:
        """Where and by what most first lies were stopped; where none was, whether the history stops it."""
        counts = Counter(trial.caught_by for trial in self.first if not trial.accepted)
        if counts:
            return counts.most_common(1)[0][0]
        return "history" if any(self.lasted) else "nothing"

    @property
    def rollouts_needed(self) -> float | None:
        """Until one is rejected with probability SURELY, by single rollouts or as the history showed; None: never."""
        if self.per_rollout:
            return tries_needed(sum(one.caught for one in self.singles), len(self.singles))
        stopped = [count for count in self.lasted if count is not None]
        return float(max(stopped)) if stopped and len(stopped) == len(self.lasted) else None

    @property
    def tokens_needed(self) -> float | None:
        """The same in output tokens, where single rollouts tell."""
        if not self.per_rollout or self.rollouts_needed is None:
            return None
        return math.ceil(self.rollouts_needed * sum(one.tokens for one in self.singles) / len(self.singles))


def tries_needed(caught: int, tried: int) -> float:
    """Tries until one is caught with probability SURELY, where `caught` > 0 of `tried` were.

    Counts with the least rate that these numbers allow with 95 % confidence (Wilson 1927): few trials prove little.
    """
    rate, spread = caught / tried, _Z**2 / tried
    least = (rate + spread / 2 - math.sqrt(spread * (rate * (1 - rate) + spread / 4))) / (1 + spread)
    return float(max(1, math.ceil(math.log(1 - SURELY) / math.log1p(-least))))


@dataclass(frozen=True)
class Stand:
    """One contributor before a court."""

    court: Court
    identity: Identity
    directory: Path
    seed: int = 0

    def cheat(self, name: str) -> RolloutWorker:
        """A cheating worker with the newest policy; the one that keeps old ones is given them all."""
        worker = WORKERS[name](TorchEngine(), seed=self.seed, directory=self.directory / "cheat")
        oldest = 0 if name == "stale-checkpoint" else self.court.step
        for step in range(oldest, self.court.step + 1):
            worker.load(str(self.court.policies[step]), self.court.checkpoint(step))
        return worker

    def honest(self, *, step: int | None = None, dtype: str = "float32", max_batch: int = 64) -> RolloutWorker:
        """An honest worker with the policy of a step, or the newest."""
        step = self.court.step if step is None else step
        worker = RolloutWorker(TorchEngine(dtype=dtype, max_batch=max_batch))
        worker.load(str(self.court.policies[step]), self.court.checkpoint(step))
        return worker

    def make(self, worker: RolloutWorker, *, index: int, step: int | None = None) -> HandedIn:
        """Have a submission computed, and sign it."""
        step = self.court.step if step is None else step
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{index}-{step}.parquet"
        made = worker.generate(
            run_id=self.court.manifest.id,
            step=self.court.step,
            checkpoint=self.court.checkpoint(step),
            contributor=self.identity.peer_id.public_key,
            index=index,
            manifest=msgspec.msgpack.encode(self.court.manifest.record),
            path=str(path),
        )
        return self.court.sign(made, path, by=self.identity, index=index, policy=step)

    async def hand_in(self, worker: RolloutWorker, *, index: int) -> Trial:
        return await self.court.try_submission(self.make(worker, index=index))

    def rows(self, handed_in: HandedIn) -> list[Rollout]:
        """What lies in a file of our own."""
        run = self.court.manifest.record
        return read_rollouts(
            handed_in.path, max_rollouts=run.rollouts_per_submission, max_tokens=run.model.max_model_len
        )

    def mean_reward(self, handed_in: HandedIn) -> float:
        return sum(row.reward for row in self.rows(handed_in))


async def ground_index(stand: Stand) -> Trial:
    worker = stand.honest()
    made = [stand.make(worker, index=index) for index in range(1, 1 + CANDIDATES)]
    return await stand.court.try_submission(max(made, key=stand.mean_reward))


async def ground_checkpoint(stand: Stand) -> Trial:
    steps = range(stand.court.step + 1)
    made = [stand.make(stand.honest(step=step), index=0, step=step) for step in steps]
    return await stand.court.try_submission(max(made, key=stand.mean_reward))


async def copied_file(stand: Stand) -> Trial:
    victim = Stand(stand.court, Identity.from_phrase(f"victim {stand.directory}"), stand.directory)
    theirs = victim.make(victim.honest(), index=0)
    await stand.court.try_submission(theirs)
    fields = msgspec.to_builtins(theirs.submission.record, builtin_types=(bytes,))
    copied = stand.court.sign(fields, theirs.path, by=stand.identity, index=0, policy=stand.court.step)
    return await stand.court.try_submission(copied)


async def two_nodes(stand: Stand) -> Trial:
    """They hand in at two relays, of which neither knows what the other has."""
    first, second = (stand.make(stand.honest(), index=0) for _ in range(2))
    await stand.court.try_submission(first, relay=0)
    return await stand.court.try_submission(second, relay=1)


SCRIPTS: Final[dict[str, Callable[[Stand], Awaitable[Trial]]]] = {
    "ground-index": ground_index,
    "ground-checkpoint": ground_checkpoint,
    "copied-file": copied_file,
    "two-nodes-one-key": two_nodes,
}
"""What simnet.zoo.roles does among nodes, in one process."""


class Zoo:
    """Runs the cheats of a plan against a recipe's run of some policies."""

    def __init__(self, recipe: Recipe, policies: Sequence[Path], plan: Plan, *, directory: Path) -> None:
        self.recipe = recipe
        self._policies = policies
        self._plan = plan
        self._directory = directory

    async def run(self) -> tuple[dict[str, Finding], dict[str, Finding]]:
        """What is found of every cheat, and of the honest controls."""
        async with reading(self._directory / "reader.log") as reader:
            found = {name: await self._cheat(name, reader) for name in self._plan.names}
            honest = {
                f"honest {dtype}, batch {max_batch}": await self._honest(reader, dtype, max_batch=max_batch)
                for dtype, max_batch in (("float32", 64), ("float32", 8), ("float32", 1), ("bfloat16", 8))
            }
        return found, honest

    def _court(self, label: str, reader: RolloutReader) -> AbstractAsyncContextManager[Court]:
        directory = self._directory / label
        directory.mkdir(parents=True)
        return open_court(self.recipe, self._policies, directory, reader=reader)

    async def _cheat(self, name: str, reader: RolloutReader) -> Finding:
        finding = Finding()
        async with self._court(name, reader) as court:
            for seed in range(self._plan.seeds):
                identity = Identity.from_phrase(f"{name} {seed}")
                stand = Stand(court, identity, self._directory / name / str(seed), seed)
                if name in ROLES:
                    finding.first.append(await SCRIPTS[name](stand))
                else:
                    await self._try_worker(name, stand, finding)
        return finding

    async def _try_worker(self, name: str, stand: Stand, finding: Finding) -> None:
        worker = stand.cheat(name)
        begin = 1 if name == "replayed-file" else 0  # its first file is honest
        for index in range(begin):
            await stand.hand_in(worker, index=index)
        made = stand.make(worker, index=begin)
        finding.first.append(await stand.court.try_submission(made))
        if name not in FILES:
            self._look_at_each(name, stand, made, finding)
        if finding.first[-1].accepted and len(finding.lasted) < HISTORIES:
            finding.lasted.append(await self._go_on(worker, stand, index=begin + 1))

    def _look_at_each(self, name: str, stand: Stand, made: HandedIn, finding: Finding) -> None:
        rows = stand.rows(made)
        singles = stand.court.judge_singly(made, rows)
        if name not in WEIGHTS:  # those cannot be right even by chance
            due = stand.rows(stand.make(stand.honest(), index=made.submission.record.index))
            singles = [one for one, *pair in zip(singles, rows, due, strict=True) if _is_lie(name, *pair)]
        finding.singles += singles

    async def _go_on(self, worker: RolloutWorker, stand: Stand, *, index: int) -> int | None:
        """Hand in until one is not taken; after how many rollouts that was."""
        for number in range(index, self._plan.history):
            trial = await stand.hand_in(worker, index=number)
            if not trial.accepted:
                return (number + 1) * self.recipe.rollouts_per_submission
        return None

    async def _honest(self, reader: RolloutReader, dtype: str, *, max_batch: int) -> Finding:
        finding = Finding()
        label = f"honest-{dtype}-{max_batch}"
        async with self._court(label, reader) as court:
            stand = Stand(court, Identity.from_phrase(label), self._directory / label / "0")
            worker = stand.honest(dtype=dtype, max_batch=max_batch)
            for index in range(self._plan.honest):
                finding.first.append(await stand.hand_in(worker, index=index))
        return finding


def _is_lie(name: str, row: Rollout, due: Rollout) -> bool:
    """Other draws that give the tokens that were due are none; their numbers differ by rounding alone."""
    same = row.output_ids == due.output_ids if name in OTHER_DRAWS else row == due
    return not same


def figures(found: dict[str, Finding]) -> dict[str, float]:
    """By cheat: the share of first submissions and of single rollouts that are caught."""
    rows: dict[str, Any] = {}
    for name, finding in found.items():
        key = name.replace("-", "_")
        rows[f"{key}_submissions"] = finding.per_submission
        rows[f"{key}_rollouts"] = finding.per_rollout
        rows[f"{key}_tokens_needed"] = finding.tokens_needed
    return {name: value for name, value in rows.items() if value is not None}
