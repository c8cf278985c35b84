"""A worker that draws and scores reasoning-gym tasks: `python -P -m environments.reasoning_gym_worker`.

A process of its own, because the package is large, draws with Python's hashes in places, and some of its generators and
scorers run for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from environments.worker_loop import serve

MEMORY_BYTES: Final = 2 << 30
CPU_S: Final = 5.0


def prepare() -> Callable[[Any], Any]:
    """Import reasoning-gym; requests are {task, config, seed}, with `text` to score an answer."""
    from reasoning_gym.factory import create_dataset

    def answer(request: Any) -> Any:
        dataset = create_dataset(request["task"], size=1, seed=request["seed"], **request["config"])
        entry = dataset[0]
        if "text" in request:
            return float(dataset.score_answer(request["text"], entry))
        return {"question": str(entry["question"]), "answer": str(entry["answer"])}

    return answer


if __name__ == "__main__":
    serve(prepare, memory_bytes=MEMORY_BYTES, cpu_s=CPU_S)
