"""Packing: log-probabilities and gradients as if every answer stood alone, in rows without padding."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ModelError
from trainer.packing import (
    Tree,
    choose_layout,
    even,
    first_fit_decreasing,
    grow_trees,
    lay_out,
    pack,
    pad,
    rows_of_like_length,
)
from trainer.policy import Policy, build_policy
from trainer.recipe import PolicySettings

LAYOUTS = ("padded", "packed", "shared")
PAIRS = [
    ([1, 9, 9], [4, 5, 2]),
    ([1, 5, 6, 7, 8, 9, 10, 11], [7, 2]),
    ([1, 9, 9], [8, 9, 10, 11, 12, 13, 14, 2]),
    ([1, 4], [2]),
    ([1, 9, 9], [2]),
    ([1, *range(4, 60)], [*range(4, 34), 2]),
    ([1, 9, 9], [*range(4, 44), 2]),
]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
ARCHITECTURES = {
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "llama": {"model_type": "llama", "num_key_value_heads": 1, "attention_bias": True},
    "gpt_neox": {"model_type": "gpt_neox"},
}


def random_policy(config, *, fresh=False, **settings):
    torch.manual_seed(0)
    model = build_policy(SHAPE | config)
    if fresh:
        return Policy(model.eval(), settings=PolicySettings(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0) if "norm" not in name else parameter.uniform_(0.5, 1.5)
    return Policy(model.eval(), settings=PolicySettings(**settings))


def by_answer(policy, micro_batches):
    found = {}
    for laid in micro_batches:
        logprobs = policy.score(laid, 1.0)[0]
        for number, member in enumerate(laid.members):
            found[member] = logprobs[laid.owner == number]
    return [found[member] for member in sorted(found)]


def alone(policy):
    return by_answer(policy, [pad(PAIRS, [member]) for member in range(len(PAIRS))])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_do_not_depend_on_what_lies_beside(architecture, layout):
    policy = random_policy(ARCHITECTURES[architecture])
    with torch.no_grad():
        expected = alone(policy)  # with the model's own attention
        policy.prepare()
        assert policy.packs
        found = by_answer(policy, lay_out(PAIRS, layout, max_tokens=200))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_gradients_are_those_of_answers_alone(policy, layout):
    def gradients(micro_batches):
        policy.model.zero_grad()
        for number, logprobs in enumerate(by_answer(policy, micro_batches)):
            (logprobs.sum() * (1 + number)).backward(retain_graph=True)
        return [parameter.grad.clone() for parameter in policy.parameters().values()]

    policy.prepare()
    expected = gradients([pad(PAIRS, [member]) for member in range(len(PAIRS))])
    for one, other in zip(expected, gradients(lay_out(PAIRS, layout, max_tokens=1000)), strict=True):
        torch.testing.assert_close(other, one, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_no_answer_sees_another(policy, layout):
    """Attack: an answer that is packed beside others and means to change what they are worth."""
    policy.prepare()
    changed = [*PAIRS]
    changed[2] = (PAIRS[2][0], [50] * len(PAIRS[2][1]))
    with torch.no_grad():
        before, after = (by_answer(policy, lay_out(one, layout, max_tokens=1000)) for one in (PAIRS, changed))
    for member, (one, other) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(one, other) == (member != 2)


@pytest.mark.parametrize("call", ["cache", "ones"])
def test_calls_that_look_right_and_are_silently_wrong(policy, call):
    """With a cache or a mask of ones, transformers does not look at position ids and lets packed answers mix.

    When this fails, transformers has changed, and trainer.attention may have become simpler.
    """
    laid = pack([Tree(prompt, (output,), (number,)) for number, (prompt, output) in enumerate(PAIRS)])
    tempting = {"use_cache": True} if call == "cache" else {"attention_mask": torch.ones_like(laid.inputs)}
    right = {"use_cache": False}
    with torch.no_grad():
        expected = torch.cat(alone(policy))

        def error(arguments):
            logits = policy.model(input_ids=laid.inputs, position_ids=laid.positions, **arguments).logits[0, laid.keep]
            return float((logits.log_softmax(-1)[laid.rows, laid.targets] - expected).abs().max())

        assert error(right) < 1e-5
        assert error(right | tempting) > 0.1


def test_each_token_is_laid_once_and_nothing_is_padded():
    laid = pack(grow_trees(PAIRS, max_tokens=1000))
    assert laid.padding == 0
    assert laid.slots == laid.inputs.numel() == laid.attention.places.numel()
    prompts = {tuple(prompt): len(prompt) for prompt, _ in PAIRS}
    assert laid.slots == sum(prompts.values()) + sum(len(output) - 1 for _, output in PAIRS)
    assert laid.tokens == sum(len(prompt) + len(output) for prompt, output in PAIRS)
    assert laid.targets.tolist() == [token for member in laid.members for token in PAIRS[member][1]]
    assert laid.flatten([PAIRS[member][1] for member in laid.members]).tolist() == laid.targets.tolist()


def test_padding_is_counted():
    laid = pad(PAIRS, range(3))
    assert laid.slots == 30
    assert laid.padding == 30 - (5 + 9 + 10)


def test_prompts_are_shared_where_it_pays():
    prompt = list(range(30))
    assert choose_layout([(prompt, [1, 2])] * 4) == "shared"
    assert choose_layout([(prompt[:2], list(range(60)))] * 4) == "packed"
    assert choose_layout([(prompt[: 20 + number], [1, 2]) for number in range(4)]) == "packed"


sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=60)


@given(sizes, st.integers(1, 4000))
def test_bins_hold_everything_once_within_the_limit(lengths, capacity):
    bins = first_fit_decreasing(lengths, capacity=capacity)
    assert sorted(index for one in bins for index in one) == list(range(len(lengths)))
    held = [sum(lengths[index] for index in one) for one in bins]
    assert all(total <= capacity or len(one) == 1 for total, one in zip(held, bins, strict=True))
    fitting = sorted(total for total in held if total <= capacity)
    assert len(fitting) < 2 or fitting[0] + fitting[1] > capacity


@given(sizes, st.integers(1, 4000), st.integers(2, 5))
def test_bins_for_several_processes_are_even(lengths, capacity, ways):
    bins = even(lengths, capacity=capacity, ways=ways)
    assert sorted(index for one in bins for index in one) == list(range(len(lengths)))
    held = [sum(lengths[index] for index in one) for one in bins]
    assert max(held) <= max(capacity, *lengths)
    assert max(held) - min(held) <= max(lengths)
    assert len(bins) % ways == 0 or len(bins) == len(lengths)


@given(sizes, st.integers(1, 4000))
def test_rows_that_are_padded_together_are_alike(lengths, max_tokens):
    batches = rows_of_like_length(lengths, max_tokens=max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or longest * len(batch) <= max_tokens
        assert min(lengths[index] for index in batch) >= 0.6 * longest


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_tokens", [1, 40, 90, 1000])
def test_a_micro_batch_never_exceeds_the_limit_but_for_one_long_answer(layout, max_tokens):
    micro_batches = lay_out(PAIRS, layout, max_tokens=max_tokens)
    assert sorted(member for laid in micro_batches for member in laid.members) == list(range(len(PAIRS)))
    assert all(laid.slots <= max_tokens or len(laid.members) == 1 for laid in micro_batches)


RECURRENT = {"model_type": "mamba", "state_size": 4, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("config", [RECURRENT, {"model_type": "bloom", "n_layer": 2, "n_head": 4}])
def test_a_model_that_mixes_what_is_packed_is_noticed(config, fresh, caplog):
    """A recurrent model runs along the row, one with ALiBi builds its own mask: neither knows of plans.

    As it is initialised a model hardly looks at other tokens, and the numbers alone would let it pass.
    """
    padded = random_policy(config, fresh=fresh)
    padded.prepare()
    assert not padded.packs
    assert "layout=padded" in caplog.text
    with pytest.raises(ModelError, match="cannot be trained on packed rollouts"):
        random_policy(config, fresh=fresh, layout="shared").prepare()


def test_answers_longer_than_a_window_are_refused():
    window = {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 48}
    policy = random_policy(window)
    policy.prepare()
    with torch.no_grad(), pytest.raises(ModelError, match="window of 48"):
        policy.score(pad(PAIRS, [5]), 1.0)
    short = [PAIRS[number] for number in (0, 1, 2)]
    with torch.no_grad():
        by_answer(policy, lay_out(short, "shared", max_tokens=1000))


def test_a_packed_model_does_not_decode(policy):
    """A cache is not what packed attention was made for; it says so instead of attending to the wrong tokens."""
    policy.prepare()
    with torch.no_grad(), pytest.raises(ModelError, match="cache"):
        policy.model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputing_activations_changes_no_gradient(layout):
    def gradients(**settings):
        policy = random_policy(ARCHITECTURES["qwen2"], **settings)
        policy.prepare()
        for laid in lay_out(PAIRS, layout, max_tokens=1000):
            policy.score(laid, 1.0)[0].sum().backward()
        return [parameter.grad for parameter in policy.parameters().values()]

    for one, other in zip(gradients(), gradients(activation_checkpointing=True), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_computes_nearly_the_same():
    settings = {"dtype": "bfloat16", "compute": "bfloat16"}
    exact, coarse = random_policy(ARCHITECTURES["qwen2"]), random_policy(ARCHITECTURES["qwen2"], **settings)
    with torch.no_grad():
        expected, found = torch.cat(alone(exact)), torch.cat(alone(coarse))
    assert found.dtype == torch.float32
    assert 0 < float((expected - found).abs().mean()) < 0.3
    assert msgspec.structs.asdict(coarse.settings)["compute"] == "bfloat16"


def gradients_of(policy, pairs):
    for laid in lay_out(pairs, "shared" if policy.packs else "padded", max_tokens=1000):
        logprobs, entropy = policy.score(laid, 0.7)
        (logprobs.sum() + entropy.sum()).backward()
    return [parameter.grad for parameter in policy.parameters().values()]


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_an_output_layer_in_pieces_gives_the_same(layout):
    """What keeps the logits of long packs out of memory: three rows at once here, each computed twice."""
    whole, pieces = (random_policy(ARCHITECTURES["qwen2"], layout=layout) for _ in range(2))
    whole.prepare()
    pieces.prepare()
    pieces.piece_elements = 3 * pieces.vocab_size
    laid = lay_out(PAIRS, layout, max_tokens=1000)
    with torch.no_grad():
        for one in laid:
            for expected, found in zip(whole.score(one, 0.7), pieces.score(one, 0.7), strict=True):
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            assert not pieces.score(one, 0.7, with_entropy=False)[1].requires_grad
    for expected, found in zip(gradients_of(whole, PAIRS), gradients_of(pieces, PAIRS), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_logits_that_change_after_the_output_layer_are_not_cut(caplog):
    """Gemma 2 caps its logits, which are then not what its output layer gave."""
    capped = {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.5}
    policy = random_policy(capped)
    with torch.no_grad():
        expected = torch.cat(alone(policy))
        policy.prepare()
        policy.piece_elements = 1
        found = torch.cat(by_answer(policy, lay_out(PAIRS, "padded", max_tokens=1000)))
    assert "logits=whole" in caplog.text
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
