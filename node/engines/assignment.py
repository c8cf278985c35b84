"""What a submission's seed makes a contributor answer: the tasks, their prompts as token ids, the noise of each answer.

The contributor and every validator derive the same from the manifest, the policy's tokenizer and the submission's own
fields. Leaves out the answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from environments.base import Environment, Task
from environments.registry import get_environment
from node.engines.base import SamplingParams
from node.engines.tokenizer import Tokenizer
from protocol.errors import ModelError
from protocol.prompts import prompts_digest
from protocol.records import Manifest
from protocol.seeds import prompt_seed, rollout_seed


@dataclass(frozen=True)
class Assignment:
    """One prompt of a submission."""

    task: Task
    prompt_ids: list[int]


@dataclass(frozen=True)
class Work:
    """Everything that one submission must answer, group by group."""

    seed: bytes
    """protocol.seeds.submission_seed of the submission."""
    environment: Environment
    assignments: list[Assignment]
    group_size: int

    @property
    def prompts_digest(self) -> bytes:
        """What the contributor signs for."""
        return prompts_digest(assignment.prompt_ids for assignment in self.assignments)

    def noise_seed(self, prompt_index: int, member: int) -> bytes:
        """Seed of the sampling noise of one answer."""
        return rollout_seed(self.seed, prompt_index, member)


def derive_work(manifest: Manifest, tokenizer: Tokenizer, *, seed: bytes) -> Work:
    """The prompts of a submission. Raises EnvironmentUnknown, or ModelError for another tokenizer than the run's."""
    if tokenizer.sha256 != manifest.model.tokenizer:
        raise ModelError(
            "the checkpoint's tokenizer.json is not the one that the run's manifest names",
            hint="remove the checkpoint from the data directory and let the node fetch it again",
        )
    environment = get_environment(manifest.environment.name, digest=manifest.environment.digest)
    tasks = [environment.task(prompt_seed(seed, index)) for index in range(manifest.rollout.prompts_per_submission)]
    assignments = [Assignment(task, tokenizer.encode_messages(task.prompt)) for task in tasks]
    return Work(seed, environment, assignments, manifest.rollout.group_size)


def sampling_params(manifest: Manifest) -> SamplingParams:
    """How the run's manifest wants answers drawn and proved."""
    return SamplingParams(
        temperature=manifest.rollout.temperature,
        max_new_tokens=manifest.rollout.max_new_tokens,
        stop_ids=manifest.model.stop_ids,
        top_k_proof=manifest.toploc.top_k,
    )
