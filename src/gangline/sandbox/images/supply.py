"""Supplies sandboxes with their images: pulled where the policy says so, and named by id from then on.

A user needs images for a while, such as a session's attempt: the images of its agent, its graders and their services
stay the same until it ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.domain.image_store import HeldImage, ImageStore, PullPolicy
from gangline.domain.task import RuntimeSpec
from gangline.machine.event_loop import call_all
from gangline.sandbox.images.cache import ImageCache
from gangline.sandbox.images.pulling import PullCounts, Pulls
from gangline.settings import plugins

_MEASURED_S = 2.0
"""Seconds until the disk was measured again."""


class ImagesNow(msgspec.Struct, frozen=True, kw_only=True):
    """For metrics and the heartbeat."""

    waiting: Mapping[str, int] = {}
    """Image that is being pulled -> sessions that wait for it."""
    counts: PullCounts = msgspec.field(default_factory=PullCounts)
    num_removed: int = 0
    cache_bytes: int = 0


class ImageSupply:
    """The images of a node's sandboxes. Use it on one event loop."""

    def __init__(
        self, pulls: Pulls | None = None, policy: PullPolicy = "if_missing", cache: ImageCache | None = None
    ) -> None:
        self.pulls = pulls or Pulls()
        self.policy: PullPolicy = policy
        self.cache = cache or ImageCache()
        self.pulls.on_pulled = self._pulled
        self.pulls.make_room = self._make_room
        self._stores: dict[str, ImageStore | None] = {}
        self._held: dict[str, dict[tuple[str, str], HeldImage]] = {}
        """User -> (runtime, image as the task names it) -> the image."""
        self._awaited = Counter[tuple[str, str]]()
        """Runtime and name that is pulled -> users that will hold it."""
        self._changed = asyncio.Event()
        self._is_disk_low = False

    def store_of(self, runtime: str) -> ImageStore | None:
        """Raises: UnknownPlugin."""
        if runtime not in self._stores:
            self._stores[runtime] = plugins.make_runtime(runtime).image_store
        return self._stores[runtime]

    def pulls_into(self, runtime: str) -> bool:
        """Raises: UnknownPlugin."""
        return self.policy != "never" and self.store_of(runtime) is not None

    def pulls_for(self, spec: RuntimeSpec) -> bool:
        """Whether a sandbox may have to wait for an image. Raises: UnknownPlugin."""
        return bool(images_of(spec)) and self.pulls_into(spec.backend)

    async def bring(self, user: str, specs: Iterable[RuntimeSpec]) -> None:
        """Wait until all images are here, and hold them until `release`. Raises: like `Pulls.ready`."""
        held = self._held.setdefault(user, {})
        wanted = {
            (spec.backend, image): store
            for spec in specs
            if self.pulls_into(spec.backend) and (store := self.store_of(spec.backend)) is not None
            for image in images_of(spec)
            if (spec.backend, image) not in held
        }
        awaited = [(runtime, self.pulls.name_of(image)) for runtime, image in wanted]
        self._awaited.update(awaited)
        try:
            calls = [self.pulls.ready(name, store, image, self.policy) for (name, image), store in wanted.items()]
            held.update(zip(wanted, await call_all(calls), strict=True))
        finally:
            self._awaited -= Counter(awaited)
        for (runtime, _), image in held.items():
            self.cache.used(runtime, image.image_id)

    async def local(self, user: str, spec: RuntimeSpec) -> RuntimeSpec:
        """Returns the specification with the ids of its images in place of their names. Raises: like `bring`."""
        if not self.pulls_for(spec):
            return spec
        await self.bring(user, [spec])
        held = self._held[user]
        services = {
            name: service.model_copy(update={"image": held[spec.backend, service.image].image_id})
            for name, service in spec.services.items()
        }
        own = None if spec.image is None else held.get((spec.backend, spec.image))
        return spec.model_copy(update={"image": spec.image if own is None else own.image_id, "services": services})

    async def prefetch(self, runtime: str, image: str) -> HeldImage:
        """Returns the image, pulled if needed, also with the policy `never`, which is for sessions.

        Raises: UnknownPlugin; InvalidRequest for a runtime whose images are paths; like `Pulls.ready`.
        """
        if (store := self.store_of(runtime)) is None:
            raise InvalidRequest(
                f"runtime `{runtime}` pulls no images here: `docker` and `podman` do, and `sandbox` with skopeo and "
                "umoci installed."
            )
        self.pulls.forget(runtime, image)
        return await self.pulls.ready(runtime, store, image, "always" if self.policy == "always" else "if_missing")

    def lost(self, user: str, spec: RuntimeSpec) -> None:
        """An image was removed: look again."""
        for image in images_of(spec):
            self._held.get(user, {}).pop((spec.backend, image), None)
            self.pulls.forget(spec.backend, image)

    def release(self, user: str) -> None:
        """Idempotent."""
        for (runtime, _), image in self._held.pop(user, {}).items():
            self.cache.used(runtime, image.image_id)
        self._changed.set()

    def digests(self, user: str) -> dict[str, str]:
        """Returns image, as the task names it -> its digest."""
        return {image: held.digest for (_, image), held in self._held.get(user, {}).items()}

    # -- room ----------------------------------------------------------------------------------------------------

    async def keep_bound(self) -> None:
        """Remove images beyond the cache's bound, and while the disk is low, as soon as they are unused. Run until
        cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while await self._make_room(self._is_over):
                if self._is_disk_low:
                    await asyncio.sleep(_MEASURED_S)

    def disk_changed(self, *, is_low: bool) -> None:
        """Tell whether the node's disk has less than its reserve."""
        self._is_disk_low = is_low
        self.pulls.disk_changed(is_low=is_low)
        self._changed.set()

    async def _pulled(self, runtime: str, name: str, held: HeldImage, is_new: bool) -> None:
        if (store := self.store_of(runtime)) is not None:
            await self.cache.add(runtime, name, held, store, is_new=is_new)
        self._changed.set()

    def _is_over(self) -> bool:
        return self.cache.is_over or self._is_disk_low

    async def _make_room(self, is_needed: Callable[[], bool] = lambda: True) -> bool:
        removed = await self.cache.remove_oldest(self.store_of, self._in_use, is_needed)
        if removed is not None:
            self.pulls.gone(removed.image_id)
        return removed is not None

    def _in_use(self) -> set[tuple[str, str]]:
        held = {(runtime, one.image_id) for user in self._held.values() for (runtime, _), one in user.items()}
        return held | set(self._awaited)

    def now(self) -> ImagesNow:
        return ImagesNow(
            waiting=self.pulls.waiting(),
            counts=self.pulls.counts,
            num_removed=self.cache.num_removed,
            cache_bytes=self.cache.num_bytes,
        )


def images_of(spec: RuntimeSpec) -> list[str]:
    """Returns the images of a sandbox and its services, as the task names them, without those that are paths."""
    own = [] if spec.image is None or spec.image.startswith("/") else [spec.image]
    return [*own, *(service.image for service in spec.services.values())]
