"""What an environment is: tasks from a seed, rewards from a completion (INTELLECT-2, section 3.1).

Contributors and validators call the same code with the same seed, so both must be deterministic on every machine, and
`reward` must survive any text. docs/environments.md shows how to add one in one file. This module leaves out where
seeds come from (protocol.seeds) and how environments are found (environments.registry).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Final, TypedDict

from environments.allowance import Allowance
from protocol.errors import ConfigError, EnvironmentUnknown

_DIGEST_DOMAIN: Final = b"intellect-node environment\0"


class Message(TypedDict):
    """One turn of a prompt or of a transcript."""

    role: str
    content: str


@dataclass(frozen=True)
class Task:
    """A question and what is needed to judge an answer to it."""

    prompt: list[Message]
    data: dict[str, Any] = field(default_factory=dict)
    plain: bool = False
    """The prompt is a text to be continued: no chat template around it, whether the model has one or not."""

    @property
    def text(self) -> str:
        """The prompt for models without a chat template: the contents, one after another."""
        return "".join(message["content"] for message in self.prompt)


@dataclass(frozen=True)
class Reward:
    """A judged completion. `value` is None where the environment could not tell; that is nobody's fault.

    A time-out, a memory limit or a broken worker is "could not tell": the answer is dropped and counted, never scored.
    """

    value: float | None
    reason: str


RIGHT: Final = Reward(1.0, "right")
WRONG: Final = Reward(0.0, "wrong")


class Environment(ABC):
    """Where prompts and rewards come from. Mostly a dataclass: its fields are the parameters a recipe may set.

    Fields that begin with an underscore are the environment's own. An instance is used from one thread at a time.
    """

    name: ClassVar[str]
    """As in recipes and manifests."""
    version: ClassVar[int] = 1
    """Rises with every change that alters a task or a reward."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Distributions whose releases decide tasks or rewards; the digest covers their installed versions."""
    stop_texts: ClassVar[tuple[str, ...]] = ()
    """Texts of a single token each that end an answer, beside the model's own end tokens."""
    max_turns: ClassVar[int] = 1
    """Turns that a policy has at most; more than one where `reply` may answer it."""
    data_sha256: bytes = b""
    """Of the data file in use; empty without one."""
    repeatable: bool = True
    """Whether the same answer earns the same wherever and whenever it is judged. False where judging runs what a policy
    wrote: a program may ask for the time. Then nobody is called a liar for a reward that comes out otherwise."""
    allowance: Allowance | None = None
    """What the answers under way may cost together. What starts long work looks at it."""

    @abstractmethod
    def task(self, seed: bytes) -> Task:
        """The task of a 32-byte seed, the same on every machine."""

    @abstractmethod
    def reward(self, task: Task, completion: str) -> Reward:
        """Judge a completion, any text whatsoever. Never raises for what a policy wrote."""

    def rewards(self, pairs: Sequence[tuple[Task, str]]) -> list[Reward]:
        """Judge several completions, in order; worth overriding where they can be judged side by side."""
        return [self._within_allowance(task, completion) for task, completion in pairs]

    def _within_allowance(self, task: Task, completion: str) -> Reward:
        used_up = self.allowance.used_up if self.allowance is not None else ""
        return Reward(None, used_up) if used_up else self.reward(task, completion)

    def with_length_target(self, task: Task, target: int) -> Task:
        """The task with a wish for an answer of so many tokens in its prompt. Raises ConfigError where it has none.

        The paper's sentence for chat models (section 4.2), unless an environment has a form of its own.
        """
        *before, last = task.prompt
        wish = f"{last['content']} Think for {target} tokens before giving a response."
        return dataclasses.replace(task, prompt=[*before, {"role": last["role"], "content": wish}])

    def reply(self, task: Task, transcript: Sequence[Message]) -> str | None:
        """What is said to the last turn of a transcript (a tool's output, say), or None where the answer ends with it.

        The transcript is the policy's and this environment's turns after the prompt, the last one being the policy's.
        Deterministic and quick, as `reward` is, which then judges the last turn. The policy is not trained on replies,
        and whoever checks its work computes them again.
        """
        return None

    def import_data(self, source: Path) -> bytes:
        """What travels with the policy of an operator's data file: checked, in the form that `use_data` takes.

        Raises ConfigError that names the file and what is wrong with it, by line.
        """
        raise ConfigError(f"the environment {self.name} takes no data file", hint="remove environment.data")

    def use_data(self, data: bytes) -> None:
        """Take the data that travels with the policy, before the first task. Raises ConfigError for other bytes."""
        raise ConfigError(f"the environment {self.name} takes no data file", hint="remove environment.data")

    def allow(self, allowance: Allowance | None) -> None:
        """Set `allowance`, for whoever judges. It is no parameter, so it can be set in a frozen dataclass too."""
        object.__setattr__(self, "allowance", allowance)

    def require_machine(self) -> None:  # noqa: B027 - most environments need nothing
        """What start-up asks: whether this machine can judge. Raises an error of this program's that names the cure."""

    def close(self) -> None:  # noqa: B027 - most environments start nothing
        """End worker processes; the instance is not used again."""

    @property
    def parameters(self) -> dict[str, Any]:
        """What makes this instance differ from others of its class: plain JSON values."""
        if not dataclasses.is_dataclass(self):
            return {}
        public = [each.name for each in dataclasses.fields(self) if not each.name.startswith("_")]
        return {name: getattr(self, name) for name in public}

    @property
    def required_versions(self) -> dict[str, str]:
        """Installed versions of what `requires` names. Raises EnvironmentUnknown where one is missing."""
        return {name: _installed_version(name, needed_by=self.name) for name in self.requires}

    @property
    def digest(self) -> bytes:
        """SHA-256 over all that decides tasks and rewards: equal digests mean equal tasks and rewards."""
        return environment_digest(
            self.name,
            self.version,
            self.parameters,
            requires=self.required_versions,
            data_sha256=self.data_sha256,
            repeatable=self.repeatable,
        )


def environment_digest(
    name: str,
    version: int,
    parameters: Mapping[str, object],
    *,
    requires: Mapping[str, str] | None = None,
    data_sha256: bytes = b"",
    repeatable: bool = True,
) -> bytes:
    """SHA-256 that stands for an environment. Parameters must be plain JSON values."""
    fields: dict[str, object] = {"name": name, "version": version, "parameters": dict(parameters)}
    if requires:
        fields["requires"] = dict(requires)
    if data_sha256:
        fields["data"] = data_sha256.hex()
    if not repeatable:
        fields["repeatable"] = False
    return hashlib.sha256(_DIGEST_DOMAIN + json.dumps(fields, sort_keys=True).encode()).digest()


def user_message(content: str) -> list[Message]:
    """A prompt of one turn."""
    return [{"role": "user", "content": content}]


def _installed_version(distribution: str, *, needed_by: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError as error:
        raise EnvironmentUnknown(
            f"the environment {needed_by} needs the package {distribution}, which is not installed here",
            hint=f"pip install {distribution}",
        ) from error
