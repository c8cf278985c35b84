"""The cheats that a scenario or a benchmark can name, and what each does; all else about them is honest.

What contributors compute is in `simnet.zoo.workers`, what they say to the network in `simnet.zoo.roles`; validators
that lie are in `simnet.zoo.validators`. A new cheat is an entry here and a class there.
"""

from __future__ import annotations

from typing import Final

WEIGHTS: Final[dict[str, str]] = {
    "wrong-model": "generates with other weights of the same shape than the checkpoint it names",
    "int8": "generates with weights rounded to 8 bits, a scale per row",
    "int4-g32": "generates with weights rounded to 4 bits, a scale per 32 values",
    "int4-g64": "generates with weights rounded to 4 bits, a scale per 64 values",
    "int8-as-bfloat16": "rounds weights to 8 bits and says that it computes in bfloat16, whose limits are wider",
    "int4-as-bfloat16": "rounds weights to 4 bits (g32) and says that it computes in bfloat16",
    "fine-tuned": "trains the checkpoint three steps further (AdamW, 1e-5) and generates with that",
    "fine-tuned-slightly": "trains the checkpoint three steps further (AdamW, 1e-6) and generates with that",
    "stale-checkpoint": "generates with the checkpoint before the one it names",
}
SAMPLING: Final[dict[str, str]] = {
    "other-prompt": "answers short prompts of its own choice",
    "edited-prompt": "answers its prompt with one token doubled, and records the one that was due",
    "other-temperature": "samples at 0.8 of the run's temperature",
    "other-seed": "samples with noise of its own choice",
    "best-of-n": "draws every answer four times and hands in the one with the best reward",
    "draft-model": "draws tokens with 4-bit weights; proofs and log-probabilities are the right model's",
}
PROOFS: Final[dict[str, str]] = {
    "zero-proofs": "hands in proofs of zero bytes",
    "constant-proofs": "hands in one well-formed constant as every proof",
    "random-proofs": "hands in well-formed proofs of random numbers",
    "swapped-proofs": "hands in each rollout with another one's proofs",
    "short-proofs": "cuts every proof to half its length",
    "missing-proofs": "leaves out the last proof of every rollout",
}
ROWS: Final[dict[str, str]] = {
    "truncated": "stops every answer half-way and calls it the length limit",
    "forced-end": "ends every answer half-way with the end token",
    "flipped-ending": "says of answers that stopped that they ran out of length, and the other way round",
    "forged-reward": "claims reward 1 for every answer",
    "flattered-logprobs": "halves every log-probability",
    "noised-logprobs": "adds noise of 0.01 to every log-probability",
    "shifted-logprobs-as-bfloat16": "lowers every log-probability by 0.25 and says that it computes in bfloat16",
}
FILES: Final[dict[str, str]] = {
    "flipped-length": "signs for twice as many output tokens as its file holds",
    "missing-members": "leaves the worst answer out of every group",
    "repeated-members": "hands in each group's best answer twice, in place of the worst",
    "replayed-file": "hands in its first file again and again",
    "hostile-tokens-negative": "records token ids below 0",
    "hostile-tokens-large": "records token ids beyond the vocabulary",
    "parquet-bomb": "hands in a file that unpacks to gigabytes",
    "malformed-parquet": "hands in a file of noise behind Parquet's magic number",
}
ROLES: Final[dict[str, str]] = {
    "ground-index": "computes four submissions, and hands in the index with the best reward",
    "ground-checkpoint": "computes its submission with every checkpoint it may name, and hands in the best",
    "copied-file": "hands in the newest file of another contributor as its own",
    "two-nodes-one-key": "runs two nodes with one key, neither of which knows what the other hands in",
}
CHEATS: Final[dict[str, str]] = WEIGHTS | SAMPLING | PROOFS | ROWS | FILES | ROLES
"""Of contributors."""
VALIDATORS: Final[dict[str, str]] = {
    "framer": "rejects as made up whatever it is called to judge, and looks at none of it",
    "rubber-stamp": "accepts whatever it is called to judge, says that it checked it, and looks at none of it",
    "uncalled": "rejects as made up whatever anybody hands in, at once, and not only where the lot calls it",
    "forged-votes": "checks, and then signs falsely, for another contributor, or for a submission that is not there",
}
"""Of validators."""
