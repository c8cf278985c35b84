"""A worker that draws and scores tasks of a `verifiers` taskset: run by the interpreter that has that package.

Given TASKSET, TASKS and CONFIG as arguments. The package brings a hundred others, some in releases that this program
does not take, and a taskset is anybody's code: hence an interpreter and a process of their own.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, Final

from environments.worker_loop import serve

MEMORY_BYTES: Final = 8 << 30
CPU_S: Final = 10.0


def prepare() -> Callable[[Any], Any]:
    """Load the taskset; requests are {"versions"}, {"task": number} and {"task": number, "text": completion}."""
    import anyio
    import verifiers.v1 as vf

    name, count, config = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    taskset = vf.load_taskset(vf.taskset_config_type(name).model_validate({**config, "id": name}))
    tasks = list(itertools.islice(taskset, count))
    if not tasks:
        raise ValueError(f"the taskset {name} has no tasks")

    def answer(request: Any) -> Any:
        if "versions" in request:
            return {"tasks": len(tasks), "versions": _versions(name)}
        task = tasks[request["task"]]
        if task.plugged_judges():
            raise ValueError("judged by a model, which no two nodes repeat")
        if "text" not in request:
            return {"messages": _messages(task.data)}
        return anyio.run(_score, vf, task, request["text"])

    return answer


def _versions(taskset: str) -> dict[str, str]:
    """Releases of the package and of the distribution that brings the taskset's module."""
    module = taskset.rpartition("/")[2].replace("-", "_").partition(".")[0]
    names = {"verifiers", *metadata.packages_distributions().get(module, [])}
    return {name: metadata.version(name) for name in names}


def _messages(data: Any) -> list[dict[str, str]]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    messages = [(message.role, message.content) for message in data.prompt or []]
    if not messages or not all(isinstance(content, str) for _, content in messages):
        raise ValueError("its prompt is not all text")
    return [*system, *({"role": role, "content": content} for role, content in messages)]


async def _score(vf: Any, task: Any, text: str) -> Any:
    """Weighed sum of the task's rewards that need no runtime; None where there is none, or one failed."""
    node = vf.graph.MessageNode(message=vf.AssistantMessage(content=text), sampled=True)
    trace = vf.Trace.model_construct(nodes=[node], rewards={}, metrics={}, info={}, root_reply=text, errors=[])
    await task.score(trace, None)
    if trace.errors or not trace.rewards:
        return None
    return float(sum(reward.score * reward.weight for reward in trace.rewards.values()))


def main() -> None:
    """Answer requests until there are no more."""
    serve(prepare, memory_bytes=MEMORY_BYTES, cpu_s=CPU_S, confined=False)
