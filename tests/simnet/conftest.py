import copy
from typing import Any

import pytest
from simnet_world import SMALL, make_recording

from simnet.gather import Recording


@pytest.fixture
def small() -> dict[str, Any]:
    """The tables of a scenario with one node of each kind, to change at will."""
    return copy.deepcopy(SMALL)


@pytest.fixture
def recording() -> Recording:
    return make_recording()
