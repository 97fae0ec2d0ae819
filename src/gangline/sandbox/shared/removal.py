"""Removal of what an untrusted program has written. Standard library alone: it also runs inside sandboxes."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path


def remove_tree(path: Path) -> None:
    """Remove a file, or a folder with its content. Files that cannot be removed are still there afterwards.
    Blocking."""
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
    """Remove files of this user's subordinate ids, the remains of a container with its own root."""
    as_root = ("unshare", "--user", "--map-root-user", "--map-auto", "--")
    with suppress(OSError):
        for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            subprocess.run([*as_root, *command, "--", path], check=False, capture_output=True)
