"""Whatever threads decode at once, even for the first time in a process, they decode; the process does not crash."""

from __future__ import annotations

import subprocess
import sys

import pytest

# msgspec learns a struct when it is first decoded. Each child that is forked has learned nothing yet but by importing.
RACE = """
import os, sys, threading
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.domain.views import SessionView
from gangline.store.journal.entries import Appended, Entry, EntryHead
from gangline.store.sql.leasing import Standing

sys.setswitchinterval(1e-6)
data = encode_msgpack({record})

def decode(start):
    start.wait()
    decode_msgpack(data, {kind})

def race():
    start = threading.Barrier(8)
    threads = [threading.Thread(target=decode, args=[start]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

for _ in range(20):
    if (pid := os.fork()) == 0:
        race()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


RECORDS = {
    "SessionResult": "SessionResult(session_id='s', task_id='t', node_id='n', attempt=1, fence=1, outcome='completed')",
    "SessionView": "SessionView(session_id='s', task_id='t', sample_index=0, state='queued', attempt=1, max_attempts=3,"
    " fence=0, created_at=0.0)",
    "Standing": "Standing(max_attempts=3)",
    "Entry": "Appended('s', 1, ())",
    "EntryHead": "Appended('s', 1, ())",
}


@pytest.mark.parametrize(("kind", "record"), RECORDS.items())
def test_threads_that_decode_a_record_for_the_first_time_at_once_do_not_crash(kind: str, record: str) -> None:
    program = RACE.format(kind=kind, record=record)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0"] * 20
