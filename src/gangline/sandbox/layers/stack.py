"""The layers of one sandbox: its writable folders, the layers under them, and checkpoints of both.

A sandbox begins with plain folders, at no cost. Where views can be mounted (see `mounting`), its first checkpoint
freezes them as a layer, and the sandbox continues in a new, empty layer over it: `overlay`. A live mount cannot change
its layers, and a process with open files would write into the frozen one. So this is done only when no process is
alive; otherwise all are frozen and the topmost layer is copied: `frozen_copy`, or `reflink` if the file system shared
all its bytes. Without views checkpoints are whole copies (`copy`, `reflink`), and a fork copies them back.

Blocking. The caller ensures that files are not moved meanwhile.

Folders may be in any state an agent can cause: closed to their owner, or rejected by the file system.
"""

from __future__ import annotations

import functools
import os
import stat
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from gangline.domain.errors import InvalidRequest, RuntimeFailed
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Checkpoint, CheckpointMethod, RuntimeStart
from gangline.domain.task import LimitsSpec
from gangline.sandbox.layers.copying import TreeCopy
from gangline.sandbox.layers.mounting import Lower, View, can_mount, mounted
from gangline.sandbox.layers.records import FILES, Layer, leave, load, measured, save, spec_digest, use
from gangline.sandbox.shared.keyrings import clear_keyrings
from gangline.sandbox.shared.leftovers import Mark, remove_folder, write_mark
from gangline.sandbox.shared.removal import remove_tree
from gangline.sandbox.shared.users import grader_uid

_MAX_DEPTH = 64
"""Layers under a sandbox; beyond it a checkpoint is whole. The kernel allows 500, and each slows lookups of missing
names."""


@contextmanager
def refusing() -> Generator[None]:
    """Raises: RuntimeFailed for a file system error, which an agent can cause."""
    try:
        yield
    except OSError as error:
        raise RuntimeFailed(f"the files of a sandbox cannot be kept as they are: {error.strerror}.") from error


@contextmanager
def opened_folder(path: Path) -> Generator[tuple[int, int]]:
    """Descriptor and mode of a folder. If its owner, our user, has closed it, it is opened within the context."""
    held = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found, again = os.fstat(held), f"/proc/self/fd/{held}"
        mode = stat.S_IMODE(found.st_mode)
        is_closed = os.geteuid() == found.st_uid != 0 and mode & stat.S_IRWXU != stat.S_IRWXU
        if is_closed:
            os.chmod(again, mode | stat.S_IRWXU)
        try:
            fd = os.open(again, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield fd, mode
            finally:
                os.close(fd)
        finally:
            if is_closed:
                os.chmod(again, mode)
    finally:
        os.close(held)


class Processes(Protocol):
    """The processes of one sandbox."""

    def is_populated(self) -> bool:
        """Whether any process is alive, or this is unknown."""
        ...

    def frozen(self) -> AbstractContextManager[bool]:
        """Freeze all processes within the context. Yields False if they cannot be frozen and keep running."""
        ...


@functools.cache
def _can_mount(root: Path, _device: int) -> bool:
    return can_mount(root)


class Layers:
    """Call `begin` once its folders exist, and `close` at its end. Long because each kind of folder begins, is kept
    and ends here."""

    def __init__(
        self,
        start: RuntimeStart,
        runtime: str,
        folders: Mapping[str, Path],
        *,
        uid: int | None = None,
        mounts: bool = False,
        private: Path | None = None,
        processes: Processes | None = None,
        content: Mapping[str, Path] | None = None,
    ) -> None:
        """
        folders: path inside -> host folder, below the sandbox's own, for everything that checkpoints include. private:
        the grader's host folder, which checkpoints leave out.
        processes: None if they are unknown.
        uid: owner of their files; None is the current user.
        mounts: whether the runtime can show mounts of a single namespace.
        content: path inside, one of `folders` -> host folder with whose files it begins.
        """
        self._content = content or {}
        self._start = start
        self._runtime = runtime
        self._folders = dict(folders)
        self._uid = uid
        self._mounts = mounts and uid is not None
        self._private = private
        self._processes = processes
        self._folder = start.folder
        self._names = [str(folder.relative_to(start.folder)) for folder in folders.values()]
        self._lowers: tuple[Layer, ...] = ()
        """Topmost first."""
        self._base: Layer | None = None
        self._view: View | None = None
        self._number = 0
        self._last: Layer | None = None
        """The last copy, whose files the next one may share."""

    # -- seen by the runtime -------------------------------------------------------------------------------------

    @property
    def stacks(self) -> bool:
        """Whether layers are stacked here instead of copied."""
        return self._mounts and _can_mount(self._folder.parent, self._folder.parent.stat().st_dev)

    def may_stack(self) -> bool:
        """Whether `stack` is allowed, given that no command runs."""
        return self.stacks and self._processes is not None and not self._processes.is_populated()

    @property
    def method(self) -> str:
        """For `Sandbox.limits`."""
        return "overlay" if self._mounts else "copy"

    @property
    def entering(self) -> list[str]:
        """Start of a command line that sees the folders as mounted."""
        return [] if self._view is None else self._view.entering

    def folders(self) -> dict[str, Path]:
        """Path inside -> folder with the files, as seen by this user's programs on the host."""
        if self._view is None:
            return self._folders
        return {path: self._view.root / name for path, name in zip(self._folders, self._names, strict=True)}

    def written(self) -> list[Path] | None:
        """Folders to measure; None: the sandbox's own folder."""
        return None if self._view is None else [self._view.root / "."]

    def begin(self) -> None:
        """Raises: InvalidRequest, NotFound, RuntimeFailed when the sandbox cannot start from its base."""
        if self._start.base is not None:
            self._base = self._loaded(self._start.base)
            use([self._base.folder])
            with refusing():
                self._put(self._base)
        else:
            self._fill()

    def close(self) -> None:
        """Idempotent."""
        self._let_go()
        if self._base is not None:
            leave([self._base.folder])
            self._base = None

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def stack(self, name: str) -> Checkpoint:
        """Freeze the topmost layer and continue in a new one. No process of the sandbox may be alive.

        Raises: RuntimeFailed, with the sandbox's files unchanged.
        """
        is_deep = len(self._lowers) >= _MAX_DEPTH
        with refusing():
            layer = self._copied(name, whole=True, is_frozen=True) if is_deep else self._moved(name)
            self._let_go()
            self._put(layer)
        return layer.checkpoint

    def copy(self, name: str) -> Checkpoint:
        """Copy the topmost layer, with all processes frozen if possible. Raises: RuntimeFailed."""
        with refusing(), nullcontext(False) if self._processes is None else self._processes.frozen() as is_frozen:
            layer = self._copied(name, whole=False, is_frozen=is_frozen)
        self._share_with(layer)
        return layer.checkpoint

    def reset(self, checkpoint: Checkpoint | None, reset_others: Callable[[], None] = lambda: None) -> None:
        """Return to a checkpoint, or to the sandbox's initial files. None of its processes may be alive.

        reset_others: removes files written elsewhere, which checkpoints leave out.
        Raises: InvalidRequest, NotFound, RuntimeFailed.
        """
        layer = self._base if checkpoint is None else self._loaded(checkpoint)
        with refusing():
            self._let_go()
            for name in self._names:
                remove_tree(self._folder / name)
                _make(self._folder / name, self._uid)
            reset_others()
            _clear_keyrings(self._uid, self._start)
            for path in [] if self._private is None else list(self._private.iterdir()):
                remove_tree(path)
            if layer is not None:
                self._put(layer)
        if layer is None:
            self._fill()

    # -- how -----------------------------------------------------------------------------------------------------

    def _loaded(self, checkpoint: Checkpoint) -> Layer:
        layer = load(self._folder.parent, checkpoint.checkpoint_id)
        made = layer.checkpoint
        theirs = (made.owner, made.runtime, made.spec_digest)
        if theirs != (self._start.owner, self._runtime, spec_digest(self._start)):
            raise InvalidRequest(
                f"checkpoint {made.checkpoint_id} is of another owner, runtime or specification: a sandbox over it "
                "needs the same ones."
            )
        return layer

    def _fill(self) -> None:
        """Copy the content that the sandbox's empty folders begin with. Raises: RuntimeFailed."""
        limits = self._start.spec.limits
        if not self._content:
            return
        with refusing(), opened_folder(self._folder) as (target, _mode):
            copy = TreeCopy(
                target,
                owners=self._uid,
                max_bytes=limits.disk_bytes,
                max_files=limits.max_files,
                what="the content of the session's folders in the image",
            )
            for inside, content in self._content.items():
                with opened_folder(content) as (source, mode):
                    copy.add(source, str(self._folders[inside].relative_to(self._folder)), mode=mode)

    def _put(self, layer: Layer) -> None:
        """Continue over a layer. The sandbox's folders are empty."""
        if not self.stacks:
            with opened_folder(self._folder) as (target, _mode):
                copy = TreeCopy(target, owners=_owners(layer.uid, self._uid))
                for name in self._names:
                    with opened_folder(layer.folder / FILES / name) as (source, mode):
                        copy.add(source, name, mode=mode)
            return
        lowers = (layer, *(load(self._folder.parent, name, is_below=True) for name in layer.below))
        use(lower.folder for lower in lowers)
        try:
            shown = [Lower(lower.folder / FILES, _owners(lower.uid, self._uid)) for lower in lowers]
            self._view = mounted(self._folder, shown, self._names)
        except BaseException:
            leave(lower.folder for lower in lowers)
            raise
        self._lowers = lowers

    def _let_go(self) -> None:
        """Remove the top layer and release the layers under it."""
        if self._view is not None:
            self._view.close()
            self._view = None
        remove_tree(self._folder / "upper")
        lowers, self._lowers = self._lowers, ()
        if lowers:
            leave(lower.folder for lower in lowers)
        self._share_with(None)

    def _share_with(self, layer: Layer | None) -> None:
        """Let the next copy share files with this layer, which is kept until then even if it is released."""
        last, self._last = self._last, layer
        if layer is not None:
            use([layer.folder])
        if last is not None:
            leave([last.folder])

    def _moved(self, name: str) -> Layer:
        files = [self._folder / path for path in self._names] if self._view is None else [self._upper]
        sizes = [measured(folder) for folder in files]  # before moving anything, since this may raise
        target = self._target()
        if self._view is not None:
            self._view.close()
            self._view = None
            os.rename(self._upper, target / FILES)
        else:
            for path in self._names:
                (target / FILES / path).parent.mkdir(parents=True, exist_ok=True)
                os.rename(self._folder / path, target / FILES / path)
                _make(self._folder / path, self._uid)
        num_bytes, num_files = map(sum, zip(*sizes, strict=True))
        return self._saved(target, name, "overlay", self._lowers, (num_bytes, num_files), is_frozen=True)

    def _copied(self, name: str, *, whole: bool, is_frozen: bool) -> Layer:
        target, limits = self._target(), self._start.spec.limits
        stacked = self._view is not None and not whole
        sources = [("", self._upper)] if stacked else list(zip(self._names, self.folders().values(), strict=True))
        try:
            previous = None if self._last is None else self._last.folder / FILES
            copy = _copied(target / FILES, sources, previous, limits, overlay=stacked)
            size = measured(target / FILES)
        except BaseException:
            remove_folder(target)
            raise
        method: CheckpointMethod = "frozen_copy" if is_frozen else "copy"
        if copy.has_cloned and not copy.num_bytes:
            method = "reflink"
        return self._saved(target, name, method, self._lowers if stacked else (), size, is_frozen=is_frozen)

    @property
    def _upper(self) -> Path:
        """The topmost layer's files, if there is a view."""
        return self._folder / "upper" / FILES

    def _target(self) -> Path:
        """Folder of a new checkpoint."""
        target = self._folder.parent / new_id("checkpoint")
        write_mark(target, Mark(owner=self._start.owner, runtime=self._runtime, runtime_id=target.name))
        return target

    def _saved(
        self,
        target: Path,
        name: str,
        method: CheckpointMethod,
        below: Sequence[Layer],
        size: tuple[int, int],
        *,
        is_frozen: bool,
    ) -> Layer:
        """`size`: bytes and number of files."""
        self._number += 1
        checkpoint = Checkpoint(
            checkpoint_id=target.name,
            runtime_id=self._start.runtime_id,
            owner=self._start.owner,
            runtime=self._runtime,
            spec_digest=spec_digest(self._start),
            number=self._number,
            name=name,
            method=method,
            is_frozen=is_frozen,
            num_bytes=size[0],
            num_files=size[1],
            made_at=time.time(),
            folder=str(target),
        )
        layer = Layer(checkpoint=checkpoint, uid=self._uid, below=tuple(one.folder.name for one in below))
        save(layer)
        return layer


def _clear_keyrings(uid: int | None, start: RuntimeStart) -> None:
    """Raises: RuntimeFailed."""
    if uid is None or "keyring" not in start.spec.system_calls_allow:
        return
    if not clear_keyrings((uid, grader_uid(uid))):
        raise RuntimeFailed("the agent has left keyrings that cannot be cleared: start another sandbox.")


def _make(folder: Path, uid: int | None) -> None:
    folder.mkdir()
    if uid is not None:
        os.chown(folder, uid, uid)


def _owners(there: int | None, here: int | None) -> dict[int, int]:
    """Maps users of a layer whose agent is `there` to users of a sandbox whose agent is `here`."""
    if there is None or here is None or there == here:
        return {}
    return {0: 0, there: here, grader_uid(there): grader_uid(here)}


def _copied(
    target: Path, sources: Sequence[tuple[str, Path]], previous: Path | None, limits: LimitsSpec, *, overlay: bool
) -> TreeCopy:
    """Copy folders to their paths in the target, which is made. Raises: RuntimeFailed, OSError."""
    target.mkdir()
    with ExitStack() as stack:
        made, _mode = stack.enter_context(opened_folder(target))
        earlier = None if previous is None else stack.enter_context(opened_folder(previous))[0]
        copy = TreeCopy(
            made, previous=earlier, overlay=overlay, max_bytes=limits.disk_bytes, max_files=limits.max_files
        )
        for path, folder in sources:
            source, mode = stack.enter_context(opened_folder(folder))
            copy.add(source, path, mode=mode)
    return copy
