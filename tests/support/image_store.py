"""An engine's images without an engine: a registry's answers in order, and what was asked."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterable

from gangline.domain.errors import RuntimeFailed
from gangline.domain.image_store import HeldImage


def held(name: str, version: int = 1) -> HeldImage:
    image_id = hashlib.sha256(f"{name} {version}".encode()).hexdigest()
    return HeldImage(image_id=image_id, digest=f"sha256:{image_id}", size_bytes=100)


class ScriptedStore:
    """A pull fails with the next of its `words`, then succeeds; where `may_end` is given, once that is set."""

    def __init__(self, *, own: Iterable[str] = (), words: Iterable[str] = (), may_end: asyncio.Event | None = None):
        self.images = {name: held(name) for name in own}
        self.used = set[str]()
        self.pulled: list[str] = []
        self.ended: list[str] = []
        self.num_now = 0
        self.most_at_once = 0
        self.version = 1
        self.words = list(words)
        self.may_end = may_end

    async def find(self, image: str) -> HeldImage | None:
        ids = {one.image_id: one for one in self.images.values()}
        return self.images.get(image) or ids.get(image)

    async def pull(self, image: str) -> None:
        self.pulled.append(image)
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            if self.may_end is not None:
                await self.may_end.wait()
            if self.words:
                raise RuntimeFailed(self.words.pop(0))
            self.images[image] = held(image, self.version)
        finally:
            self.num_now -= 1
            self.ended.append(image)

    async def image_ids(self) -> Collection[str]:
        return {one.image_id for one in self.images.values()}

    async def remove_image(self, image: str) -> bool:
        found = [name for name, one in self.images.items() if image in (name, one.image_id)]
        if not found or self.images[found[0]].image_id in self.used:
            return False
        del self.images[found[0]]
        return True
