"""Seconds of checking for each second of generating: the demo's policy, and a Llama-shaped one of 135 million.

Both in CPU seconds of one process with one thread. The demo's figures are whole submissions, from the seed to the
file and from the file's rows to the verdict. The large policy has random weights, prompts of 32 tokens, answers of 128
and no end token; 1, 4 or 8 answers at a time are what a contributor without an accelerator generates.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from bench.harness import Result
from node.engines.base import GenerationRequest, SamplingParams
from node.engines.torch_engine import TorchEngine
from node.inference.compute import RolloutWorker
from node.run_create import manifest_from_recipe, model_directory
from node.validator.checks import check_logprobs, check_sampling, check_toploc
from node.validator.compute import Judge
from node.validator.measure import Measurer
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
    result = Result(figures)
    result.at_most("demo_ratio", GOAL)
    for batch in (1, 4, 8):
        result.at_most(f"large_{batch}_ratio", GOAL)
    return result


def _demo(directory: Path, *, submissions: int) -> dict[str, float]:
    policy = model_directory("sort-digits")
    manifest = demo_manifest(policy)
    worker, judge = RolloutWorker(TorchEngine()), Judge(TorchEngine)
    worker.load(str(policy), CHECKPOINT)
    judge.load(str(policy), CHECKPOINT)
    calls = []
    for index in range(submissions + 1):  # the first one warms up
        path = directory / f"{index}.parquet"
        started = time.process_time()
        made = worker.generate(**_seed(index), manifest=msgspec.msgpack.encode(manifest), path=str(path))
        generate_s = time.process_time() - started
        rows = read_rollouts(path, max_rollouts=manifest.rollouts_per_submission, max_tokens=256)
        calls.append((generate_s, _judge_s(judge, manifest, made, index, rows)))
    generate_s, check_s = (sum(times) / submissions for times in zip(*calls[1:], strict=True))
    return {"demo_generate_ms": 1000 * generate_s, "demo_check_ms": 1000 * check_s, "demo_ratio": check_s / generate_s}


def _judge_s(judge: Judge, manifest: Manifest, made: dict[str, Any], index: int, rollouts: Sequence[Rollout]) -> float:
    fields = {
        name: made[name] for name in ("sha256", "size", "rollouts", "output_tokens", "prompts", "engine", "dtype")
    }
    record = Submission(
        run_id=bytes(32), step=0, index=index, checkpoint_step=0, checkpoint=CHECKPOINT, software="", issued_at_ms=0,
        **fields,
    )  # fmt: skip
    rows = [msgspec.to_builtins(rollout, builtin_types=(bytes,)) for rollout in rollouts]
    started = time.process_time()
    found = judge.judge(
        submission=msgspec.msgpack.encode(record),
        manifest=msgspec.msgpack.encode(manifest),
        run_id=bytes(32),
        contributor=bytes(32),
        rollouts=rows,
    )
    if found["outcome"] != "accept":
        raise RuntimeError(f"an honest submission was not accepted: {found['reason']}")
    return time.process_time() - started


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
        for name, seconds in times.items():
            figures[f"large_{batch}_{name}_s"] = seconds
        figures[f"large_{batch}_ratio"] = sum(v for k, v in times.items() if k != "generate") / times["generate"]
    return figures


def _generate_and_check(engine: TorchEngine, *, answers: int, tokens: int) -> dict[str, float]:
    """One group: the same prompt, `answers` answers of `tokens` tokens."""
    prompt = np.random.default_rng(0).integers(3, engine.info.vocab_size, PROMPT_TOKENS).tolist()
    requests = [GenerationRequest(prompt, rollout_seed(bytes(32), 0, member)) for member in range(answers)]
    started = time.process_time()
    made = engine.generate(requests, SamplingParams(1.0, tokens, (), 128))
    generate_s = time.process_time() - started
    rollouts = [
        Rollout(
            prompt_index=0, member=member, prompt_ids=prompt, output_ids=one.output_ids, logprobs=one.logprobs,
            reward=0.0, finish_reason=one.finish_reason, proofs=one.proofs,
        )
        for member, one in enumerate(made)
    ]  # fmt: skip
    return {"generate": generate_s} | _check_s(engine, rollouts)


def _check_s(engine: TorchEngine, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Seconds of the policy's pass, and of everything that is compared with it (the output layer included)."""
    measurer = Measurer(
        rollouts,
        lambda prompt, member: rollout_seed(bytes(32), prompt, member),
        temperature=1.0,
        top_k=128,
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
    max_margin=1e-3, max_mean_margin=1e-4, max_logprob_error=1e-3, honest_margin=1e-5, honest_mantissa=0.01,
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
