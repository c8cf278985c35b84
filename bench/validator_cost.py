"""Seconds of checking for each second of generating: the demo's policy, and a Llama-shaped one of 135 million.

All in CPU seconds of one process with one thread. `…_full_ratio` is a submission that is checked in full: every one of
a newcomer, or after a rejection. `…_steady_ratio` is what a contributor with a long record costs: the cheap checks
always, a full one as often as the floor of the demo's manifest says. Only the steady ratio has a goal.

The demo's figures are whole submissions, from the seed to the file and from the file to the verdict. The large policy
has random weights, prompts of 32 tokens, answers of 128 and no end token; 1, 4 or 8 answers at a time are what a
contributor without an accelerator generates. Its cheap checks are those of the answers; it has no task and no rewards.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from bench.harness import Result
from environments.registry import get_environment
from node.engines.assignment import Assignment, Work
from node.engines.base import GenerationRequest, SamplingParams
from node.engines.torch_engine import TorchEngine
from node.inference.compute import RolloutWorker
from node.run_create import manifest_from_recipe, model_directory
from node.validator.checks import check_logprobs, check_sampling, check_toploc, decode_rollouts
from node.validator.compute import Judge
from node.validator.measure import Measurer
from node.validator.screening import Screen, check_cheaply
from protocol.identity import Identity
from protocol.records import Manifest, Submission, Tolerance
from protocol.rollouts import Rollout, read_rollouts
from protocol.seeds import rollout_seed
from trainer.recipe import load_recipe

GOAL: Final = 0.25
CHECKPOINT: Final = bytes(32)
SHAPE: Final = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
"""SmolLM2-135M's."""
QUICK_SHAPE: Final = SHAPE | {"num_hidden_layers": 2, "vocab_size": 4096}
PROMPT_TOKENS: Final = 32
TOP_K: Final = 128
_SHAPES: Final = ("demo", "large_1", "large_4", "large_8")


def bench(*, quick: bool) -> Result:
    """Generate and check, and compare the times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as directory:
            figures = _demo(Path(directory), submissions=2 if quick else 40)
            figures |= _large(Path(directory) / "large", quick=quick)
    finally:
        torch.set_num_threads(before)
    for name in _SHAPES:
        _add_ratios(figures, name, floor=load_recipe("demo").checks.floor)
    result = Result(figures)
    for name in _SHAPES:
        result.at_most(f"{name}_steady_ratio", GOAL)
    return result


def _add_ratios(figures: dict[str, float], name: str, *, floor: float) -> None:
    """From what generating, the cheap checks and the costly ones take, each in ms."""
    cheap, full, generate = (figures[f"{name}_{part}_ms"] for part in ("cheap", "full", "generate"))
    figures[f"{name}_full_ratio"] = (cheap + full) / generate
    figures[f"{name}_steady_ratio"] = (cheap + floor * full) / generate


def _demo(directory: Path, *, submissions: int) -> dict[str, float]:
    policy = model_directory("sort-digits")
    manifest = demo_manifest(policy)
    worker, judge, screen = RolloutWorker(TorchEngine()), Judge(TorchEngine), Screen()
    worker.load(str(policy), CHECKPOINT)
    judge.load(str(policy), CHECKPOINT)
    calls = []
    for index in range(submissions + 1):  # the first one warms up
        path = directory / f"{index}.parquet"
        started = time.process_time()
        made = worker.generate(**_seed(index), manifest=msgspec.msgpack.encode(manifest), path=str(path))
        generated = time.process_time()
        rows = read_rollouts(path, max_rollouts=manifest.rollouts_per_submission, max_tokens=256)
        claim = _claim(manifest, made, index, rows)
        screened = screen.screen(policy_dir=str(policy), rewards=True, **claim)
        screening = time.process_time()
        judged = judge.judge(**claim)
        done = time.process_time()
        for found in (screened, judged):
            if found["outcome"] != "accept":
                raise RuntimeError(f"an honest submission was not accepted: {found['reason']}")
        calls.append((generated - started, screening - generated, done - screening))
    means = [1000 * sum(times) / submissions for times in zip(*calls[1:], strict=True)]
    return {f"demo_{part}_ms": mean for part, mean in zip(("generate", "cheap", "full"), means, strict=True)}


def _claim(manifest: Manifest, made: dict[str, Any], index: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What the screening and the compute process are handed."""
    record = _submission(made, index)
    return {
        "submission": msgspec.msgpack.encode(record),
        "manifest": msgspec.msgpack.encode(manifest),
        "run_id": bytes(32),
        "contributor": bytes(32),
        "rollouts": _rows(rollouts),
    }


def _submission(made: Mapping[str, Any], index: int) -> Submission:
    fields = {
        name: made[name] for name in ("sha256", "size", "rollouts", "output_tokens", "prompts", "engine", "dtype")
    }
    return Submission(
        run_id=bytes(32), step=0, index=index, checkpoint_step=0, checkpoint=CHECKPOINT, software="", issued_at_ms=0,
        **fields,
    )  # fmt: skip


def _rows(rollouts: Sequence[Rollout]) -> list[Any]:
    return [msgspec.to_builtins(rollout, builtin_types=(bytes,)) for rollout in rollouts]


def _seed(index: int) -> dict[str, Any]:
    return {"run_id": bytes(32), "step": 0, "checkpoint": CHECKPOINT, "contributor": bytes(32), "index": index}


def demo_manifest(policy: Path) -> Manifest:
    """The demo recipe's manifest, of an operator of no importance."""
    peer = Identity.from_phrase("bench").peer_id
    recipe = load_recipe("demo")
    return manifest_from_recipe(
        recipe, policy, trainer=peer, validators=[peer], name="bench", issued_at_ms=0, recipe_digest=bytes(32)
    )


def _large(directory: Path, *, quick: bool) -> dict[str, float]:
    parameters = write_random_policy(directory, QUICK_SHAPE if quick else SHAPE)
    engine = TorchEngine()
    engine.load(directory)
    figures = {"large_parameters": float(parameters)}
    for batch in (1, 4, 8):
        times = _generate_and_check(engine, answers=batch, tokens=8 if quick else 128)
        figures |= {f"large_{batch}_{part}_ms": 1000 * seconds for part, seconds in times.items()}
    return figures


def _generate_and_check(engine: TorchEngine, *, answers: int, tokens: int) -> dict[str, float]:
    """One group: the same prompt, `answers` answers of `tokens` tokens."""
    prompt = np.random.default_rng(0).integers(3, engine.info.vocab_size, PROMPT_TOKENS).tolist()
    requests = [GenerationRequest(prompt, rollout_seed(bytes(32), 0, member)) for member in range(answers)]
    started = time.process_time()
    made = engine.generate(requests, SamplingParams(1.0, tokens, (), TOP_K))
    generate_s = time.process_time() - started
    rollouts = [
        Rollout(
            prompt_index=0, member=member, prompt_ids=prompt, output_ids=one.output_ids, logprobs=one.logprobs,
            reward=0.0, finish_reason=one.finish_reason, proofs=one.proofs,
        )
        for member, one in enumerate(made)
    ]  # fmt: skip
    times = {"generate": generate_s, "cheap": _screen_s(engine, rollouts)} | _check_s(engine, rollouts)
    return times | {"full": times["prefill"] + times["compare"]}


def _screen_s(engine: TorchEngine, rollouts: Sequence[Rollout]) -> float:
    """Seconds of decoding the answers and of everything that a look at them tells."""
    demo, prompt, rows = demo_manifest(model_directory("sort-digits")), rollouts[0].prompt_ids, _rows(rollouts)
    count, tokens = len(rollouts), len(rollouts[0].output_ids)
    shape = msgspec.structs.replace(
        demo.rollout, group_size=count, prompts_per_submission=1, max_new_tokens=tokens, temperature=1.0
    )
    model = msgspec.structs.replace(demo.model, vocab_size=engine.info.vocab_size, stop_ids=())
    toploc = msgspec.structs.replace(demo.toploc, top_k=TOP_K)
    run = msgspec.structs.replace(demo, rollout=shape, model=model, toploc=toploc)
    environment = get_environment(run.environment.name)
    work = Work(bytes(32), environment, [Assignment(environment.task(bytes(32)), prompt)], count)
    made = {"sha256": bytes(32), "size": 1, "engine": "", "dtype": engine.info.dtype, "prompts": work.prompts_digest}
    record = _submission(made | {"rollouts": count, "output_tokens": count * tokens}, 0)
    started = time.process_time()
    decision = check_cheaply(
        [], decode_rollouts(rows), work, record=record, run=run, hidden_size=engine.info.hidden_size
    )
    elapsed_s = time.process_time() - started
    if decision.outcome != "accept":
        raise RuntimeError(f"an honest group did not pass the cheap checks: {decision.reason}")
    return elapsed_s


def _check_s(engine: TorchEngine, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Seconds of the policy's pass, and of everything that is compared with it (the output layer included)."""
    measurer = Measurer(
        rollouts,
        lambda prompt, member: rollout_seed(bytes(32), prompt, member),
        temperature=1.0,
        top_k=TOP_K,
        vocab_size=engine.info.vocab_size,
    )
    started = time.process_time()
    prefills = list(engine.prefill([(rollout.prompt_ids, rollout.output_ids) for rollout in rollouts]))
    prefill_s = time.process_time() - started
    for prefill in prefills:
        measurer.add(prefill)
    measured = measurer.results()
    for check in (check_toploc, check_sampling, check_logprobs):
        if check(measured, _LENIENT).result.outcome != "pass":
            raise RuntimeError("an honest group did not pass its checks")
    return {"prefill": prefill_s, "compare": time.process_time() - started - prefill_s}


_LENIENT: Final = Tolerance(
    max_exponent_mismatches=2, max_mantissa_mean=0.1, max_mantissa_median=0.0, max_rollout_mantissa_mean=0.1,
    max_margin=1e-3, max_mean_margin=1e-4, max_logprob_error=1e-3, max_mean_logprob_error=1e-3, max_logprob_shift=1e-3,
    honest_margin=1e-5, honest_mantissa=0.01, honest_logprob_shift=1e-3,
)  # fmt: skip


def write_random_policy(directory: Path, shape: dict[str, Any]) -> int:
    """Write a Llama-shaped policy with random weights; how many parameters it has."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(shape))
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = width * shape["num_key_value_heads"] // shape["num_attention_heads"]
    generator = torch.Generator().manual_seed(0)
    weights = {"model.embed_tokens.weight": (shape["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": (width,),
            f"{prefix}post_attention_layernorm.weight": (width,),
            f"{prefix}self_attn.q_proj.weight": (width, width),
            f"{prefix}self_attn.k_proj.weight": (keys, width),
            f"{prefix}self_attn.v_proj.weight": (keys, width),
            f"{prefix}self_attn.o_proj.weight": (width, width),
            f"{prefix}mlp.gate_proj.weight": (inner, width),
            f"{prefix}mlp.up_proj.weight": (inner, width),
            f"{prefix}mlp.down_proj.weight": (width, inner),
        }
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.08
        for name, size in weights.items()
    }
    save_file(tensors, str(directory / "model.safetensors"))
    return sum(tensor.numel() for tensor in tensors.values())
