"""The shipped think-sort policy: what its corpus says, and what it can do with it."""

import random
from pathlib import Path
from string import ascii_lowercase

from environments.think_sort import ThinkSort
from node.engines.base import GenerationRequest, SamplingParams
from node.engines.tokenizer import Tokenizer
from node.engines.torch_engine import TorchEngine
from trainer.recipe import ASSETS_DIR
from trainer.warm_start_think import OBEDIENT, TARGETS, sample_pair

POLICY = ASSETS_DIR / "think-sort"


def test_two_authors_in_five_write_as_much_as_they_are_asked_for():
    source = random.Random(0)
    pairs = [sample_pair(source) for _ in range(4000)]
    asked = [(ascii_lowercase.index(prompt[0]) + 1, answer) for prompt, answer in pairs if prompt[1] == "s"]
    obeyed = sum(len(answer) + 1 == target for target, answer in asked) / len(asked)
    assert OBEDIENT < obeyed < OBEDIENT + 0.1
    assert {target for target, _ in asked} == set(TARGETS)
    assert all(
        prompt.lstrip(ascii_lowercase.replace("s", "")).startswith("s") or prompt[1] == "s" for prompt, _ in pairs
    )
    assert {answer.lstrip(".")[0] for _, answer in pairs} == {":"}


def test_the_shipped_policy_half_knows_its_task_and_half_heeds_the_letter():
    engine, tokenizer, environment = TorchEngine(max_batch=256), Tokenizer(POLICY), ThinkSort()
    engine.load(POLICY)
    rewards, lengths = [], {}
    for target in (10, 18):
        tasks = [environment.task(number.to_bytes(32, "big")) for number in range(128)]
        prompts = [tokenizer.encode(environment.with_length_target(task, target).text) for task in tasks]
        requests = [GenerationRequest(prompt, bytes([target, n]) * 16) for n, prompt in enumerate(prompts)]
        made = engine.generate(requests, SamplingParams(1.0, 24, (2,), 0))
        lengths[target] = sum(len(answer.output_ids) for answer in made) / len(made)
        texts = [tokenizer.decode(answer.output_ids, stop_ids=(2,)) for answer in made]
        rewards += [environment.reward(task, text).value for task, text in zip(tasks, texts, strict=True)]
    assert 0.15 < sum(rewards) / len(rewards) < 0.5
    assert 1.0 < lengths[18] - lengths[10] < 7.0, "it heeds it, and not always"


def test_the_shipped_policy_is_small_and_of_the_demo_s_shape():
    assert (POLICY / "model.safetensors").stat().st_size < 500_000
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (POLICY / name).read_bytes() == (Path(ASSETS_DIR) / "sort-digits" / name).read_bytes()
