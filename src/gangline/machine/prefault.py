"""Memory that is there before it is written to.

New memory of a process becomes real page by page, when it is first written: 2 to 15 us a page on a virtual machine, so
up to 30 ms for 8 MB. In Python that mostly happens under the interpreter's lock, and all other threads wait.
"""

from __future__ import annotations

__all__ = ["LARGE_BYTES", "make_resident"]

LARGE_BYTES = 256 << 10
"""Size from which it is worth the trouble."""


def make_resident(num_bytes: int) -> None:
    """Let the calling thread's next block of that size come from memory that is real. Blocking; without the lock.

    The kernel fills a block, which is freed at once: the allocator gives it out again where freed memory is kept (see
    `settle_interpreter`). Elsewhere this does nothing but take its time.
    """
    if num_bytes >= LARGE_BYTES:
        with open("/dev/zero", "rb", buffering=0) as zeros:
            zeros.read(num_bytes + 4096)  # room for the head of an object
