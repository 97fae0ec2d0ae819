"""Make a folder the root of a running sandbox, for its first processes too. Imports nothing inside the sandbox.

Those processes are the host's own and run on; whatever starts afterwards sees the folder's files alone.
"""

from __future__ import annotations

import os

from gangline.sandbox.commands.helpers.namespaces import change_root, enter

TYPE_CHECKING = False  # see `forkserver`
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(fds: Sequence[int], folder: str) -> None:
    """fds: the socket for the answer, and an open `/proc/<pid>` folder of the sandbox's first process. folder: a mount
    point in the sandbox.

    Raises: OSError.
    """
    enter(fds[1], ("mnt",))
    change_root(folder)
    os.write(fds[0], b"ok")
