"""Files that stay when a sandbox has been stopped, because the agent made them hard to remove."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

from support.hostility.attack import Assault, Attacks
from support.hostility.grounds import Grounds

ATTACKS = Attacks("folders of ended sessions")

_LONGEST_S = 20.0
_MESSES = {
    "folders_that_cannot_be_entered_stay": "mkdir -p a/b && touch a/b/c && chmod 000 a/b a",
    "folders_that_cannot_be_written_stay": "mkdir -p a/b && touch a/b/c && chmod 555 a/b a",
    "a_working_folder_that_cannot_be_entered_stays": "touch a; chmod 000 . ~",
    "folders_deeper_than_any_path_stay": (
        "python3 -c \"import os\nfor _ in range(3000): os.mkdir('d' * 20); os.chdir('d' * 20)\""
    ),
    "an_immutable_file_stays": "touch a; chattr +i a 2>/dev/null; mkdir b; touch b/c; chattr +a b 2>/dev/null; true",
    "a_mount_in_the_working_folder_stays": (
        "mkdir m; mount -t tmpfs none m 2>/dev/null && touch m/x || "
        "(unshare -Urm sh -c 'mount -t tmpfs none m; touch m/x ready; sleep 1000' >/dev/null 2>&1 </dev/null &); true"
    ),
}
"""The agent's action -> the name of a possible leftover."""


def _leaves(shell: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        async with grounds.sandbox() as handle:
            folder = grounds.bench.root / handle.runtime_id
            result = await handle.exec(shell)
            assert result.ok, result
            begun = time.monotonic()
            await handle.stop()
            took_s = time.monotonic() - begun
        left = await asyncio.to_thread(os.path.lexists, folder)
        if left:
            await asyncio.to_thread(_removed, folder)
        if took_s > _LONGEST_S:
            return f"the removal took {took_s:.0f} s"
        return f"{folder} is still there" if left else None

    return run


def _removed(folder: Path) -> None:
    """By all means that root has."""
    lines = 'umount -l "$1"/work/m; chattr -R -f -i -a "$1"; rm -rf "$1"'
    subprocess.run(["sh", "-c", lines, "sh", folder], capture_output=True, check=False)


for _name, _shell in _MESSES.items():
    ATTACKS.add(_name, _leaves(_shell), needs_isolation="immutable" in _name or "mount" in _name)
