"""Numeric users of sandboxes, held on the host so that no two live sandboxes share one.

A user is held by a lock on a file named after its id, which all nodes of the machine see. The files belong to root,
which alone can assign users. The kernel releases the lock when its holder (the node's keeper) ends for any reason, and
its sandboxes end too. The user's keyrings, which the kernel keeps longer, are cleared before the next holder can use
them.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from contextlib import suppress
from pathlib import Path

from gangline.domain.errors import RuntimeFailed
from gangline.sandbox.shared.keyrings import clear_keyrings

FIRST_UID = 0x70000000
NUM_UIDS = 1 << 16
_FOLDER = Path("/run/gangline/users")


def grader_uid(uid: int) -> int:
    """The user `grader` of the sandbox whose agent is `uid`. No other sandbox uses it while `uid` is held."""
    return uid + NUM_UIDS


class HeldUser:
    """Held from construction until `release`, or the end of this process."""

    def __init__(self, seed: str, folder: Path = _FOLDER, *, has_keys: bool = False) -> None:
        """
        seed: the same seed tries the same user first.
        has_keys: whether its programs may use keyrings.
        Blocking. Raises: RuntimeFailed when all are in use.
        """
        first = zlib.crc32(seed.encode())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(NUM_UIDS):
                self.uid = FIRST_UID + (first + number) % NUM_UIDS
                self._file = folder / str(self.uid)
                if (fd := _locked(self._file)) is None:
                    continue
                if has_keys and not clear_keyrings((self.uid, grader_uid(self.uid))):
                    os.close(fd)
                    continue
                self._fd = fd
                return
        except OSError as error:
            raise RuntimeFailed(f"no user can be held for a sandbox in {folder}: {error.strerror}.") from error
        raise RuntimeFailed(f"all {NUM_UIDS} users for sandboxes are in use on this machine.")

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self._file.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _locked(file: Path) -> int | None:
    """A descriptor that locks the file; None if another process holds it, or has just released it."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == file.stat().st_ino:  # otherwise it was removed in between
            return fd
    os.close(fd)
    return None
