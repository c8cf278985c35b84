"""Whether this machine can judge the answers of a run: what `Environment.require_machine` says, before any work.

Start-up asks as soon as it knows the run, and refuses; `doctor` asks the same. An environment of another's package is
asked in a process of its own, as its code runs nowhere else either but in compute processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import msgspec
import trio

from environments.registry import BUILT_IN, construct, providers
from protocol.errors import NodeError, SandboxError
from protocol.records import EnvironmentSpec

ASK_TIMEOUT_S: Final = 120.0


async def require_machine(spec: EnvironmentSpec) -> None:
    """Raises SandboxError whose hint is what to do here."""
    fault = await trio.to_thread.run_sync(machine_fault, spec)
    if fault is not None:
        raise fault


def machine_fault(spec: EnvironmentSpec) -> SandboxError | None:
    """What this machine lacks. None also for an environment that is missing or another: that is said elsewhere."""
    return _ask(spec) if spec.name in BUILT_IN else _ask_in_a_process(spec)


def _ask(spec: EnvironmentSpec) -> SandboxError | None:
    provider = providers().get(spec.name)
    if provider is None:
        return None
    try:
        environment = construct(provider.load(), spec.parameters)
    except NodeError:
        return None
    try:
        environment.require_machine()
    except NodeError as error:
        return SandboxError(
            f"this machine cannot judge answers of this run's environment {spec.name!r}: {error.message}",
            hint=error.hint,
        )
    finally:
        environment.close()
    return None


def _ask_in_a_process(spec: EnvironmentSpec) -> SandboxError | None:
    if spec.name not in providers():
        return None
    command = [sys.executable, "-m", "node.machine_check"]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(spec), capture_output=True, timeout=ASK_TIMEOUT_S, check=True
        )
        said = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return SandboxError(
            f"this run's environment {spec.name!r} does not say whether this machine can judge: {type(error).__name__}",
            hint=f"try it: intellect-node env try {spec.name}",
        )
    return SandboxError(said[0], hint=said[1]) if said else None


def main() -> None:
    """In that process: a specification in, [message, hint] or null out."""
    fault = _ask(msgspec.json.decode(sys.stdin.buffer.read(), type=EnvironmentSpec))
    sys.stdout.write(json.dumps([fault.message, fault.hint] if fault else None) + "\n")


if __name__ == "__main__":
    main()
