"""Settings of the interpreter in a node's process: garbage collection, how often threads give way, and freed memory.

Modules, classes and schemas that a node loaded at its start live as long as it does. They are put out of the
collector's sight, which otherwise looks at all of them again and again, for tens of milliseconds while no call goes on.
A call makes many small objects and next to no cycles, so the collector runs less often.

Threads read and write large requests. Each time that the event loop has waited for a socket it needs the interpreter's
lock back, and a busy thread gives it up only when the switch interval is over: 5 ms by default, some ten times a call.

A large request is copied several times, and a copy into memory that is new to the process takes some five times as long
as one into memory that it had before. So some of the freed memory is kept (with glibc).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress

__all__ = ["settle_interpreter"]

_THRESHOLDS = (10_000, 20, 20)
"""Allocations less releases before the youngest are looked at; how often until the next generation is."""
_SWITCH_S = 0.0005
_KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Source: malloc.h of glibc."""


def settle_interpreter() -> None:
    """Apply the settings to the whole process. Call it once, when the process has begun to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_S)
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(option, _KEPT_BYTES)
