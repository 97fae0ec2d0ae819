"""Checks of `gangline doctor` in the data folder: who can read it, who can replace it, whether sandboxes see it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gangline.cli.machine.checks import Check
from gangline.domain.errors import OtherVersion
from gangline.sandbox.bubblewrap.command_line import HOST_ROOTS
from gangline.settings.machine import Settings
from gangline.store.journal.marker import check_journal
from gangline.store.sql.database import check_database

__all__ = ["check_data_folder"]

_SHOWN = 5
_MAX_LOOKED_AT = 20_000


def check_data_folder(settings: Settings) -> Check:
    folder = settings.data_dir.absolute()
    found: list[str] = []
    advice: list[str] = []
    try:
        check_database(settings.database_url or folder / "server" / "gangline.db")
    except OtherVersion as error:
        return Check(
            name="data folder", state="missing", found="the database is of a newer version", advice=error.message
        )
    for journal in sorted(folder.glob("nodes/*/journal")):
        try:
            check_journal(journal)
        except OtherVersion as error:
            return Check(name="data folder", state="missing", found="a journal is unreadable", advice=error.message)
    if readable := list(islice(_readable(folder), _SHOWN + 1)):
        names = ", ".join(str(path) for path in readable[:_SHOWN]) + (" and more" if len(readable) > _SHOWN else "")
        found.append(f"other users can read {names}")
        advice.append(f"chmod -R go= {folder}")
    if loose := [str(parent) for parent in folder.parents if _replaceable_in(parent)]:
        found.append(f"other users can replace it, by {', '.join(loose)}")
        advice.append(f"chmod o-w {' '.join(loose)}, or choose another folder with --data")
    if seen := [str(root) for root in _seen_by_sandboxes(settings) if root in (folder, *folder.parents)]:
        found.append(f"it is in {', '.join(seen)}, which sandboxes see")
        advice.append("choose a folder elsewhere with --data or GANGLINE_DATA: it is masked there, and needs no mask")
    if found:
        return Check(name="data folder", state="optional", found="; ".join(found), advice="; ".join(advice))
    return Check(name="data folder", state="ok", found=f"{folder} is closed to other users and to sandboxes")


def _readable(folder: Path) -> Iterator[Path]:
    """Files that others can reach and read. A closed folder closes its content; sandboxes' own files are left out."""
    if not folder.is_dir() or any(not _mode(parent) & stat.S_IXOTH for parent in folder.parents):
        return
    looked_at = 0
    waiting = [folder]
    while waiting and looked_at < _MAX_LOOKED_AT:
        path = waiting.pop()
        mode = _mode(path)
        looked_at += 1
        if mode & stat.S_IROTH:
            yield path
        if mode & (stat.S_IXOTH | stat.S_IXGRP) and path.is_dir() and path.name != "runtimes":
            waiting += _within(path)


def _within(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if not entry.is_symlink()]
    except OSError:
        return []


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0


def _replaceable_in(parent: Path) -> bool:
    """Whether others may rename entries of a folder, as in one that all may write to; in /tmp only owners may."""
    mode = _mode(parent)
    return bool(mode & (stat.S_IWOTH)) and not mode & stat.S_ISVTX


def _seen_by_sandboxes(settings: Settings) -> Iterator[Path]:
    yield from (Path("/") / name for name in HOST_ROOTS)
    yield from (path.absolute() for path in settings.expose)
