"""TRL's GRPOTrainer behind a pipe: a job a line of JSON on standard input, answers on standard output.

`python -m bench trainer` starts it in an environment of its own (constraints-trl.txt), so it imports nothing of this
project. Jobs: `updates` trains on samples that it asks for, `learn` samples itself. What is timed is what lies between
the beginning and the end of TRL's optimiser steps, without generation, tokenizing, rewards and advantages; logging is
not in it either.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_OUT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # what libraries print is none of our answers


def tell(message: dict[str, Any]) -> None:
    """Answer the benchmark."""
    _OUT.write(json.dumps(message) + "\n")
    _OUT.flush()


def ask() -> dict[str, Any]:
    """The benchmark's next line; leaves when there is none."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    message: dict[str, Any] = json.loads(line)
    return message


class Clock(TrainerCallback):  # type: ignore[misc]
    """CPU seconds of each optimiser step, and what TRL logs of it."""

    def __init__(self) -> None:
        self.began = 0.0
        self.apart = 0.0
        """Of the step under way, what is not counted."""
        self.steps: list[float] = []
        self.generate_s = 0.0
        self.logs: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.apart, self.began = 0.0, time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.process_time() - self.began - self.apart)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logs.append(logs)


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's own, with the time of generation set apart."""

    clock: Clock

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.process_time()
        made = super()._generate_and_score_completions(inputs)
        spent = time.process_time() - began
        self.clock.apart += spent
        self.clock.generate_s += spent
        return made


def make_trainer(job: dict[str, Any], rewards: Any, rows: list[dict[str, Any]], **more: Any) -> TimedTrainer:
    """TRL with the fastest settings that were found for a small model on one core: one micro-batch an update."""
    settings = job["settings"]
    updates = settings["updates"]
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{job['model']}/tokenizer.json",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
    )
    config = GRPOConfig(
        output_dir=job["out"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["samples"] // updates,
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_generations=settings["group_size"],
        num_iterations=1,
        max_steps=updates * job["steps"],
        max_completion_length=settings["max_new_tokens"],
        temperature=settings["temperature"],
        top_k=0,
        top_p=1.0,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=updates * settings["warm_up_steps"],
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        beta=0.0,
        epsilon=settings["epsilon"],
        delta=settings["delta"],
        loss_type="dapo",  # each token of an update weighs the same
        scale_rewards="group",
        logging_steps=1 if job["job"] == "updates" else updates,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=job["seed"],
    )
    clock = Clock()
    trainer = TimedTrainer(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
        **more,
    )
    trainer.clock = clock
    return trainer


def updates(job: dict[str, Any]) -> None:
    """Train on samples that are asked for before each round; tell what the round before took."""

    def samples(prompts: list[Any], trainer: TimedTrainer) -> dict[str, Any]:
        tell({"steps": trainer.clock.steps})
        trainer.clock.steps = []
        return ask()

    def rewards(given_rewards: list[float], **_: Any) -> list[float]:
        return given_rewards

    rows = [{"prompt": "s1="} for _ in range(job["settings"]["samples"])]
    trainer = make_trainer(job, rewards, rows, rollout_func=samples)
    trainer.train()
    tell({"steps": trainer.clock.steps, "gradients": [log["grad_norm"] for log in trainer.clock.logs[:-1]]})


def learn(job: dict[str, Any]) -> None:
    """Sample, judge by equality, train; leave the policy in `out`."""

    def rewards(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]

    trainer = make_trainer(job, rewards, job["rows"])
    encoded = trainer.processing_class(text=[row["prompt"] for row in job["rows"][:8]])["input_ids"]
    began = time.process_time()
    trainer.train()
    spent = time.process_time() - began
    trainer.save_model(job["out"])
    tell(
        {
            "encoded": encoded,
            "rewards": [log["reward"] for log in trainer.clock.logs if "reward" in log],
            "cpu_s": spent,
            "update_s": sum(trainer.clock.steps),
            "generate_s": trainer.clock.generate_s,
        }
    )


def main() -> None:
    """Say which versions these are, then do jobs until the benchmark hangs up."""
    import transformers
    import trl

    torch.set_num_threads(1)
    tell({"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__})
    while True:
        job = ask()
        {"updates": updates, "learn": learn}[job["job"]](job)


if __name__ == "__main__":
    main()
