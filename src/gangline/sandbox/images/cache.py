"""The images that a node pulled, and which of them go when they take too much room.

Laws
- Only an image of the record is ever removed, by the name under which it was pulled, and never by force. An image that
  the engine had before, or that has got another name since, is the operator's.
- An image stays while a session uses or awaits it, or while any container has it. The least recently used is removed
  first.
- A record that is lost or cannot be read leaves its images to the operator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from gangline.domain.errors import GanglineError
from gangline.domain.image_store import HeldImage, ImageStore
from gangline.machine.durable import write_whole

log = logging.getLogger("gangline.images")

_Key = tuple[str, str]
"""Runtime and image id."""


class PulledImage(msgspec.Struct, kw_only=True):
    """An image that the node pulled."""

    runtime: str
    names: list[str]
    """Under which it was pulled: a mirror's, if it came from one."""
    image_id: str
    layers: dict[str, int]
    """Layer -> bytes."""
    used_at: float
    """Unix time, UTC, seconds."""


class ImageCache:
    """Call `load` first."""

    def __init__(
        self, file: Path | None = None, *, max_bytes: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """file: the record; None: it is not kept. max_bytes: of all layers of recorded images together; None: no limit
        but the disk's."""
        self.num_removed = 0
        self._file = file
        self._max_bytes = max_bytes
        self._clock = clock
        self._images: dict[_Key, PulledImage] = {}
        self._removing = asyncio.Lock()

    def load(self) -> None:
        """Blocking."""
        if self._file is None:
            return
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=list[PulledImage])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.error("images.unreadable file=%s message=%s", self._file, error)
            return
        self._images = {(one.runtime, one.image_id): one for one in found}

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers; each counts once."""
        layers: dict[str, int] = {}
        for one in self._images.values():
            layers |= one.layers
        return sum(layers.values())

    @property
    def is_over(self) -> bool:
        return self._max_bytes is not None and self.num_bytes > self._max_bytes

    async def add(self, runtime: str, name: str, held: HeldImage, store: ImageStore, *, is_new: bool) -> None:
        """Record a pull. is_new: whether the engine lacked the image; otherwise only another name of a recorded one
        counts."""
        key = (runtime, held.image_id)
        if key in self._images:
            self._images[key].names = sorted({*self._images[key].names, name})
        elif is_new:
            try:
                layers = dict(await store.layers(name))
            except GanglineError as error:  # the image is here all the same
                log.warning("image.layers_unknown image=%s message=%s", name, error)
                layers = {}
            layers = layers or {held.image_id: held.size_bytes}
            self._images[key] = PulledImage(
                runtime=runtime, names=[name], image_id=held.image_id, layers=layers, used_at=self._clock()
            )
        else:
            return
        await self._keep()

    def used(self, runtime: str, image_id: str) -> None:
        if (one := self._images.get((runtime, image_id))) is not None:
            one.used_at = self._clock()

    async def remove_oldest(
        self,
        store_of: Callable[[str], ImageStore | None],
        in_use: Callable[[], Collection[_Key]],
        is_needed: Callable[[], bool],
    ) -> PulledImage | None:
        """Remove the least recently used image that is not in use. Returns None if there is none, or it is not needed.

        in_use: runtime with an image's id, or with the name that is pulled for a waiting session. is_needed: asked
        again after the record of an image that somebody else had removed or named was dropped.
        """
        async with self._removing:
            for one in sorted(self._images.values(), key=lambda one: one.used_at):
                if not is_needed():
                    break
                if {(one.runtime, called) for called in (one.image_id, *one.names)} & set(in_use()):
                    continue
                try:
                    if await self._is_removed(one, store_of(one.runtime)):
                        return one
                except Exception as error:  # the engine is away, or a plug-in's error
                    log.warning("image.not_removed image=%s message=%s", one.names[0], error)
        return None

    async def _is_removed(self, one: PulledImage, store: ImageStore | None) -> bool:
        """Returns False if it stays, or had been removed."""
        if store is None:
            return False
        found = {name: await store.find(name) for name in one.names}
        ours = [name for name, named in found.items() if named is not None and named.image_id == one.image_id]
        held = await store.find(one.image_id)
        if held is not None and not held.tags and not ours:
            ours = [one.image_id]  # its tag moved on
        for name in ours:
            if not await store.remove_image(name):
                return False
        del self._images[one.runtime, one.image_id]
        await self._keep()
        if not ours or await store.find(one.image_id) is not None:
            return False  # it was removed, or has another name: then it is the operator's
        self.num_removed += 1
        log.info("image.removed image=%s bytes=%d", one.names[0], sum(one.layers.values()))
        return True

    async def _keep(self) -> None:
        """A failed write is logged: then the next start leaves these images to the operator."""
        if self._file is None:
            return
        data = msgspec.json.encode(list(self._images.values()))
        try:
            await asyncio.to_thread(write_whole, self._file, data)
        except OSError as error:
            log.error("images.not_kept file=%s message=%s", self._file, error)
