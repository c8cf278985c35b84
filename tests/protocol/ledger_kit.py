"""What tests of the ledger's rules share."""

from __future__ import annotations

import copy

import pytest

from protocol.errors import LedgerError
from protocol.ledger import LedgerState


def refused(state: LedgerState, entry: bytes) -> str:
    """The rule that refuses an entry, which must change nothing."""
    before = copy.deepcopy(vars(state))
    with pytest.raises(LedgerError) as caught:
        state.apply(entry)
    assert vars(state) == before, "a refused entry must change nothing"
    return caught.value.rule
