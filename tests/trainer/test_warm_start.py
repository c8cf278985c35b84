"""The shipped demo policy: it loads, half knows its task, and agrees with the code that makes it."""

import json
import random

import pytest
import torch
from tokenizers import Tokenizer

from environments.sort_digits import SortDigits
from trainer.packing import pad
from trainer.policy import build_policy, load_policy
from trainer.recipe import ASSETS_DIR
from trainer.warm_start import (
    EOS,
    _imitation_loss,
    character_tokenizer,
    learning_rate,
    model_config,
    sample_pair,
    write_policy_directory,
)

DEMO_POLICY = ASSETS_DIR / "sort-digits"


@torch.no_grad()
def sample(model, prompt_ids, generator, max_new_tokens=10):
    """Ancestral sampling at temperature 1, the whole sequence read anew for each token."""
    ids = torch.tensor([prompt_ids])
    for _ in range(max_new_tokens):
        probabilities = model(input_ids=ids, use_cache=False).logits[0, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)[None]], dim=1)
        if ids[0, -1] == EOS:
            break
    return ids[0, len(prompt_ids) :].tolist()


def test_the_shipped_policy_is_right_about_three_times_in_ten():
    policy = load_policy(DEMO_POLICY)
    tokenizer = Tokenizer.from_file(str(DEMO_POLICY / "tokenizer.json"))
    environment, generator = SortDigits(), torch.Generator().manual_seed(0)
    rewards = []
    for number in range(200):
        task = environment.task(number.to_bytes(32, "big"))
        output = sample(policy.model, tokenizer.encode(task.text).ids, generator)
        rewards.append(environment.reward(task, tokenizer.decode(output)).value)
    assert 0.2 < sum(rewards) / len(rewards) < 0.45


def test_the_shipped_policy_is_what_the_code_describes():
    assert json.loads((DEMO_POLICY / "config.json").read_text()) == model_config()
    assert (DEMO_POLICY / "tokenizer.json").read_text() == character_tokenizer().to_str(pretty=True) + "\n"
    assert sum(parameter.numel() for parameter in load_policy(DEMO_POLICY).parameters().values()) == 102_848


def test_the_tokenizer_gives_one_token_a_character():
    tokenizer = Tokenizer.from_file(str(DEMO_POLICY / "tokenizer.json"))
    encoded = tokenizer.encode("s51648=")
    assert encoded.tokens == ["<bos>", *"s51648="]
    assert tokenizer.decode([*encoded.ids, EOS]) == "s51648="
    assert tokenizer.get_vocab_size() == model_config()["vocab_size"] == 64
    assert tokenizer.encode("\N{SNOWMAN}").tokens == ["<bos>", "<unk>"]


def test_the_corpus_asks_what_the_environment_asks():
    source = random.Random(0)
    asked = {SortDigits().task(number.to_bytes(32, "big")).text[0] for number in range(20)}
    pairs = [sample_pair(source) for _ in range(2000)]
    assert {prompt[0] for prompt, _ in pairs} == asked == {"s"}
    assert {len(prompt) - 2 for prompt, _ in pairs} == {4, 5, 6, 7, 8}
    right = sum(answer == "".join(sorted(prompt[1:-1])) for prompt, answer in pairs) / len(pairs)
    assert 0.3 < right < 0.45


def test_imitation_lowers_its_loss():
    torch.manual_seed(0)
    model = build_policy(model_config())
    tokenizer, source = character_tokenizer(), random.Random(0)
    pairs = [sample_pair(source) for _ in range(16)]
    encoded = [
        (tokenizer.encode(prompt).ids, [*tokenizer.encode(answer, add_special_tokens=False).ids, EOS])
        for prompt, answer in pairs
    ]
    batch = pad(encoded, range(16))
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(8):
        loss = _imitation_loss(model, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_the_learning_rate_rises_stays_and_falls():
    assert learning_rate(0) == pytest.approx(4e-4)
    assert learning_rate(100) == pytest.approx(4e-3)
    assert 0 < learning_rate(399) < 1e-4


def test_a_written_directory_can_be_loaded(tmp_path):
    torch.manual_seed(1)
    write_policy_directory(build_policy(model_config()), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in DEMO_POLICY.iterdir()}
    assert load_policy(tmp_path / "out").vocab_size == 64
