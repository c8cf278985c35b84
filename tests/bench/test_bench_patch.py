"""What `python -m bench patch` measures: the forms that patches are compared with, on weights that moved a little."""

from __future__ import annotations

import numpy as np

from bench import patch


def moved_weights(share: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    base = (rng.normal(0, 0.02, 640 * 500).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return base, base + (rng.random(base.size) < share)


def test_a_patch_is_smaller_than_the_other_forms():
    base, target = moved_weights(0.01)
    figures = patch._sizes("case", base, target.astype(np.uint16))
    assert 0.9 < figures["case_changed_percent"] < 1.1
    assert figures["case_ratio"] > 2 * figures["case_coo_ratio"] > 2 * figures["case_raw_ratio"]


def test_no_change_can_be_measured():
    base, _ = moved_weights(0)
    assert patch._sizes("case", base, base)["case_changed_percent"] == 0


def test_speeds_are_those_of_whole_rounds():
    base, target = moved_weights(0.01)
    figures = patch._speeds(base, target.astype(np.uint16), 1)
    assert {"encode_mb_per_s", "decode_mb_per_s", "pack_mb_per_s"} < figures.keys()
    assert figures["packed_ratio"] > 1.3
