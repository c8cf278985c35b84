import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedError
from protocol.prompts import prompts_digest

PROMPTS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=5)


def test_golden_digest():
    expected = hashlib.sha256(b"intellect-node/1 prompts" + struct.pack(">6I", 2, 1, 258, 1, 2**32 - 1, 0)).digest()
    assert prompts_digest([[1, 258], [2**32 - 1], []]) == expected
    assert expected.hex() == "99212dfdab79356cd0371479d8042c28ab9d6742dc25728a739f49f9e406f3e0"


@given(PROMPTS, PROMPTS)
def test_other_prompts_have_another_digest(left, right):
    assert (prompts_digest(left) == prompts_digest(right)) == (left == right)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_beyond_32_bits_are_refused(token):
    with pytest.raises(MalformedError, match="32 bits"):
        prompts_digest([[token]])
