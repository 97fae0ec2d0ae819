"""What a node can run. The server places sessions by it.

Laws
- Starting costs a check of installed programs and of images: no sandbox is started.
- A runtime that turns out to be unusable is withdrawn once its own check confirms it, and the session that found out is
  returned unharmed. It is offered again as soon as its check passes.
- Images are reported only if the list is complete: for a runtime or folder that cannot be listed or has too many,
  nothing is reported, and the node still gets all such sessions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from gangline.domain.errors import (
    Failure,
    GanglineError,
    PullPostponed,
    RuntimeFailed,
    RuntimeUnavailable,
    TooManyFiles,
)
from gangline.domain.image_names import MAX_IMAGES, packed
from gangline.domain.placement import Allowed, Offer, needs_of
from gangline.domain.sandbox import Runtime
from gangline.domain.session import Lease
from gangline.domain.task import TaskRequest
from gangline.sandbox.images.supply import ImageSupply
from gangline.settings import plugins

log = logging.getLogger("gangline.node")

_LOOK_AGAIN_S = 30.0
_TRUSTED_S = 10.0
_LOOK_AT_IMAGES_S = 10.0
_LISTING_S = 10.0


class Offers:
    """Run `watch` until cancelled. Creating one blocks."""

    def __init__(
        self,
        names: Sequence[str] | None = None,
        make: Callable[[str], Runtime] = plugins.make_runtime,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        labels: Sequence[str] = (),
        allowed: Allowed = Allowed(),  # noqa: B008 - it is immutable
        images: ImageSupply | None = None,
    ) -> None:
        """names: of runtime plug-ins; None: all that are installed. labels, allowed: the operator's. images: None:
        the node pulls no images."""
        self._allowed = allowed
        self._supply = images
        self._make = make
        self._names = plugins.names("runtime") if names is None else names
        self._gpus: dict[str, int] = {}
        self._pulling = set[str]()
        """Runtimes that images can be pulled for."""
        self._missing = {name: why for name in self._names if (why := self._cannot(name)) is not None}
        self._labels = tuple(dict.fromkeys((platform.machine(), *labels)))
        self._images: dict[str, dict[str, str]] = {}
        self._passed_at: dict[str, float] = {}
        self._monotonic = monotonic
        self._lock = asyncio.Lock()

    @property
    def offer(self) -> Offer:
        supply = self._supply
        return Offer(
            runtimes=tuple(name for name in self._names if name not in self._missing),
            missing=dict(self._missing),
            labels=self._labels,
            images=self._images,
            pulls=() if supply is None or supply.policy == "never" else tuple(sorted(self._pulling)),
            not_pulled={} if supply is None else supply.pulls.refused(),
            gpus=self._gpus,
            networks=tuple(sorted(self._allowed.networks)),
            template_kwargs=tuple(sorted(self._allowed.template_kwargs)),
        )

    def _cannot(self, name: str) -> str | None:
        """Returns why a runtime cannot run: the operator refuses it, or a program is missing."""
        if (refusal := self._allowed.refusal(name)) is not None:
            return refusal
        try:
            runtime = self._make(name)
            why = msgspec.convert(runtime.missing(), str | None)
            if why is None and (num_gpus := msgspec.convert(runtime.num_gpus, int | None)) is not None:
                self._gpus[name] = num_gpus
            if why is None and runtime.image_store is not None:
                self._pulling.add(name)
        except (Exception, SystemExit) as error:  # a plug-in's error: the node starts without it
            return _told(error)
        return why

    async def are_why(self, failure: Failure, lease: Lease) -> bool:
        """Whether a session failed because this node cannot run it now although another may: the node is out of files,
        an image cannot be pulled now, or a runtime of the task is broken here."""
        if failure.code not in (RuntimeUnavailable.code, RuntimeFailed.code):
            return failure.code in (TooManyFiles.code, PullPostponed.code)
        return await self.doubt(needs_of(TaskRequest.model_validate(lease.task)).runtimes)

    async def doubt(self, names: Iterable[str]) -> bool:
        """Check these runtimes and withdraw any that fails. Returns whether any of them is withdrawn."""
        async with self._lock:
            for name in names:
                if name in self._names and name not in self._missing and self._is_stale(name):
                    await self._check(name)
            return any(name in self._missing for name in names)

    def _is_stale(self, name: str) -> bool:
        """Whether its check has not passed recently: many sessions may fail at once."""
        return self._monotonic() - self._passed_at.get(name, -math.inf) >= _TRUSTED_S

    async def watch(self) -> None:
        """Keep offering runtimes that became usable, and the available images."""
        looked_at = self._monotonic()
        while True:
            await asyncio.sleep(_LOOK_AT_IMAGES_S)
            if self._monotonic() - looked_at >= _LOOK_AGAIN_S:
                await self.look_again()
                looked_at = self._monotonic()
            await self.look_at_images()

    async def look_at_images(self) -> None:
        """List the images of each offered runtime."""
        self._images = {name: images for name in self.offer.runtimes if (images := await self._listed(name))}

    async def _listed(self, name: str) -> dict[str, str]:
        """Returns folder -> its images, as `packed`."""
        found: Mapping[str, Collection[str]] = {}
        try:
            runtime = self._make(name)
            async with asyncio.timeout(_LISTING_S):
                found = await runtime.images()
            if self._supply is not None and "" in found:
                found = {**found, "": self._supply.pulls.with_mirrored(found[""])}
            return {folder: packed(names) for folder, names in found.items() if len(names) <= MAX_IMAGES}
        except (Exception, SystemExit) as error:
            log.debug("runtime.images_not_told runtime=%s error=%s", name, error)
            return {}

    async def look_again(self) -> None:
        async with self._lock:
            for name in list(self._missing):
                if await asyncio.to_thread(self._cannot, name) is None:
                    await self._check(name)

    async def _check(self, name: str) -> None:
        try:
            await self._make(name).check()
        except (Exception, SystemExit) as error:
            if name not in self._missing:
                log.error("runtime.withdrawn runtime=%s message=%s", name, _told(error))
            self._missing[name] = _told(error)
        else:
            self._passed_at[name] = self._monotonic()
            if self._missing.pop(name, None) is not None:
                log.info("runtime.offered runtime=%s", name)


def _told(error: BaseException) -> str:
    return error.message if isinstance(error, GanglineError) else f"{type(error).__name__}: {error}"
