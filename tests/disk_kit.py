"""A disk that takes no more, without one: the operating system refuses to let any file grow."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(*, room: int = 0) -> Iterator[None]:
    """No file grows beyond `room` bytes. Of this process, so that no test beside it is struck."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
