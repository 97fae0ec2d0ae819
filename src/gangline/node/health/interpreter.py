"""Interpreter settings of a node's process: garbage collection, the threads' switch interval, and freed memory.

The cyclic collector examines young objects repeatedly until they are old, then all old ones, and no call proceeds
meanwhile: 300 ms with 2,000 sessions, which keep 400,000 objects. It rarely finds anything. So an object is examined
once, soon after its creation, and is then frozen out of the collector's view; its last reference still frees it. A
cycle that survives that examination is found when all objects are examined again: rarely, or after memory grew.

Threads read and write large requests. Each time the event loop has waited for a socket it needs the interpreter's lock
back, and a busy thread releases it only after the switch interval: 5 ms by default, some ten times per call.

A large request is copied several times, and a copy into memory that is new to the process takes some five times as long
as into memory it already had. So some freed memory is kept (with glibc).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import sys
import time
from contextlib import suppress

_YOUNG = 2_000
"""Allocations minus releases before the youngest objects are examined."""
_ALL_EVERY_S, _ALL_SHARE = 300.0, 0.001
"""While memory does not grow, full examinations are at least this far apart and take at most this share of the time."""
_GROWN_BYTES, _GROWN_SHARE = 256 << 20, 0.25
"""Growth since the last full examination, in bytes and as a share, after which memory may be held by cycles."""
_CHECK_EVERY_S = 2.0
_SWITCH_S = 0.0005
_KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Source: malloc.h of glibc."""


def settle_interpreter() -> None:
    """Apply the settings to the whole process. Call once, when the process has begun to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
    gc.callbacks.append(_put_out_of_sight)
    sys.setswitchinterval(_SWITCH_S)
    with suppress(OSError, AttributeError):  # not available with another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(option, _KEPT_BYTES)


def _put_out_of_sight(phase: str, _told: dict[str, int]) -> None:
    if phase == "stop":
        gc.freeze()


async def collect_forever() -> None:
    """Examine all objects from time to time. Call after `settle_interpreter`."""
    kept_bytes, due_at = _resident_bytes(), time.monotonic() + _ALL_EVERY_S
    while True:
        await asyncio.sleep(_CHECK_EVERY_S)
        grown_bytes = _resident_bytes() - kept_bytes
        if time.monotonic() < due_at and grown_bytes < max(_GROWN_BYTES, _GROWN_SHARE * kept_bytes):
            continue
        began = time.monotonic()
        gc.disable()  # a collection in another thread would freeze them again
        gc.unfreeze()
        gc.collect()
        gc.enable()
        ended = time.monotonic()
        kept_bytes, due_at = _resident_bytes(), ended + max(_ALL_EVERY_S, (ended - began) / _ALL_SHARE)


def _resident_bytes() -> int:
    """0 if the system does not report it: then only time counts."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
