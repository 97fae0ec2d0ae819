"""Recognises errors caused by too many open files, even if wrapped in other errors."""

from __future__ import annotations

import errno
import resource

from gangline.domain.errors import TooManyFiles

_ENOUGH = 65_536


def out_of_files(error: BaseException | None) -> TooManyFiles | None:
    """Returns the error to report instead of `error` if EMFILE or ENFILE caused it; else None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, TooManyFiles):
            return error
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return TooManyFiles(_message(error.errno))
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _message(number: int) -> str:
    if number == errno.ENFILE:
        return "this machine has as many files open as its kernel allows. Raise fs.file-max by `sysctl`."
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process has the {limit} files open that it may have (`ulimit -n`). Start the node with "
        f"`ulimit -n {max(_ENOUGH, 2 * limit)}`, or LimitNOFILE of its service, or lower --run-slots."
    )
