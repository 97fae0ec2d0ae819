"""Folders of a sandbox as its agent may have left them: closed to their owner, or refused by the file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gangline.domain.errors import RuntimeFailed

__all__ = ["opened_folder", "refusing"]


@contextmanager
def refusing() -> Generator[None]:
    """Raises: RuntimeFailed for an error of the file system, which an agent can cause."""
    try:
        yield
    except OSError as error:
        raise RuntimeFailed(f"the files of a sandbox cannot be kept as they are: {error.strerror}.") from error


@contextmanager
def opened_folder(path: Path) -> Generator[tuple[int, int]]:
    """Descriptor and mode of a folder. One that its owner, our user, has closed to itself is open meanwhile."""
    held = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found, again = os.fstat(held), f"/proc/self/fd/{held}"
        mode = stat.S_IMODE(found.st_mode)
        is_closed = os.geteuid() == found.st_uid != 0 and mode & stat.S_IRWXU != stat.S_IRWXU
        if is_closed:
            os.chmod(again, mode | stat.S_IRWXU)
        try:
            fd = os.open(again, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield fd, mode
            finally:
                os.close(fd)
        finally:
            if is_closed:
                os.chmod(again, mode)
    finally:
        os.close(held)
