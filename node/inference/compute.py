"""The compute process of an inference node: answers what a submission's seed asks and writes the rollout file.

Knows nothing of the network: it is handed a policy's directory and the fields that make a seed, and gives back a file
and its numbers (INTELLECT-2, section 2.3.3). `RolloutWorker` is a class of small steps so that each can be replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from node.compute.serve import serve
from node.engines.assignment import Work, derive_work, sampling_params
from node.engines.base import Engine, Generation, GenerationRequest, SamplingParams, TokenProgress
from node.engines.capacity import fitted_from_environment
from node.engines.registry import engine_from_environment
from node.engines.rewards import answer_rewards, claimed_rewards
from node.engines.tokenizer import Tokenizer
from node.engines.turns import play_turns, turns_of
from node.inference.self_test import self_test
from protocol.errors import MalformedError, ModelError
from protocol.records import Manifest
from protocol.rollouts import Rollout, mean_reward, told_rewards, write_rollouts
from protocol.seeds import submission_seed

_PROGRESS_EVERY_S: Final = 0.5

_log = logging.getLogger(__name__)


class RolloutWorker:
    """Generates submissions with one policy at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._fitted = fitted_from_environment(engine)
        self._checkpoint = b""
        self._tokenizer: Tokenizer | None = None

    def load(self, checkpoint_dir: str, checkpoint_id: bytes, ran_out: bool = False) -> dict[str, Any]:
        """Hold the policy of a checkpoint instead of the last one, which stays where this raises ModelError.

        `ran_out` says that the process before this one died of memory.
        """
        started = time.monotonic()
        directory = self.policy_dir(Path(checkpoint_dir))
        tokenizer = Tokenizer(directory)
        self.engine.update(directory)
        self._fitted.loaded(directory, ran_out=ran_out)
        self._checkpoint, self._tokenizer = checkpoint_id, tokenizer
        seconds = time.monotonic() - started
        _log.info("policy loaded checkpoint=%s seconds=%.2f", checkpoint_id.hex()[:12], seconds)
        return {
            "engine": self._engine_name(),
            "dtype": self.engine.info.dtype,
            "batch": self.engine.max_batch,
            "seconds": seconds,
        }

    def generate(
        self,
        run_id: bytes,
        step: int,
        checkpoint: bytes,
        contributor: bytes,
        index: int,
        manifest: bytes,
        path: str,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Answer one submission and write its file to `path`. `manifest` is the record, as msgpack.

        Gives sha256, size, rollouts, output_tokens, prompts (their digest), mean_reward, could_not_tell (answers
        without a reward), engine, dtype, seconds; reports output_tokens as they come. Raises ModelError,
        EnvironmentUnknown, MalformedError.
        """
        started = time.monotonic()
        run = _decode_manifest(manifest)
        seed = submission_seed(run_id, step, checkpoint=checkpoint, contributor_key=contributor, index=index)
        work = derive_work(run, self._tokenizer_of(checkpoint), seed=seed, step=step)
        sampling = self.sampling(run)
        generations = self.answers(work, sampling, progress=_throttled(progress))
        generations = play_turns(work, run, generations, lambda requests: self.engine.generate(requests, sampling))
        rollouts = self.rollouts(work, generations)
        sha256, size = write_rollouts(Path(path), rollouts)
        return {
            "sha256": sha256,
            "size": size,
            "rollouts": len(rollouts),
            "output_tokens": sum(len(rollout.output_ids) for rollout in rollouts),
            "prompts": work.prompts_digest,
            "mean_reward": mean_reward(rollouts),
            "could_not_tell": len(rollouts) - len(told_rewards(rollouts)),
            "engine": self._engine_name(),
            "dtype": self.engine.info.dtype,
            "seconds": time.monotonic() - started,
        }

    def self_test(self, manifest: bytes) -> dict[str, Any]:
        """Whether what this engine generates holds against its own pass (node.inference.self_test)."""
        if self._tokenizer is None:
            raise ModelError("no policy is loaded, so nothing can be generated")
        return self_test(self.engine, self._tokenizer, _decode_manifest(manifest))

    def policy_dir(self, checkpoint_dir: Path) -> Path:
        """Where the weights to generate with lie."""
        return checkpoint_dir

    def sampling(self, manifest: Manifest) -> SamplingParams:
        """How answers are drawn."""
        return sampling_params(manifest)

    def requests(self, work: Work) -> list[GenerationRequest]:
        """What the engine is asked: each prompt once per member of its group, group by group."""
        return [
            GenerationRequest(assignment.prompt_ids, work.noise_seed(prompt_index, member))
            for prompt_index, assignment in enumerate(work.assignments)
            for member in range(work.group_size)
        ]

    def answers(
        self, work: Work, sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> list[Generation]:
        """The engine's answers to `requests`, in the same order."""
        with self._fitted.watched():
            return self.engine.generate(self.requests(work), sampling, progress=progress)

    def rollouts(self, work: Work, generations: Sequence[Generation]) -> list[Rollout]:
        """The rows of the file: answers with their rewards."""
        rewards = self.rewards(work, generations)
        return [
            Rollout(
                prompt_index=number // work.group_size,
                member=number % work.group_size,
                prompt_ids=work.assignments[number // work.group_size].prompt_ids,
                output_ids=generation.output_ids,
                logprobs=generation.logprobs,
                reward=rewards[number],
                finish_reason=generation.finish_reason,
                proofs=generation.proofs,
                turns=turns_of(generation),
            )
            for number, generation in enumerate(generations)
        ]

    def rewards(self, work: Work, generations: Sequence[Generation]) -> list[float]:
        """The rewards of the answers to `requests`; NaN where the environment cannot tell."""
        answers = [(number // work.group_size, generation) for number, generation in enumerate(generations)]
        return claimed_rewards(work, self._tokenizer_of(self._checkpoint), answers)

    def reward(self, work: Work, prompt_index: int, generation: Generation) -> float:
        """The reward of one answer."""
        return answer_rewards(work, self._tokenizer_of(self._checkpoint), [(prompt_index, generation)])[0]

    def _tokenizer_of(self, checkpoint: bytes) -> Tokenizer:
        if self._tokenizer is None or self._checkpoint != checkpoint:
            held = self._checkpoint.hex()[:12] or "none"
            raise ModelError(f"the policy {checkpoint.hex()[:12]} is not loaded; held is {held}")
        return self._tokenizer

    def _engine_name(self) -> str:
        return f"{self.engine.info.name} {self.engine.info.version}"


def _decode_manifest(data: bytes) -> Manifest:
    try:
        return msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedError(f"not a valid manifest: {str(error)[:200]}") from error


def _throttled(progress: Callable[[dict[str, Any]], None] | None) -> TokenProgress | None:
    if progress is None:
        return None
    last = time.monotonic()

    def report(tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_EVERY_S:
            last = time.monotonic()
            progress({"output_tokens": tokens})

    return report


def run_worker(worker: RolloutWorker) -> None:
    """Answer the node's calls with this worker until the node is gone."""
    serve({"load": worker.load, "generate": worker.generate, "self_test": worker.self_test})


def main() -> None:
    run_worker(RolloutWorker(engine_from_environment()))


if __name__ == "__main__":
    main()
