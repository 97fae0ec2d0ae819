"""How a node's process collects its garbage.

What a node loaded at its start (modules, classes, schemas) lives as long as it does: it is put out of the collector's
sight, which else looks at all of it again and again, and for tens of milliseconds while no call goes on. A call makes
many small objects and next to no cycles, so the collector is asked less often.
"""

from __future__ import annotations

import gc

__all__ = ["settle_heap"]

_THRESHOLDS = (10_000, 20, 20)
"""Allocations less releases before the youngest are looked at; how often until the next generation is."""


def settle_heap() -> None:
    """To be called once, when the process has begun to serve. It holds for all of the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
