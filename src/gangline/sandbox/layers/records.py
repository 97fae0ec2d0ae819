"""Checkpoints on disk, and their users.

Each is a folder next to its sandbox's: a mark for the reaper, a record, and `files`, which no longer change. A released
checkpoint is kept until no sandbox and no other checkpoint builds on it. The keeper counts these users in memory; when
it dies, so do all sandboxes, and a reaper removes the folders.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gangline.domain.errors import InvalidRequest, NotFound, RuntimeFailed
from gangline.domain.ids import validated_id
from gangline.domain.sandbox import Checkpoint, RuntimeStart
from gangline.sandbox.layers.copying import MAX_DEPTH
from gangline.sandbox.shared.leftovers import remove_folder

FILES = "files"
_RECORD = "layer.json"
_MAY_LOOK = stat.S_IRUSR | stat.S_IXUSR
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, with facts that only its runtime needs."""

    checkpoint: Checkpoint
    uid: int | None
    """Owner of its files; None: the current user."""
    below: tuple[str, ...] = ()
    """Ids of the checkpoints under it, topmost first; empty: its files are complete."""

    @property
    def folder(self) -> Path:
        return Path(self.checkpoint.folder)


_lock = threading.Lock()
_uses: Counter[Path] = Counter()
"""Folder of a checkpoint -> number of sandboxes and checkpoints that build on it."""
_released: dict[Path, Layer] = {}


def spec_digest(start: RuntimeStart) -> str:
    return hashlib.sha256(start.spec.model_dump_json().encode()).hexdigest()


def save(layer: Layer) -> None:
    """Blocking. Keeps the checkpoints under it for as long as it exists."""
    (layer.folder / _RECORD).write_bytes(msgspec.json.encode(layer))
    use(_below(layer))


def load(root: Path, checkpoint_id: str, *, is_below: bool = False) -> Layer:
    """
    root: contains the folders of sandboxes.
    is_below: it lies under another checkpoint, and may have been released.
    Blocking. Raises: NotFound, InvalidRequest.
    """
    folder = root / validated_id(checkpoint_id, "checkpoint_id")
    with _lock:
        try:
            if folder in _released and not is_below:
                raise FileNotFoundError
            return msgspec.json.decode((folder / _RECORD).read_bytes(), type=Layer)
        except (OSError, msgspec.MsgspecError):
            raise NotFound(f"checkpoint {checkpoint_id} does not exist any more.") from None


def use(folders: Iterable[Path]) -> None:
    with _lock:
        _uses.update(folders)


def leave(folders: Iterable[Path]) -> None:
    """Undo `use`. Blocking: removes released checkpoints without users."""
    with _lock:
        _uses.subtract(folders)
    _sweep()


def release(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint as soon as it has no users. Blocking. Idempotent."""
    folder = Path(checkpoint.folder)
    try:
        layer = load(folder.parent, checkpoint.checkpoint_id)
    except NotFound:
        return
    if layer.checkpoint.owner != checkpoint.owner:
        raise InvalidRequest(f"checkpoint {checkpoint.checkpoint_id} belongs to another owner.")
    with _lock:
        _released[folder] = layer
    _sweep()


def _sweep() -> None:
    while True:
        with _lock:
            free = [folder for folder in _released if _uses[folder] <= 0]
            layers = [_released.pop(folder) for folder in free]
            for folder in free:
                del _uses[folder]
            for layer in layers:
                _uses.subtract(_below(layer))
        for folder in free:
            remove_folder(folder)
        if not free:
            return


def _below(layer: Layer) -> list[Path]:
    return [layer.folder.parent / name for name in layer.below]


def measured(folder: Path) -> tuple[int, int]:
    """Bytes and number of files, as `du` counts them, each hard link once. Blocking.

    The folder must not change meanwhile. Folders that an ordinary user's agent has closed are opened for the
    measurement. Raises: RuntimeFailed for folders nested too deep; OSError.
    """
    fd = os.open(folder, _FOLDER)
    try:
        num_bytes, num_files = _measured(fd, set(), 0)
        return num_bytes + os.fstat(fd).st_blocks * 512, num_files
    finally:
        os.close(fd)


def _measured(folder: int, seen: set[int], depth: int) -> tuple[int, int]:
    """By descriptors, since paths may be longer than the kernel accepts. `seen`: inodes with several names; extended
    here."""
    if depth > MAX_DEPTH:
        raise RuntimeFailed(f"folders are nested more than {MAX_DEPTH} deep, which is too deep for a checkpoint.")
    with os.scandir(folder) as entries:
        all_found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    num_bytes, num_files = 0, 0
    for name, found in all_found:
        if stat.S_ISDIR(found.st_mode):
            with _opened(name, folder, found) as below:
                more_bytes, more_files = _measured(below, seen, depth + 1)
            num_bytes, num_files = num_bytes + more_bytes, num_files + more_files
        else:
            num_files += 1
        if found.st_nlink == 1 or found.st_ino not in seen:
            num_bytes += found.st_blocks * 512
        if found.st_nlink > 1:
            seen.add(found.st_ino)
    return num_bytes, num_files


@contextmanager
def _opened(name: str, parent: int, found: os.stat_result) -> Generator[int]:
    mode = stat.S_IMODE(found.st_mode)
    is_closed = mode & _MAY_LOOK != _MAY_LOOK and os.geteuid() == found.st_uid != 0
    if is_closed:
        os.chmod(name, mode | _MAY_LOOK, dir_fd=parent)
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        if is_closed:
            os.chmod(name, mode, dir_fd=parent)
