"""Checkpoints without walls: a copy as a careless program makes it, which follows links, opens everything, asks for
the owner's rights, and cleans up nothing."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from gangline.domain.errors import RuntimeFailed

__all__ = ["ENDLESS_BYTES", "copied"]

ENDLESS_BYTES = 8 << 20
"""What is read and written of a file without end. A truly careless program would continue."""
_COPY = f"""
import os, stat, sys
def copy(source, target):
    os.makedirs(target, exist_ok=True)
    for name in os.listdir(source):
        here, there = source + "/" + name, target + "/" + name
        try:
            kind = os.lstat(here)
        except FileNotFoundError:  # the agent has renamed it meanwhile
            continue
        if os.path.isdir(here):
            copy(here, there)
        elif stat.S_ISCHR(kind.st_mode) or stat.S_ISBLK(kind.st_mode):
            os.mknod(there, kind.st_mode, kind.st_rdev)
        else:
            try:
                old = open(here, "rb")
            except FileNotFoundError:
                continue
            with old, open(there, "wb") as new:
                new.write(old.read({ENDLESS_BYTES}))
                mode = os.fstat(old.fileno()).st_mode
            os.chmod(there, stat.S_IMODE(mode))
copy(sys.argv[1], sys.argv[2])
"""


async def copied(source: Path, target: Path) -> None:
    """Copy a folder. Raises: RuntimeFailed; what it has made is still there."""
    argv = [sys.executable, "-c", _COPY, str(source), str(target)]
    if os.geteuid() == 0:
        bare = "-dac_override,-dac_read_search"
        argv = ["setpriv", f"--inh-caps={bare}", f"--bounding-set={bare}", *argv]
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeFailed(f"the files were not copied: {errors.decode(errors='replace')[-300:]}")
