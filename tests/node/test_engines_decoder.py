"""The built-in decoder against transformers, over every supported architecture."""

import pytest
import torch
from tiny_models import ARCHITECTURES, build_model, write_model

from node.engines.decoder import Decoder
from node.engines.kv_cache import KVCache
from node.engines.model_config import read_config
from node.engines.weights import read_weights


def load_decoder(path, *, dtype=torch.float32):
    config = read_config(path)
    return Decoder(config, read_weights(path, config, dtype=dtype), device=torch.device("cpu"))


def place(tokens):
    return torch.arange(tokens.shape[1]).expand(len(tokens), -1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_forward_equals_transformers(name, tmp_path):
    model = build_model(name)
    decoder = load_decoder(write_model(model, tmp_path))
    tokens = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = model.model(tokens).last_hidden_state
        their_logits = model(tokens).logits
    ours = decoder.forward(tokens, place(tokens))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decoder.logits(ours), their_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cached_steps_equal_one_pass(name, tmp_path):
    decoder = load_decoder(write_model(build_model(name), tmp_path))
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(2))
    whole = decoder.forward(tokens, place(tokens))
    cache = KVCache.empty(decoder.cache_shape, rows=2, capacity=20, like=decoder.embedding)
    steps = [decoder.forward(tokens[:, :7], place(tokens)[:, :7], cache=cache)]
    steps += [decoder.forward(tokens[:, i : i + 1], place(tokens)[:, i : i + 1], cache=cache) for i in range(7, 20)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_near_float32(tmp_path):
    path = write_model(build_model("qwen2"), tmp_path)
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(3))
    exact = load_decoder(path).forward(tokens, place(tokens))
    rough = load_decoder(path, dtype=torch.bfloat16).forward(tokens, place(tokens))
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().max() < 0.1
