"""Host folders that no sandbox may see at any path: data folders of servers and nodes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from gangline.domain.errors import InvalidRequest
from gangline.domain.sandbox import RuntimeStart


def masked(hidden: Iterable[Path], seen: Mapping[str, Path]) -> list[str]:
    """Paths inside at which hidden folders appear. `seen`: path inside -> host folder that is bound there. Blocking."""
    found: dict[str, None] = {}
    for folder in (Path(os.path.realpath(one)) for one in hidden if os.path.isdir(one)):
        for inside, source in seen.items():
            real = Path(os.path.realpath(source))
            if folder == real or real in folder.parents:
                found[str(PurePosixPath(inside) / folder.relative_to(real))] = None
    return list(found)


def refuse_hidden(start: RuntimeStart, python: Sequence[Path]) -> None:
    """Raises: InvalidRequest when the folder named as an image, or one of the Python environment's, is, or lies in, a
    hidden one: both are seen although it is hidden, with other sessions' files in it. An image around a hidden one is
    the machine's own root, or near it: files that are not the agent's would be copied into the session's folders.
    """
    hidden = {Path(os.path.realpath(one)) for one in start.hidden}
    for folder in (Path("/", start.spec.image or ""), *python):
        real = Path(os.path.realpath(folder))
        if not hidden.isdisjoint((real, *real.parents)):
            named = f"{str(folder)!r}, which runtime.image or runtime.python names,"
            raise InvalidRequest(f"{named} lies in a data folder, which no sandbox may see.")
    image = os.path.realpath(start.spec.image or "")
    if (start.spec.image or "").startswith("/") and any(Path(image) in folder.parents for folder in hidden):
        raise InvalidRequest(f"runtime.image {start.spec.image!r} has a data folder in it: name a folder of its own.")


class FirstLife:
    """The folders that a sandbox sees only for its prepare actions: in its first life, until `kill`."""

    def __init__(self, start: RuntimeStart) -> None:
        self._folders = start.prepare_folders
        self._hidden = start.hidden
        self._is_over = start.base is not None
        """A fork has no such life: it continues where an agent was."""

    def next(self) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """Begin another life. Returns the folders for its prepare actions, and the hidden folders. Blocking.

        Raises: InvalidRequest when a folder is missing.
        """
        if self._is_over:
            return (), (*self._hidden, *self._folders)
        self._is_over = True
        for folder in self._folders:
            if not folder.is_dir():
                raise InvalidRequest(f"prepare_folders: {str(folder)!r} is not a folder on the node's machine.")
        return self._folders, self._hidden
