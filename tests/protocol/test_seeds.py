import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.seeds import SeedStream, evaluation_seed, prompt_seed, rollout_seed, submission_seed

RUN, POLICY, ALICE, BOB = (bytes([n]) * 32 for n in (1, 2, 3, 4))
SUBMISSION = submission_seed(RUN, 7, checkpoint=POLICY, contributor_key=ALICE, index=5)


def derived(*parts):
    """The documented derivation, written again."""
    encoded = [part if isinstance(part, bytes) else struct.pack(">Q", part) for part in parts]
    return hashlib.sha256(b"".join(struct.pack(">I", len(part)) + part for part in encoded)).digest()


def test_seeds_follow_the_documented_derivation():
    assert derived(b"intellect-node/1 seed/submission", RUN, 7, POLICY, ALICE, 5) == SUBMISSION
    assert prompt_seed(SUBMISSION, 3) == derived(b"intellect-node/1 seed/prompt", SUBMISSION, 3)
    assert rollout_seed(SUBMISSION, 3, 2) == derived(b"intellect-node/1 seed/rollout", SUBMISSION, 3, 2)


def test_golden_seeds():
    assert SUBMISSION.hex() == "530ac0c8a559a625ea32fe810f866a4113ff4093450ace60630e096a62036b69"
    assert prompt_seed(SUBMISSION, 0).hex() == "615273ee48fba17764bdeb734be18ba9f17d90bfe86ad307f38989713886d18e"
    assert rollout_seed(SUBMISSION, 0, 1).hex() == "27c49b1a9ec1f3344825c1809a0ee76c06c0ec2ca6c5ad63a12669c73aac1c6e"


def test_each_part_changes_the_seed():
    base = {"run_id": RUN, "step": 7, "checkpoint": POLICY, "contributor_key": ALICE, "index": 5}
    others = {"run_id": BOB, "step": 8, "checkpoint": BOB, "contributor_key": BOB, "index": 6}
    seeds = {submission_seed(**(base | {name: value})) for name, value in others.items()}
    assert len(seeds | {SUBMISSION}) == 6


def test_rollouts_and_prompts_of_a_submission_have_seeds_of_their_own():
    seeds = {rollout_seed(SUBMISSION, prompt, member) for prompt in range(8) for member in range(8)}
    seeds |= {prompt_seed(SUBMISSION, prompt) for prompt in range(8)}
    assert len(seeds) == 72


def test_golden_stream():
    stream = SeedStream(bytes(32))
    assert stream.take(8).hex() == "0638a8fa8d0844b8"
    assert [stream.below(1000) for _ in range(6)] == [67, 792, 335, 474, 664, 126]
    assert stream.uniform() == 0.8052368408394325
    letters = list("abcdefgh")
    stream.shuffle(letters)
    assert "".join(letters) == "gfbadhce"


def test_stream_is_the_documented_blocks():
    domain = b"intellect-node/1 seed/stream"
    blocks = [hashlib.shake_256(domain + ALICE + struct.pack(">Q", i)).digest(136) for i in range(4)]
    stream = SeedStream(ALICE)
    assert b"".join(stream.take(n) for n in (1, 100, 200, 0, 243)) == b"".join(blocks)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 2**70))
def test_below_stays_below(seed, n):
    stream = SeedStream(seed)
    assert all(0 <= stream.below(n) < n for _ in range(20))


@pytest.mark.parametrize("n", [3, 10, 257])
def test_below_is_uniform(n):
    stream, draws = SeedStream(ALICE), 200 * n
    counts = [0] * n
    for _ in range(draws):
        counts[stream.below(n)] += 1
    chi_square = sum((count - 200) ** 2 / 200 for count in counts)
    assert chi_square < n - 1 + 5 * (2 * n) ** 0.5


def test_below_one_costs_nothing_and_below_zero_is_refused():
    stream = SeedStream(ALICE)
    assert stream.below(1) == 0
    assert stream.take(136) == SeedStream(ALICE).take(136)
    with pytest.raises(ValueError, match="below 0"):
        stream.choice([])


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers()))
def test_shuffle_permutes(seed, items):
    shuffled = list(items)
    SeedStream(seed).shuffle(shuffled)
    assert sorted(shuffled) == sorted(items)


def test_shuffle_and_choice_reach_everything():
    stream, orders = SeedStream(BOB), set()
    for _ in range(200):
        items = [1, 2, 3]
        stream.shuffle(items)
        orders.add(tuple(items))
    assert len(orders) == 6
    assert {stream.choice("abc") for _ in range(100)} == set("abc")


def test_uniform_covers_the_unit_interval():
    stream = SeedStream(ALICE)
    draws = [stream.uniform() for _ in range(5000)]
    assert 0 <= min(draws) < 0.01
    assert 0.99 < max(draws) < 1
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02


def test_no_submission_has_the_seed_of_a_held_out_set():
    """Attack: a contributor that is given a held-out prompt, or grinds for one: the two come from other domains."""
    assert evaluation_seed(RUN) == derived(b"intellect-node/1 seed/evaluation", RUN)
    held_out = evaluation_seed(RUN)
    submissions = {
        submission_seed(RUN, step, checkpoint=POLICY, contributor_key=ALICE, index=index)
        for step in range(20)
        for index in range(20)
    }
    prompts = {prompt_seed(seed, index) for seed in submissions for index in range(8)}
    assert not prompts & {prompt_seed(held_out, index) for index in range(512)}
