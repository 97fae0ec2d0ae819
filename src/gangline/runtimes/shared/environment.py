"""The clean environment that every command of a runtime gets, and how a command is written down."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gangline.domain.errors import InvalidRequest

__all__ = ["argv_of", "clean_environment", "exposed_folders", "image_environment"]

_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def exposed_folders(expose: Sequence[Path]) -> list[Path]:
    """Those that exist, each once, in the same order, without those inside another or /usr, which is seen anyway."""
    there = [path for path in dict.fromkeys(expose) if path.is_absolute() and path.is_dir()]
    outer = {Path("/usr"), *there}
    return [path for path in there if path != Path("/usr") and outer.isdisjoint(path.parents)]


def clean_environment(expose: Sequence[Path], home: str, extra: Mapping[str, str]) -> dict[str, str]:
    """PATH, HOME, LANG and `extra`; PATH begins with the programs of the exposed folders."""
    return {"PATH": ":".join([*_programs(expose), _SYSTEM_PATH]), "HOME": home, "LANG": "C.UTF-8", **extra}


def image_environment(
    expose: Sequence[Path], home: str, image: Mapping[str, str], extra: Mapping[str, str]
) -> dict[str, str]:
    """The same on top of an image's variables. Its own programs come before those of the exposed folders."""
    path = [image.get("PATH", _SYSTEM_PATH), *_programs(expose)]
    return {"LANG": "C.UTF-8", **image, "PATH": ":".join(path), "HOME": home, **extra}


def _programs(expose: Sequence[Path]) -> list[str]:
    """As strings: this is done for each command."""
    bins = [f"{folder}/{name}" for folder in expose for name in ("bin", "node_modules/.bin")]
    return [folder for folder in dict.fromkeys(bins) if not folder.startswith("/usr/") and os.path.isdir(folder)]


def argv_of(command: str | Sequence[str]) -> list[str]:
    """A string goes to the shell. Raises: InvalidRequest when it is empty."""
    argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv or not argv[0]:
        raise InvalidRequest("a command must name a program.")
    return argv
