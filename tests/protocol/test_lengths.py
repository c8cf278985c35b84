"""Targets come from the prompt's seed, and missing them costs alpha a token."""

from collections import Counter

import msgspec
import pytest

from protocol.lengths import length_penalty, length_target
from protocol.records import LengthSpec, RolloutSpec
from protocol.seeds import length_seed, prompt_seed, submission_seed

SPEC = LengthSpec(targets=(2000, 4000, 6000, 8000, 10000), alpha=0.0003)
SUBMISSION = submission_seed(b"\1" * 32, 7, checkpoint=b"\2" * 32, contributor_key=b"\3" * 32, index=5)
LIMITS = {"group_size": 2, "prompts_per_submission": 2, "temperature": 1.0, "max_submissions_per_step": 4}


def test_golden_targets():
    prompts = [prompt_seed(SUBMISSION, number) for number in range(8)]
    assert length_seed(prompts[0]).hex() == "9536c1c73ac63a9cff1ee047a41101a212a2c8413052e1a3195b6461a1434543"
    assert [length_target(SPEC, prompt) for prompt in prompts] == [4000, 6000, 6000, 2000, 10000, 4000, 8000, 4000]


def test_every_target_is_equally_likely():
    drawn = Counter(length_target(SPEC, number.to_bytes(32, "big")) for number in range(5000))
    assert set(drawn) == set(SPEC.targets)
    assert all(850 < count < 1150 for count in drawn.values())


@pytest.mark.parametrize(("tokens", "penalty"), [(4000, 0.0), (3000, 0.3), (5000, 0.3), (1, 1.1997)])
def test_the_penalty_grows_with_the_distance_either_way(tokens, penalty):
    assert length_penalty(SPEC, target=4000, tokens=tokens) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("length", "fault"),
    [
        ({"targets": [], "alpha": 0.1}, "length >= 1"),
        ({"targets": [4, 4], "alpha": 0.1}, "targets must rise, and are 4, 4"),
        ({"targets": [0], "alpha": 0.1}, ">= 1"),
        ({"targets": [4, 30], "alpha": 0.1}, "30 tokens cannot be reached with max_new_tokens = 20"),
        ({"targets": [4], "alpha": -0.1}, ">= 0"),
        ({"targets": [4], "alpha": float("nan")}, ">= 0"),
        ({"targets": [4], "alpha": float("inf")}, "<= 1"),
    ],
)
def test_impossible_lengths_are_refused_by_name(length, fault):
    with pytest.raises(msgspec.ValidationError, match=fault):
        msgspec.convert({**LIMITS, "max_new_tokens": 20, "length": length}, RolloutSpec)
