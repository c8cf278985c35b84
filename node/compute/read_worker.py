"""The child that opens rollout files of strangers: a few hundred bytes of Parquet can ask for gigabytes.

It runs under a limit on its address space (node.compute.reader sets it) and holds nothing but the file it reads.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec

from node.compute.serve import serve
from protocol.errors import DataDirError, ProtocolError
from protocol.rollouts import read_rollouts


def read(path: str, limits: dict[str, Any]) -> dict[str, Any]:
    """The file's rollouts, or what is wrong with it: the file's fault is a result here, not a failure."""
    try:
        rollouts = read_rollouts(Path(path), **limits)
    except ProtocolError as error:
        return {"malformed": error.message}
    except DataDirError as error:
        if not _sought_nowhere(error):
            raise
        return {"malformed": "it points to a place that no file has"}
    return {"rollouts": msgspec.to_builtins(rollouts, builtin_types=(bytes,))}


def _sought_nowhere(error: DataDirError) -> bool:
    """Whether the system refused a place in the file, which the file's own content names; disks fail otherwise."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EINVAL, errno.EOVERFLOW)


def main() -> None:
    # Imported before the limit is set: threads and pools of a library count against it.
    import pyarrow as pa
    import pyarrow.parquet

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    serve({"read": read})


if __name__ == "__main__":
    main()
