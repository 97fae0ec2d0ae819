"""Large blocks of memory become real without the interpreter's lock, and before they are written to."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys, threading
import msgspec
from gangline.node.health.interpreter import settle_interpreter
from gangline.machine.prefault import make_resident

data = msgspec.msgpack.encode("a" * (8 << 20))
kept = []

def new_pages():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def decode_all():
    for _ in range(4):
        make_resident(len(data))
        before = new_pages()
        kept.append(msgspec.msgpack.decode(data))  # kept: each one needs memory of its own
        assert new_pages() - before < 100, new_pages() - before

settle_interpreter()
thread = threading.Thread(target=decode_all)
thread.start()
thread.join()
assert len(kept) == 4
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator is glibc's")
def test_a_large_string_is_decoded_without_waiting_for_new_pages() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
