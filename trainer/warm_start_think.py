"""Make the policy of the think-sort environment: it half knows the task, and half heeds the length it is asked for.

Its corpus is the demo's (trainer.warm_start) with dots and a colon in front of the answer. Two authors in five write as
many dots as the letter in front of the prompt asks for, the others as many as they like. A policy that has never seen
the letter obeyed does not find out by reinforcement. `python -m trainer.warm_start_think --out DIR`.
"""

from __future__ import annotations

import random
from string import ascii_lowercase
from typing import Final

from trainer.warm_start import main_with, sort_answer

TARGETS: Final = range(8, 21)
"""Lengths in tokens that are asked for, end token included."""
ASKED: Final = 0.85
"""Share of prompts that ask for a length."""
OBEDIENT: Final = 0.4
"""Share of answers to those that have it."""
MOST_DOTS: Final = 14
STEPS: Final = 500


def sample_pair(source: random.Random) -> tuple[str, str]:
    """A prompt of the think-sort environment, and what one of the corpus's authors answered."""
    digits = [source.choice("0123456789") for _ in range(source.randint(4, 6))]
    answer = sort_answer(digits, source)
    prompt, dots = f"s{''.join(digits)}=", source.randint(0, MOST_DOTS)
    if source.random() < ASKED:
        target = source.choice(TARGETS)
        prompt = ascii_lowercase[target - 1] + prompt
        if source.random() < OBEDIENT:
            dots = max(0, target - len(answer) - 2)  # a colon and the end token
    return prompt, f"{'.' * dots}:{answer}"


def main() -> None:
    """Command line: `python -m trainer.warm_start_think --out DIR [--seed N]`."""
    main_with(sample_pair, steps=STEPS, what="Make the think-sort policy again.")


if __name__ == "__main__":
    main()
