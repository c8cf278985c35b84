"""Rows that join, leave and move in a window of keys and values have the states of a pass over their whole text."""

import random

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, build_model, write_model

from node.engines.decoder import Decoder
from node.engines.model_config import read_config
from node.engines.rows import WindowRows
from node.engines.weights import WeightFiles


@pytest.fixture(scope="module", params=["qwen2-grouped", "llama3-rope", "qwen3"])
def decoder(request, tmp_path_factory):
    path = write_model(build_model(request.param), tmp_path_factory.mktemp(request.param))
    config = read_config(path)
    return Decoder(config, WeightFiles(path, config, dtype=torch.float32), device=torch.device("cpu"))


class Mirror:
    """What the rows should hold: each one's text."""

    def __init__(self, decoder, **sizes):
        self.decoder = decoder
        self.rows = WindowRows(decoder, **sizes)
        self.texts = []

    def join(self, prompts, *, to_come=None):
        states = self.rows.join([tuple(prompt) for prompt in prompts], to_come=to_come)
        self.texts += [list(prompt) for prompt in prompts]
        self.compare(*states, self.texts[-len(prompts) :])

    def step(self, source):
        tokens = [source.randrange(VOCAB) for _ in self.texts]
        states = self.rows.step(np.array(tokens))
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)
        self.compare(*states, self.texts)

    def keep(self, order):
        self.rows.keep(np.array(order, np.int64))
        self.texts = [self.texts[row] for row in order]

    def compare(self, hidden, logits, texts):
        for row, text in enumerate(texts):
            whole = self.decoder.forward(torch.tensor([text]), torch.arange(len(text))[None])[0, -1]
            torch.testing.assert_close(hidden[row], whole, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(logits[row], self.decoder.logits(whole), rtol=1e-4, atol=1e-4)


def some_prompt(source, length):
    return [source.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_joins_and_leaves(decoder, seed):
    """Rows of up to 30 tokens in 40 columns, so that the window moves back now and then; memory starts as garbage."""
    source = random.Random(seed)
    mirror = Mirror(decoder, capacity=4, columns=40, pass_tokens=24)
    poison(mirror.rows)
    moves = 0
    for _ in range(100):
        free = 4 - len(mirror.texts)
        if (free and source.random() < 0.4) or free == 4:
            shared = some_prompt(source, source.randint(1, 20))
            others = [some_prompt(source, source.randint(1, 20)) for _ in range(source.randint(0, free - 1))]
            mirror.join([*others, *[shared] * (free - len(others))][: source.randint(1, free)])
        before = mirror.rows._cache.length
        mirror.step(source)
        moves += mirror.rows._cache.length <= before
        count = len(mirror.texts)
        done = {row for row, text in enumerate(mirror.texts) if len(text) >= 29 or source.random() < 0.02}
        last = [row for row in range(count - len(done), count) if row not in done]
        mirror.keep([last.pop() if row in done else row for row in range(count - len(done))])
    assert moves >= 2


def poison(rows):
    for each in (rows._cache._keys, rows._cache._values):
        each.fill_(float("nan"))


def test_a_longer_prompt_joins_shorter_ones(decoder):
    """The window moves to the right for it, and what is in front of the others must not be looked at."""
    source = random.Random(1)
    mirror = Mirror(decoder, capacity=3, columns=64, pass_tokens=1000)
    poison(mirror.rows)
    mirror.join([some_prompt(source, 3), some_prompt(source, 5)])
    mirror.step(source)
    mirror.join([some_prompt(source, 30)])
    mirror.step(source)
    mirror.keep([2])
    mirror.join([some_prompt(source, 2)])
    mirror.step(source)


def test_a_prompt_to_come_is_read_once(decoder, monkeypatch):
    """A group that joins in parts."""
    source = random.Random(2)
    mirror = Mirror(decoder, capacity=4, columns=40, pass_tokens=1000)
    prompt = tuple(some_prompt(source, 9))
    passes, forward = [], decoder.forward
    mirror.join([prompt, prompt], to_come=prompt)
    monkeypatch.setattr(decoder, "forward", lambda *args, **options: passes.append(1) or forward(*args, **options))
    mirror.rows.join([prompt], to_come=prompt)
    mirror.rows.join([prompt], to_come=None)
    assert passes == []
    mirror.rows.keep(np.array([0, 1]))
    mirror.rows.join([prompt], to_come=None)
    assert passes == [1]
