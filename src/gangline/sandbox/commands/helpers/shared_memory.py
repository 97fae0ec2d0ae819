"""Set the size of /dev/shm in a running sandbox whose launcher does not. Imports nothing inside the sandbox."""

from __future__ import annotations

import os

from gangline.sandbox.commands.helpers.namespaces import enter, resize_memory

TYPE_CHECKING = False  # see `forkserver`
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(fds: Sequence[int], num_bytes: int) -> None:
    """fds: the socket for the answer, and an open `/proc/<pid>` folder of the sandbox's first process.

    Raises: OSError.
    """
    enter(fds[1], ("mnt",))
    resize_memory("/dev/shm", num_bytes)
    os.write(fds[0], b"ok")
