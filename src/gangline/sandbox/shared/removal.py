"""Removes files that an untrusted program has written. Standard library only, since it also runs inside sandboxes."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path


def remove_tree(path: Path) -> None:
    """Remove a file, or a folder with its content. Leaves files that cannot be removed. Blocking."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwx", "--", path], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--", path], check=False, capture_output=True)
        if os.path.lexists(path) and os.geteuid() != 0:
            _remove_as_subordinate(path)


def _remove_as_subordinate(path: Path) -> None:
    """Remove files owned by this user's subordinate ids, left by a container with its own root."""
    as_root = ("unshare", "--user", "--map-root-user", "--map-auto", "--")
    with suppress(OSError):
        for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            subprocess.run([*as_root, *command, "--", path], check=False, capture_output=True)
