"""Settings of the interpreter in a node's process: garbage collection, how often threads give way, and freed memory.

The collector of cycles looks at young objects again and again until they are old, then at all old ones, and no call
goes on meanwhile: 300 ms with 2,000 sessions, which keep 400,000 objects. It hardly ever finds anything. So an object
is looked at once, soon after it was made, and is then put out of the collector's sight; its last reference frees it all
the same. A cycle that outlives that look is found when all objects are looked at again: rarely, or when memory grew.

Threads read and write large requests. Each time that the event loop has waited for a socket it needs the interpreter's
lock back, and a busy thread gives it up only when the switch interval is over: 5 ms by default, some ten times a call.

A large request is copied several times, and a copy into memory that is new to the process takes some five times as long
as one into memory that it had before. So some of the freed memory is kept (with glibc).
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
"""Allocations less releases before the youngest objects are looked at."""
_ALL_EVERY_S, _ALL_SHARE = 300.0, 0.001
"""While memory does not grow, looks at all objects are so far apart, and take at most this share of the time."""
_GROWN_BYTES, _GROWN_SHARE = 256 << 20, 0.25
"""Memory that has grown by as much since the last look at all objects, and by this share, may be of cycles."""
_CHECK_EVERY_S = 2.0
_SWITCH_S = 0.0005
_KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Source: malloc.h of glibc."""


def settle_interpreter() -> None:
    """Apply the settings to the whole process. Call it once, when the process has begun to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
    gc.callbacks.append(_put_out_of_sight)
    sys.setswitchinterval(_SWITCH_S)
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(option, _KEPT_BYTES)


def _put_out_of_sight(phase: str, _told: dict[str, int]) -> None:
    if phase == "stop":
        gc.freeze()


async def collect_forever() -> None:
    """Look at all objects now and then, in a process that was settled."""
    kept_bytes, due_at = _resident_bytes(), time.monotonic() + _ALL_EVERY_S
    while True:
        await asyncio.sleep(_CHECK_EVERY_S)
        grown_bytes = _resident_bytes() - kept_bytes
        if time.monotonic() < due_at and grown_bytes < max(_GROWN_BYTES, _GROWN_SHARE * kept_bytes):
            continue
        began = time.monotonic()
        gc.disable()  # another thread's look would put them out of sight again
        gc.unfreeze()
        gc.collect()
        gc.enable()
        ended = time.monotonic()
        kept_bytes, due_at = _resident_bytes(), ended + max(_ALL_EVERY_S, (ended - began) / _ALL_SHARE)


def _resident_bytes() -> int:
    """0 where the system does not say: only the time counts then."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
