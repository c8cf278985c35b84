"""When a step has enough, and what its entry in the ledger may say."""

import msgspec
import pytest
from factories import make_manifest
from hypothesis import given
from hypothesis import strategies as st

from protocol.batches import Tally, fault_of, how_it_ends, is_trained, most_submissions, pack_bits, unpack_bits
from protocol.errors import MalformedError
from protocol.records import Batch, BatchSpec

KEYS = tuple(bytes([number]) * 32 for number in range(1, 20))


def run(**batch):
    """Submissions of two groups of two; a batch is 8 rollouts."""
    return make_manifest(batch=BatchSpec(rollouts_per_step=8, max_staleness=1, total_steps=3, **batch))


FILTERED = run(signal_only=True, max_tries=3, deadline_s=60.0, minimum_share=0.5)


def entry(submissions, *, silent=(), ended="whole"):
    return Batch(
        run_id=b"r" * 32,
        step=0,
        submissions=KEYS[:submissions],
        issued_at_ms=1,
        ended=ended,
        silent=pack_bits([group in silent for group in range(2 * submissions)]),
    )


@pytest.mark.parametrize(
    ("submissions", "rollouts", "waited_s", "ending"),
    [
        (0, 0, 0, None),
        (2, 8, 0, "whole"),
        (3, 6, 59, None),
        (3, 6, 60, "deadline"),
        (1, 4, 60, "deadline"),
        (1, 2, 60, None),  # below the share, and not for want of signal: nobody is there
        (2, 0, 60, "deadline"),  # a whole batch was handed in, and none of it teaches anything
        (6, 6, 0, "tries"),
        (6, 8, 99, "whole"),
    ],
)
def test_a_step_ends_when_it_has_enough_or_has_tried_enough(submissions, rollouts, waited_s, ending):
    assert how_it_ends(FILTERED, Tally(submissions, rollouts), waited_s=waited_s) == ending


def test_without_a_filter_and_a_deadline_only_a_whole_batch_ends_a_step():
    plain = run()
    assert most_submissions(plain) == 2
    assert how_it_ends(plain, Tally(1, 4), waited_s=1e9) is None
    assert how_it_ends(plain, Tally(2, 8), waited_s=0) == "whole"


def test_a_batch_below_the_least_share_is_not_trained():
    assert is_trained(FILTERED, Tally(6, 4))
    assert not is_trained(FILTERED, Tally(6, 2))
    assert not is_trained(run(signal_only=True, minimum_share=1e-6), Tally(6, 0)), "nothing cannot be trained on"


@pytest.mark.parametrize(
    ("batch", "waited_s", "fault"),
    [
        (entry(2), 0, ""),
        (entry(3, silent={1, 4}), 0, ""),
        (entry(3, silent={1, 4, 5}), 0, "ended by whole, and has 6 of 8 rollouts from 3 submissions"),
        (entry(3, silent={1, 4, 5}, ended="deadline"), 59, "ended by deadline"),
        (entry(3, silent={1, 4, 5}, ended="deadline"), 60, ""),
        (entry(3, silent={1, 4, 5}, ended="tries"), 60, "ended by tries"),
        (entry(6, silent=set(range(9)), ended="tries"), 0, ""),
        (entry(7, silent=set(range(9)), ended="tries"), 0, "7 submissions; a step takes 6 at most"),
        (msgspec.structs.replace(entry(2), silent=b""), 0, "0 bytes of flags for 4 groups"),
        (msgspec.structs.replace(entry(2), silent=b"\x10"), 0, "beyond the last group"),
    ],
)
def test_an_entry_must_be_what_the_manifest_allows(batch, waited_s, fault):
    """A trainer that drops rollouts it does not like, or trains on less than the run agreed on."""
    found = fault_of(FILTERED, batch, waited_s=waited_s)
    assert fault in found
    assert bool(found) == bool(fault)


def test_a_run_without_a_filter_leaves_nothing_out():
    assert fault_of(run(), msgspec.structs.replace(entry(2), silent=b""), waited_s=0) == ""
    assert fault_of(run(), entry(2, silent={1}), waited_s=0)
    assert fault_of(run(deadline_s=5.0), entry(2, silent={1}), waited_s=0)
    assert fault_of(run(), msgspec.structs.replace(entry(2), silent=b"", ended="tries"), waited_s=0)


@given(st.lists(st.booleans(), max_size=70))
def test_flags_survive_packing(flags):
    assert unpack_bits(pack_bits(flags), len(flags)) == flags
    with pytest.raises(MalformedError):
        unpack_bits(pack_bits(flags) + b"\0", len(flags))
