"""Makes memory resident before it is written to.

The kernel provides new memory page by page on the first write: 2 to 15 us per page on a virtual machine, so up to 30 ms
for 8 MB. In Python that mostly happens while holding the interpreter's lock, so all other threads wait.
"""

from __future__ import annotations

LARGE_BYTES = 256 << 10
"""Size from which it is worthwhile."""


def make_resident(num_bytes: int) -> None:
    """Make the calling thread's next block of that size come from resident memory. Blocking; does not hold the
    interpreter's lock.

    The kernel fills a block that is freed at once, and the allocator reuses it if freed memory is kept (see
    `settle_interpreter`). Otherwise this only costs time.
    """
    if num_bytes >= LARGE_BYTES:
        with open("/dev/zero", "rb", buffering=0) as zeros:
            zeros.read(num_bytes + 4096)  # room for an object's header
