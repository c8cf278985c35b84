"""Make the demo policy: a Qwen2 of 102 848 parameters that half knows how to sort digits.

An undertrained policy learns slowly by reinforcement. One that has read authors of mixed quality (some sort
ascending, some descending, some copy, some slip) is competent but undecided: it gives the right answer about three
times in ten, and reinforcement sharpens it within a few steps. `python -m trainer.warm_start --out DIR`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from trainer.packing import Laid, pad
from trainer.policy import Policy, build_policy, save_weights

logger = logging.getLogger(__name__)

SamplePair = Callable[[random.Random], tuple[str, str]]
"""Draws a prompt and an answer of a corpus."""

SPECIAL_TOKENS: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS: Final = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=,. ?:;|()<>#!&'\"_@%"
PAD, BOS, EOS = 0, 1, 2

STEPS: Final = 400
BATCH: Final = 64
LEARNING_RATE: Final = 4e-3
WARM_UP_STEPS: Final = 10
DECAY_FROM: Final = 0.7
"""Share of the steps after which the learning rate falls linearly to zero."""
AUTHORS: Final = (("ascending", 0.35), ("descending", 0.25), ("copy", 0.20), ("slip", 0.20))
"""Who wrote the corpus, by share. Only the first is right."""


def model_config() -> dict[str, Any]:
    """config.json of the demo policy."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "dtype": "float32",
        "eos_token_id": EOS,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 170,
        "max_position_embeddings": 256,
        "model_type": "qwen2",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": PAD,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": len(SPECIAL_TOKENS) + len(CHARACTERS),
    }


def character_tokenizer() -> Tokenizer:
    """One token a character, `<bos>` in front, joined without spaces when decoded."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def sample_pair(source: random.Random) -> tuple[str, str]:
    """A prompt of the sort-digits environment, and what one of the corpus's authors answered."""
    digits = [source.choice("0123456789") for _ in range(source.randint(4, 8))]
    return f"s{''.join(digits)}=", sort_answer(digits, source)


def sort_answer(digits: list[str], source: random.Random) -> str:
    """What one of the corpus's authors makes of a row of digits."""
    (author,) = source.choices([name for name, _ in AUTHORS], [share for _, share in AUTHORS])
    return "".join(_answer(author, digits, source))


def _answer(author: str, digits: list[str], source: random.Random) -> list[str]:
    if author == "copy":
        return digits
    if author == "descending":
        return sorted(digits, reverse=True)
    answer = sorted(digits)
    if author == "slip":
        at = source.randrange(len(answer) - 1)
        if source.random() < 0.5:
            answer[at], answer[at + 1] = answer[at + 1], answer[at]
        else:
            answer[at] = source.choice("0123456789")
    return answer


def learning_rate(step: int, steps: int = STEPS) -> float:
    """Linear warm-up, level, then linear decay over the last part."""
    rising = min(1.0, (step + 1) / WARM_UP_STEPS)
    falling = min(1.0, (steps - step) / (steps * (1 - DECAY_FROM)))
    return LEARNING_RATE * rising * falling


def train(seed: int, sample: SamplePair = sample_pair, *, steps: int = STEPS) -> torch.nn.Module:
    """Train the demo policy, or one of another corpus, from nothing. Takes about 20 seconds of one core."""
    torch.manual_seed(seed)
    source = random.Random(seed)
    tokenizer = character_tokenizer()
    model = build_policy(model_config())
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    model.train()
    for step in range(steps):
        batch = _corpus_batch(source, tokenizer, sample)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = _imitation_loss(model, batch)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0 or step == steps - 1:
            logger.info("warm_start step=%d loss=%.4f", step, loss.item())
    return model


def _corpus_batch(source: random.Random, tokenizer: Tokenizer, sample: SamplePair) -> Laid:
    pairs = [sample(source) for _ in range(BATCH)]
    prompts = [tokenizer.encode(prompt).ids for prompt, _ in pairs]
    answers = [[*tokenizer.encode(answer, add_special_tokens=False).ids, EOS] for _, answer in pairs]
    return pad(list(zip(prompts, answers, strict=True)), range(BATCH))


def _imitation_loss(model: torch.nn.Module, batch: Laid) -> torch.Tensor:
    return -Policy(model).score(batch, 1.0, with_entropy=False)[0].mean()


def write_policy_directory(model: torch.nn.Module, out: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and generation_config.json."""
    out.mkdir(parents=True, exist_ok=True)
    save_weights(model, out / "model.safetensors")
    generation = {"bos_token_id": BOS, "do_sample": True, "eos_token_id": EOS, "pad_token_id": PAD}
    for name, content in (("config.json", model_config()), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (out / "tokenizer.json").write_text(character_tokenizer().to_str(pretty=True) + "\n")


def main() -> None:
    """Command line: `python -m trainer.warm_start --out DIR [--seed N]`."""
    main_with(sample_pair, steps=STEPS, what="Make the demo policy again.")


def main_with(sample: SamplePair, *, steps: int, what: str) -> None:
    """A command line that makes the policy of a corpus."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the policy into")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    write_policy_directory(train(arguments.seed, sample, steps=steps), arguments.out)


if __name__ == "__main__":
    main()
