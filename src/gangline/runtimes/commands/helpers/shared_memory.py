"""Give /dev/shm of a running sandbox a size, where its launcher gives it none.

For a process of its own: it enters the sandbox's namespaces, and imports nothing there.
"""

from __future__ import annotations

from gangline.runtimes.commands.helpers.namespaces import enter, resize_memory

__all__ = ["main"]


def main(proc_fd: int, num_bytes: int) -> None:
    """`proc_fd`: an open `/proc/<pid>` folder of the sandbox's first process. Raises: OSError."""
    enter(proc_fd, ("mnt",))
    resize_memory("/dev/shm", num_bytes)
