"""Weights on the disk that trainer and engines share: a folder for each update, whole or not there."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from gangline.domain.errors import InvalidRequest
from gangline.machine.durable import making

__all__ = ["WeightFolders"]

_NAME = re.compile(r"v\d+(\.\d+)?")


class WeightFolders:
    """keep_last: folders that stay when newer ones come; at least 1."""

    def __init__(self, root: Path, keep_last: int) -> None:
        if keep_last < 1:
            raise ValueError("at least the last weights must be kept: engines read them.")
        self._root = root.resolve()
        self._keep_last = keep_last

    def write(self, save: Callable[[Path], None], version: int) -> Path:
        """A new folder with the files that `save` writes; a second one of a version does not change the first.
        Blocking.

        Raises: DiskFull; InvalidRequest when there are no safetensors: vLLM 0.32 takes such a folder, and dies at its
            next call.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._free(version)
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with making(partial):
            partial.mkdir()
            save(partial)
            if not any(partial.glob("*.safetensors")):
                raise InvalidRequest(f"`save` wrote no *.safetensors into {partial}: engines load nothing else.")
        return partial.rename(path)

    def prune(self, reading: Collection[Path]) -> None:
        """Remove all but the newest, and but those that an engine may still be `reading`. Blocking."""
        found = [path for path in self._root.iterdir() if _NAME.fullmatch(path.name)]
        found.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in found[: -self._keep_last]:
            if path not in reading:
                shutil.rmtree(path, ignore_errors=True)

    def _free(self, version: int) -> Path:
        names = itertools.chain([f"v{version}"], (f"v{version}.{number}" for number in itertools.count(2)))
        return next(path for name in names if not (path := self._root / name).exists())


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
