"""An engine's images without an engine: a registry's answers in order, and what was asked."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterable, Mapping

import msgspec

from gangline.domain.errors import RuntimeFailed
from gangline.domain.image_store import HeldImage


def held(name: str, version: int = 1) -> HeldImage:
    image_id = hashlib.sha256(f"{name} {version}".encode()).hexdigest()
    return HeldImage(image_id=image_id, digest=f"sha256:{image_id}", size_bytes=100, tags=(name,))


class ScriptedStore:
    """A pull fails with the next of its `words`, then succeeds; where `may_end` is given, once that is set."""

    def __init__(self, *, own: Iterable[str] = (), words: Iterable[str] = (), may_end: asyncio.Event | None = None):
        self.images = {name: held(name) for name in own}
        """By name."""
        self.known = {(name, 1): one for name, one in self.images.items()}
        self.removed = set[str]()
        self.shared: dict[str, dict[str, int] | RuntimeFailed] = {}
        """Name -> layers, for images that share some, or why they cannot be read."""
        self.used = set[str]()
        self.pulled: list[str] = []
        self.ended: list[str] = []
        self.num_now = 0
        self.most_at_once = 0
        self.version = 1
        self.words = list(words)
        self.may_end = may_end

    async def find(self, image: str) -> HeldImage | None:
        one = self.images.get(image) or next((one for one in self.known.values() if one.image_id == image), None)
        if one is None or one.image_id not in await self.image_ids():
            return None
        tags = tuple(name for name, tagged in self.images.items() if tagged.image_id == one.image_id)
        return msgspec.structs.replace(one, tags=tags)

    async def pull(self, image: str) -> None:
        self.pulled.append(image)
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            if self.may_end is not None:
                await self.may_end.wait()
            if self.words:
                raise RuntimeFailed(self.words.pop(0))
            self.images[image] = self.known[image, self.version] = held(image, self.version)
            self.removed.discard(self.images[image].image_id)
        finally:
            self.num_now -= 1
            self.ended.append(image)

    async def layers(self, image: str) -> Mapping[str, int]:
        found = self.shared.get(image, {})
        if isinstance(found, RuntimeFailed):
            raise found
        return found

    async def image_ids(self) -> Collection[str]:
        return {one.image_id for one in self.known.values()} - self.removed

    async def remove_image(self, image: str) -> bool:
        """As engines do without force: a name goes, and with the last one the image, unless a container has it."""
        one = await self.find(image)
        if one is None or (image == one.image_id and len(one.tags) > 1):
            return False
        if len(one.tags) <= 1:
            if one.image_id in self.used:
                return False
            self.removed.add(one.image_id)
        for name in one.tags if image == one.image_id else [image]:
            del self.images[name]
        return True
