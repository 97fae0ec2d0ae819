"""What only the collector of cycles would free. A node's looks at an object once, so what lives longer stays."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

_COUNTED = re.compile(r"gangline\.(?!serving\.|models\.language\.|models\.engine_server\.)").match


@contextmanager
def counted_cycles() -> Generator[Counter[str]]:
    """Classes of Gangline's objects that were made in the block, are used by nothing, and lie in cycles.

    The counter is filled when the block ends. Left out is what an engine has, whose process has the usual collector.
    A node that ran in this process before has left its settings of the collector.
    """
    found: Counter[str] = Counter()
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(name for one in gc.garbage if _COUNTED(name := _name(type(one))))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.callbacks[:] = callbacks


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
