"""A node looks at an object once for cycles, at all of them again when memory grew, and lets threads give way soon."""

from __future__ import annotations

import subprocess
import sys
import textwrap

_SETTLED = """
import asyncio
import gc
import sys
import weakref
from gangline.node.health import interpreter
class Link:
    pass
def cycle():
    one, other = Link(), Link()
    one.next, other.next = other, one
    return one
before = gc.get_threshold(), len(gc.get_objects())
interpreter.settle_interpreter()
"""


def run(program: str) -> None:
    settled = _SETTLED + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", settled], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_was_loaded_is_not_looked_at_again() -> None:
    run("""
        assert gc.get_freeze_count() > 0.9 * before[1], gc.get_freeze_count()
        assert len(gc.get_objects()) < 0.1 * before[1], len(gc.get_objects())
        assert gc.get_threshold()[0] > before[0][0] and gc.isenabled()
        assert sys.getswitchinterval() < 0.001
    """)


def test_what_lives_on_is_looked_at_once_and_freed_by_its_last_reference() -> None:
    run("""
        kept = [cycle() for _ in range(100_000)]
        assert len(gc.get_objects()) < 10_000, len(gc.get_objects())
        single = Link()
        gone = weakref.ref(single)
        gc.collect()
        del single
        assert gone() is None
    """)


def test_a_young_cycle_is_found_soon() -> None:
    run("""
        gone = weakref.ref(cycle())
        kept = [[] for _ in range(2 * interpreter._YOUNG)]
        assert gone() is None
    """)


def test_a_cycle_that_outlived_its_look_is_found_when_memory_has_grown() -> None:
    run("""
        async def main():
            interpreter._CHECK_EVERY_S, interpreter._GROWN_BYTES, interpreter._GROWN_SHARE = 0.01, 32 << 20, 0.0
            collecting = asyncio.create_task(interpreter.collect_forever())
            await asyncio.sleep(0.05)
            old = cycle()
            gone = weakref.ref(old)
            gc.collect()
            del old
            gc.collect()
            await asyncio.sleep(0.05)
            assert gone() is not None
            old = cycle()
            old.body = b"x" * (64 << 20)
            gc.collect()
            del old
            while gone() is not None:
                await asyncio.sleep(0.01)
            collecting.cancel()
        asyncio.run(asyncio.wait_for(main(), 30))
    """)
