"""What an environment is: tasks from a seed, rewards from a completion (INTELLECT-2, section 3.1).

Contributors and validators call the same code with the same seed, so both functions must be deterministic on every
machine, and `reward` must survive any text. This module leaves out where seeds come from (protocol.seeds).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

_DIGEST_DOMAIN = b"intellect-node environment\0"


class Message(TypedDict):
    """One turn of a prompt."""

    role: str
    content: str


@dataclass(frozen=True)
class Task:
    """A question and what is needed to judge an answer to it."""

    prompt: list[Message]
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt for models without a chat template: the contents, one after another."""
        return "".join(message["content"] for message in self.prompt)


@dataclass(frozen=True)
class Reward:
    """A judged completion. `value` is None where the environment could not tell; that is nobody's fault."""

    value: float | None
    reason: str


class Environment(Protocol):
    """Where prompts and rewards come from."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int:
        """Rises with every change that alters a task or a reward."""

    @property
    def digest(self) -> bytes:
        """SHA-256 over name, version and parameters: equal digests mean equal tasks and rewards."""

    def task(self, seed: bytes) -> Task:
        """The task of a 32-byte seed, the same on every machine."""

    def reward(self, task: Task, completion: str) -> Reward:
        """Judge a completion, any text whatsoever. Never raises for what a policy wrote."""


def environment_digest(name: str, version: int, parameters: Mapping[str, object]) -> bytes:
    """SHA-256 that stands for an environment. Parameters must be plain JSON values."""
    fields = {"name": name, "version": version, "parameters": dict(parameters)}
    return hashlib.sha256(_DIGEST_DOMAIN + json.dumps(fields, sort_keys=True).encode()).digest()
