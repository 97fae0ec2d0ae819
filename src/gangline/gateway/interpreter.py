"""Settings of the interpreter in a node's process: the garbage collector, and how often threads give way.

Modules, classes and schemas that a node loaded at its start live as long as it does. They are put out of the
collector's sight, which otherwise looks at all of them again and again, for tens of milliseconds while no call goes on.
A call makes many small objects and next to no cycles, so the collector runs less often.

Threads read and write large requests. Each time that the event loop has waited for a socket it needs the interpreter's
lock back, and a busy thread gives it up only when the switch interval is over: 5 ms by default, some ten times a call.
"""

from __future__ import annotations

import gc
import sys

__all__ = ["settle_interpreter"]

_THRESHOLDS = (10_000, 20, 20)
"""Allocations less releases before the youngest are looked at; how often until the next generation is."""
_SWITCH_S = 0.0005


def settle_interpreter() -> None:
    """Apply the settings to the whole process. Call it once, when the process has begun to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_S)
