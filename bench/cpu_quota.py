"""A share of a processor for a process, by the kernel's control groups. Needs root.

On a machine with fewer cores than processes, this tells what a process costs from what the others leave it: two
processes with a quarter of a core each do not compete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

__all__ = ["quota"]

PERIOD_US = 20_000
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def quota(pid: int, cores: float) -> Generator[bool]:
    """Whether the process is held to so much of a core within the block; it is not without root and control groups."""
    share_us = int(PERIOD_US * cores)
    name = f"gangline-bench-{os.getpid()}-{pid}"
    is_v1 = (_V1 / "cpu.cfs_quota_us").exists()
    group = (_V1 if is_v1 else _V2) / name
    try:
        group.mkdir()
    except OSError:
        yield False
        return
    try:
        yield _holds(
            group,
            pid,
            {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(share_us)}
            if is_v1
            else {"cpu.max": f"{share_us} {PERIOD_US}"},
        )
    finally:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _holds(group: Path, pid: int, settings: dict[str, str]) -> bool:
    try:
        for name, value in settings.items():
            (group / name).write_text(value)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True
