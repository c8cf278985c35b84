"""What a submission's seed makes a contributor answer: the tasks, their prompts as token ids, the noise of each answer.

The contributor and every validator derive the same from the manifest, the policy's tokenizer and the submission's own
fields. Leaves out the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from environments.base import Environment, Task
from environments.registry import open_environment
from node.engines.base import SamplingParams
from node.engines.model_check import check_model
from node.engines.pools import task_seed
from node.engines.tokenizer import Tokenizer
from protocol.lengths import length_penalty, length_target
from protocol.prompts import prompts_digest
from protocol.records import EnvironmentSpec, LengthSpec, Manifest
from protocol.seeds import prompt_seed, rollout_seed


@dataclass(frozen=True)
class Assignment:
    """One prompt of a submission."""

    task: Task
    prompt_ids: list[int]
    length_target: int | None = None
    """Output tokens that the prompt asks for, where the run asks for any."""


@dataclass(frozen=True)
class Work:
    """Everything that one submission must answer, group by group."""

    seed: bytes
    """protocol.seeds.submission_seed of the submission."""
    environment: Environment
    assignments: list[Assignment]
    group_size: int
    length: LengthSpec | None = None
    """How answers of another length than asked for lose reward."""
    tokenizer: Tokenizer | None = None
    """What replies to turns are encoded with; needed only where the environment has several."""

    def length_penalty(self, prompt_index: int, tokens: int) -> float:
        """What an answer of so many output tokens to a prompt loses of its task's reward."""
        target = self.assignments[prompt_index].length_target
        if self.length is None or target is None:
            return 0.0
        return length_penalty(self.length, target=target, tokens=tokens)

    @property
    def prompts_digest(self) -> bytes:
        """What the contributor signs for."""
        return prompts_digest(assignment.prompt_ids for assignment in self.assignments)

    def noise_seed(self, prompt_index: int, member: int) -> bytes:
        """Seed of the sampling noise of one answer."""
        return rollout_seed(self.seed, prompt_index, member)


def derive_work(manifest: Manifest, tokenizer: Tokenizer, *, seed: bytes, step: int | None = None) -> Work:
    """The prompts of a submission for a step; without one, from the whole environment whatever pools the run has.

    Raises EnvironmentUnknown, or ModelError for another tokenizer or pool than the run's.
    """
    check_model(tokenizer, manifest.model)
    environment = held_environment(manifest.environment, tokenizer.directory)
    prompts = [prompt_seed(seed, index) for index in range(manifest.rollout.prompts_per_submission)]
    assignments = [_assignment(manifest, tokenizer, environment, prompt=prompt, step=step) for prompt in prompts]
    return Work(seed, environment, assignments, manifest.rollout.group_size, manifest.rollout.length, tokenizer)


def _assignment(
    manifest: Manifest, tokenizer: Tokenizer, environment: Environment, *, prompt: bytes, step: int | None
) -> Assignment:
    drawn = prompt if step is None else task_seed(manifest.environment, tokenizer.directory, prompt=prompt, step=step)
    task, target = environment.task(drawn), None
    if manifest.rollout.length is not None:
        target = length_target(manifest.rollout.length, prompt)
        task = environment.with_length_target(task, target)
    return Assignment(task, prompt_ids(task, tokenizer), target)


def prompt_ids(task: Task, tokenizer: Tokenizer) -> list[int]:
    """A task's prompt as token ids: through the chat template unless it is a text to be continued."""
    return tokenizer.encode(task.text) if task.plain else tokenizer.encode_messages(task.prompt)


_held: dict[bytes, Environment] = {}


def held_environment(spec: EnvironmentSpec, policy_dir: Path) -> Environment:
    """The environment of a manifest, opened once in a process: it may hold worker processes and a data set."""
    key = msgspec.msgpack.encode(spec)
    for held in [other for other in _held if other != key]:
        _held.pop(held).close()
    if key not in _held:
        _held[key] = open_environment(spec, policy_dir)
    return _held[key]


def sampling_params(manifest: Manifest) -> SamplingParams:
    """How the run's manifest wants answers drawn and proved."""
    return SamplingParams(
        temperature=manifest.rollout.temperature,
        max_new_tokens=manifest.rollout.max_new_tokens,
        stop_ids=manifest.model.stop_ids,
        top_k_proof=manifest.toploc.top_k,
    )
