"""What a node's process does before anything else: memory that threads share."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, threading
from node.start import share_arenas
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
share_arenas()
together = threading.Barrier(12)
def take():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(12)]
for each in threads: each.start()
for each in threads: each.join()
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libcs have no such pools")
def test_threads_share_a_few_pools_of_memory():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert 1 <= done.stdout.count("<heap nr=") <= 2
