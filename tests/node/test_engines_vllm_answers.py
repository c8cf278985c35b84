"""What runs inside vLLM's workers, without vLLM: draws and proofs by token number, in whatever order steps come."""

import hashlib

import numpy as np
import pytest
import torch

from node.engines.base import SamplingParams
from node.engines.vllm_answers import Answers, DeviceDraws, Job
from node.engines.vllm_settings import Settings, Sizes, engine_arguments, visible_devices
from protocol.errors import ConfigError, ModelError
from protocol.sampling import gumbel_rows, position_keys
from protocol.toploc import bf16_patterns, build_chunks

VOCAB, HIDDEN, STOP, MOST = 50, 24, 3, 70
SAMPLING = SamplingParams(temperature=0.7, max_new_tokens=MOST, stop_ids=(STOP, 10**6), top_k_proof=8)
SEEDS = tuple(bytes([number]) * 32 for number in range(6))
CPU = torch.device("cpu")


class Policy:
    """States and logits that depend on the request and the token number alone."""

    def states(self, request, step):
        digest = hashlib.sha256(f"{request} {step}".encode()).digest()
        numbers = np.random.default_rng(np.frombuffer(digest, np.uint32))
        return torch.from_numpy(numbers.standard_normal(HIDDEN + VOCAB, np.float32))

    def rows(self, pairs):
        states = torch.stack([self.states(*pair) for pair in pairs])
        return states[:, :HIDDEN], states[:, HIDDEN:]


@pytest.fixture
def policy():
    return Policy()


@pytest.fixture
def expected(policy):
    """Answers as the protocol defines them: (tokens, log-probabilities, proofs, reason) of each request."""

    def answer(request):
        keys = position_keys(SEEDS[request], MOST)
        states, tokens, logprobs = [], [], []
        while len(tokens) < MOST and (not tokens or tokens[-1] != STOP):
            hidden, logits = policy.rows([(request, len(tokens))])
            noisy = logits[0].numpy() + np.float32(0.7) * gumbel_rows(keys[len(tokens)][None], VOCAB)[0]
            tokens.append(int(noisy.argmax()))
            logprobs.append(float(torch.log_softmax(logits[0] / 0.7, -1)[tokens[-1]]))
            states.append(hidden[0].numpy())
        patterns = bf16_patterns(np.stack(states))
        chunks = [patterns[start : start + 32] for start in range(0, len(tokens), 32)]
        proofs = [build_chunks(chunk[None], 8)[0] for chunk in chunks]
        return tokens, logprobs, proofs, "stop" if tokens[-1] == STOP else "length"

    return {request: answer(request) for request in range(len(SEEDS))}


@pytest.fixture(params=[False, True], ids=["inline", "threaded"])
def answers(request, monkeypatch):
    made = Answers(Job(1, SEEDS, SAMPLING, slots=4), vocab_size=VOCAB, hidden_size=HIDDEN, device=CPU, record=True)
    if request.param:
        from node.engines import vllm_answers

        made._record = vllm_answers._Record(made.job, VOCAB, HIDDEN, threaded=True)
    yield made
    made.close()


def draw(answers, policy, pairs):
    """One step over (request, token number) of each row; -1 for rows that no token is due for."""
    hidden, logits = policy.rows(pairs)
    requests, steps = (np.array(each, np.int64) for each in zip(*pairs, strict=True))
    return answers.draw(requests, steps, hidden=hidden, logits=logits).tolist()


def run(answers, policy, waiting, *, put_off=()):
    """Steps of at most four rows until all are answered. What is `put_off` at a step misses it."""
    under_way, found, step = {}, {}, 0
    waiting = list(waiting)
    while waiting or under_way:
        while waiting and len(under_way) < 4:
            under_way[waiting.pop(0)] = 0
        pairs = [(request, number) for request, number in under_way.items() if (step, request) not in put_off]
        step += 1
        for (request, _), token in zip(pairs, draw(answers, policy, pairs), strict=True) if pairs else ():
            under_way[request] += 1
            if token == STOP or under_way[request] == MOST:
                del under_way[request]
                taken = answers.take(wait=True)
                assert not taken.fault
                found |= dict(taken.answers)
    return found


def same(answer, expected):
    tokens, logprobs, proofs, reason = expected
    assert (answer.output_ids, answer.finish_reason, answer.proofs) == (tokens, reason, proofs)
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-5)


def test_answers_are_the_protocol_s(answers, policy, expected):
    found = run(answers, policy, range(6))
    assert {len(each[0]) < MOST for each in expected.values()} == {True, False}
    for request, answer in found.items():
        same(answer, expected[request])
    assert answers.take(wait=True).tokens == sum(len(each[0]) for each in expected.values())


def test_a_request_that_misses_steps_gets_the_same_noise(answers, policy, expected):
    """vLLM puts requests off when its cache is full; noise is made ahead for several steps."""
    put_off = {(step, request) for request in (0, 2) for step in (3, 4, 9, 17, 40)}
    found = run(answers, policy, range(6), put_off=put_off)
    for request in range(6):
        same(found[request], expected[request])


def test_rows_without_a_token_are_nothing(answers, policy, expected):
    draw(answers, policy, [(-1, 5), (0, 0), (-1, 0)])
    for step in range(1, len(expected[0][0])):
        draw(answers, policy, [(0, step), (-1, step)])
    ((request, answer),) = answers.take(wait=True).answers
    assert request == 0
    same(answer, expected[0])


def test_a_step_too_far_and_a_step_again_change_nothing(answers, policy, expected):
    """Where vLLM schedules ahead, it may run a finished answer once more, or repeat a step whose token was dropped."""
    length = len(expected[1][0])
    for step in range(length):
        draw(answers, policy, [(1, step)])
        if step in (5, 31, 40) and step < length - 1:
            draw(answers, policy, [(1, step)])
    draw(answers, policy, [(1, length)])
    taken = answers.take(wait=True)
    ((request, answer),) = taken.answers
    assert request == 1
    same(answer, expected[1])
    draw(answers, policy, [(1, length + 1)])
    assert answers.take(wait=True).answers == []


def test_what_is_dropped_frees_its_place_and_leaves_no_proofs(answers, policy, expected):
    for step in range(33):
        draw(answers, policy, [(request, step) for request in range(4) if len(expected[request][0]) > step])
    answers.take(wait=True)
    answers.drop([0, 1, 2, 3])
    found = run(answers, policy, [4, 5])
    for request in (4, 5):
        same(found[request], expected[request])


def test_a_token_that_is_missing_is_said(answers, policy):
    draw(answers, policy, [(0, 0)])
    draw(answers, policy, [(0, 2)])
    assert "missing" in answers.take(wait=True).fault


def test_logits_that_are_not_finite_are_said(answers, policy):
    hidden, logits = policy.rows([(0, 0)])
    answers.draw(np.zeros(1, np.int64), np.zeros(1, np.int64), hidden=hidden, logits=logits * float("nan"))
    assert "not finite" in answers.take(wait=True).fault


def test_without_recording_tokens_are_the_same(policy, expected):
    """Workers that share a policy must all feed the same token to the next step."""
    made = Answers(Job(1, SEEDS, SAMPLING, slots=4), vocab_size=VOCAB, hidden_size=HIDDEN, device=CPU, record=False)
    tokens = [draw(made, policy, [(0, step)])[0] for step in range(len(expected[0][0]))]
    assert tokens == expected[0][0]
    assert made.take(wait=True).answers == []


def test_draws_on_a_device_are_those_of_a_cpu(policy, monkeypatch):
    """In parts, as where the vocabulary is large."""
    monkeypatch.setattr("node.engines.vllm_answers._NOISE_VALUES", 2 * VOCAB)
    draws = DeviceDraws(Job(1, SEEDS, SAMPLING, slots=4), VOCAB)
    slots, requests, steps = np.array([2, 0, 3, 1]), np.array([5, 4, 1, 0]), np.array([0, 2, 61, 7])
    for slot, request in zip(slots.tolist(), requests.tolist(), strict=True):
        draws.join(slot, request)
    _, logits = policy.rows(list(zip(requests, steps, strict=True)))
    tokens, logprobs = draws.draw(logits, slots, steps)
    keys = np.stack([position_keys(SEEDS[request], MOST)[step] for request, step in zip(requests, steps, strict=True)])
    noisy = logits.numpy() + np.float32(0.7) * gumbel_rows(keys, VOCAB)
    assert tokens.tolist() == noisy.argmax(1).tolist()
    wanted = torch.log_softmax(logits / 0.7, -1)[range(4), noisy.argmax(1)]
    assert logprobs.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("device", "count", "allowed", "found"),
    [
        ("cuda", 1, None, "0"),
        ("cuda:2", 2, None, "2,3"),
        ("cuda:1", 1, "4,7", "7"),
        ("cuda", 2, "GPU-a,GPU-b", "GPU-a,GPU-b"),
    ],
)
def test_devices_are_counted_among_those_that_the_operator_allows(device, count, allowed, found):
    assert visible_devices(device, count=count, allowed=allowed) == found


def test_a_device_that_is_not_allowed_is_named():
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=4,7 names 2"):
        visible_devices("cuda:1", count=2, allowed="4,7")


def test_memory_for_keys_and_values_keeps_to_the_limit(tmp_path):
    settings = Settings("float32", "cpu", max_memory_bytes=16 << 30, tensor_parallel=1)
    small = engine_arguments(tmp_path, settings, Sizes(weights_bytes=1 << 20, token_bytes=256, max_model_len=256))
    assert small["kv_cache_memory_bytes"] == (512 * 8 + 1) * 32 * 256  # all that can ever be used
    large = engine_arguments(tmp_path, settings, Sizes(weights_bytes=4 << 30, token_bytes=1 << 16, max_model_len=8192))
    assert 4 << 30 < large["kv_cache_memory_bytes"] < 9 << 30


def test_a_policy_that_leaves_no_room_is_named(tmp_path):
    settings = Settings("float32", "cpu", max_memory_bytes=4 << 30, tensor_parallel=1)
    with pytest.raises(ModelError, match="leaves 0 MiB") as caught:
        engine_arguments(tmp_path, settings, Sizes(weights_bytes=4 << 30, token_bytes=1 << 16, max_model_len=8192))
    assert "--max-memory" in caught.value.hint
