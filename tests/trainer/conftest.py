"""A small recipe, the shipped policy, and rollouts that it might have given."""

import random

import msgspec
import pytest
import torch

from trainer.optimiser import make_optimiser
from trainer.packing import pad
from trainer.policy import load_policy
from trainer.recipe import ASSETS_DIR, load_recipe

DEMO_POLICY = ASSETS_DIR / "sort-digits"
GROUP = 4


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def recipe():
    """The demo's recipe with groups of four and two updates a step."""
    demo = load_recipe("demo")
    replace = msgspec.structs.replace
    return replace(
        demo,
        rollout=replace(demo.rollout, group_size=GROUP),
        optimiser=replace(demo.optimiser, updates_per_step=2, warm_up_steps=0),
        keep_checkpoints=2,
    )


@pytest.fixture
def policy():
    return load_policy(DEMO_POLICY)


@pytest.fixture
def optimiser(policy, recipe):
    return make_optimiser(policy, recipe.optimiser)


@pytest.fixture
def make_rollouts():
    """Rollouts of the demo policy's shape with true log-probabilities and made-up rewards, whole groups."""
    scorer = load_policy(DEMO_POLICY)

    def make(groups: int = 4, *, seed: int = 0, checkpoint_step: int = 0, rewards=None):
        source = random.Random(seed)
        rows = []
        for prompt in range(groups):
            prompt_ids = [1, *(source.randrange(4, 40) for _ in range(source.randint(5, 10)))]
            for member in range(GROUP):
                output_ids = [*(source.randrange(4, 14) for _ in range(source.randint(1, 8))), 2]
                with torch.no_grad():
                    logprobs = scorer.score(pad([(prompt_ids, output_ids)], [0]), 1.0)[0]
                rows.append(
                    {
                        "prompt_index": prompt,
                        "member": member,
                        "prompt_ids": prompt_ids,
                        "output_ids": output_ids,
                        "logprobs": logprobs.tolist(),
                        "reward": float(member % 2) if rewards is None else rewards[member],
                        "finish_reason": "stop",
                        "proofs": [b"proof"],
                        "checkpoint_step": checkpoint_step,
                        "submission": "a",
                    }
                )
        return rows

    return make
