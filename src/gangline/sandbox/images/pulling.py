"""Pulls images by their engine's own client.

Laws
- Callers that wait for the same image share one pull, which ends when the last of them leaves.
- A registry that asks for fewer requests is left alone for a pause, which grows with each refusal.
- Failures have the registry's own words. An image that could not be pulled is not tried again for a while.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextvars import Context
from typing import Literal

import msgspec

from gangline.domain.errors import ImageMissing, PullFailed, PullPostponed, RuntimeFailed
from gangline.domain.image_names import full_name, is_local, located, mirrored
from gangline.domain.image_store import HeldImage, ImageStore, PullPolicy
from gangline.machine.event_loop import is_cancelled

log = logging.getLogger("gangline.images")

_TRUSTED_S = 10.0
"""How long an image that was found counts as there, and as the newest one."""
_REFUSED_S = 60.0
_MAX_TRIES = 6
_FIRST_PAUSE_S = {"busy": 15.0, "passing": 1.0, "full": 0.0}
_MAX_PAUSE_S = 300.0
_MAX_WORDS = 500
_MAX_REFUSED, _MAX_TOLD = 100, 240
"""Most images, and characters of each reason, that a node reports."""
_Trouble = Literal["busy", "passing", "full", "lasting"]
_TROUBLES: tuple[tuple[_Trouble, str], ...] = (
    ("full", "no space left on device|disk quota exceeded"),
    ("busy", "toomanyrequests|too many requests"),
    (
        "lasting",
        "manifest unknown|name unknown|not found|not exist|no matching manifest|no image found in|denied|unauthorized|"
        "authentication required|no basic auth|invalid reference",
    ),
    ("busy", r"\b429\b|rate limit"),
    (
        "passing",
        "connection (refused|reset)|broken pipe|time.?out|timed out|deadline exceeded|temporary failure|no such host|"
        r"unreachable|no route to host|\beof\b|tls handshake|server misbehaving|server error|bad gateway|unavailable|"
        r"goaway|stream error|closed network|closed idle|verification failed|\b50[0234]\b|took longer|"
        "unexpected http status",
    ),
)
"""In the words of Docker, podman and registries. The first that fits counts: a tag may be `429`, and a missing image of
that tag must not look like a busy registry."""


def trouble_of(words: str) -> _Trouble:
    """Returns the kind of failure. Unknown ones are `lasting`: the server decides whether to try again."""
    for trouble, pattern in _TROUBLES:
        if re.search(pattern, words, re.IGNORECASE):
            return trouble
    return "lasting"


class _Pull:
    """One image that callers wait for."""

    def __init__(self) -> None:
        self.task: asyncio.Task[HeldImage] | None = None
        self.num_waiting = 0
        self.is_pulling = False


def _postponed(image: str) -> PullPostponed:
    return PullPostponed(f"the image {image!r} is not pulled now: the node's disk is low, or the node ends.")


class PullCounts(msgspec.Struct):
    """Totals since the start."""

    num_pulled: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    """Sizes of the pulled images, as the engine states them."""
    seconds: float = 0.0


class Pulls:
    """The pulls of one process."""

    def __init__(
        self,
        *,
        at_once: int = 3,
        mirrors: Mapping[str, str] | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """at_once: most pulls at a time. mirrors: see `mirrored`."""
        self.counts = PullCounts()
        self.make_room: Callable[[], Awaitable[bool]] | None = None
        """Removes an image when a disk is full; returns whether it did."""
        self.on_pulled: Callable[[str, str, HeldImage, bool], Awaitable[None]] | None = None
        """Called with the runtime's name, the name that was pulled, the image, and whether the engine lacked it."""
        self._has_room = True
        self._mirrors = mirrors or {}
        self._places = asyncio.Semaphore(at_once)
        self._pause = pause
        self._monotonic = monotonic
        self._under_way: dict[tuple[str, str], _Pull] = {}
        self._found: dict[tuple[str, str], tuple[HeldImage, float]] = {}
        self._refused: dict[tuple[str, str], tuple[PullFailed, float]] = {}
        self._resting: dict[str, float] = {}
        """Registry -> when the next pull from it may begin."""

    async def ready(self, runtime: str, store: ImageStore, image: str, policy: PullPolicy = "if_missing") -> HeldImage:
        """Returns the image once the engine has it.

        Raises: ImageMissing when it is absent and the policy is `never`; PullFailed; PullPostponed; the store's
        errors.
        """
        key = (runtime, full_name(image))
        if key in self._found and self._found[key][1] > self._monotonic():
            return self._found[key][0]
        if (pull := self._under_way.get(key)) is None:
            pull = self._under_way[key] = _Pull()
            work = self._brought(pull, key, store, image, policy)
            pull.task = asyncio.create_task(work, name=f"image {image}", context=Context())  # no session's, for logs
            pull.task.add_done_callback(lambda task: self._landed(key, pull, task))
        assert pull.task is not None
        pull.num_waiting += 1
        try:
            return await asyncio.shield(pull.task)
        except asyncio.CancelledError:
            if is_cancelled() or not pull.task.cancelled():
                raise
            raise _postponed(image) from None
        finally:
            pull.num_waiting -= 1
            if pull.num_waiting == 0 and not pull.task.done():
                self._under_way.pop(key, None)  # a later caller begins another pull
                pull.task.cancel()

    def _landed(self, key: tuple[str, str], pull: _Pull, task: asyncio.Task[HeldImage]) -> None:
        if self._under_way.get(key) is pull:
            del self._under_way[key]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._found[key] = (task.result(), self._monotonic() + _TRUSTED_S)
        elif isinstance(error, PullFailed) and (key not in self._refused or self._refused[key][0] is not error):
            self._refused[key] = (error, self._monotonic() + _REFUSED_S)

    def forget(self, runtime: str, image: str) -> None:
        """Look again: the image was removed, or another try is wanted."""
        self._found.pop((runtime, full_name(image)), None)
        self._refused.pop((runtime, full_name(image)), None)

    def disk_changed(self, *, is_low: bool) -> None:
        """While a disk is low, pulls end and no other begins: else agents would be ended to make room for images."""
        self._has_room = not is_low
        for key, pull in self._under_way.items():
            if is_low and pull.is_pulling and pull.task is not None:
                pull.task.cancel()
                self._refused[key] = (_postponed(key[1]), self._monotonic() + _REFUSED_S)

    def gone(self, image_id: str) -> None:
        """The image was removed: look again."""
        self._found = {key: found for key, found in self._found.items() if found[0].image_id != image_id}

    def name_of(self, image: str) -> str:
        """Returns the name that is pulled for an image."""
        return mirrored(full_name(image), self._mirrors)

    def with_mirrored(self, names: Collection[str]) -> set[str]:
        """Returns an engine's names (see `engine_names`), with those that its images from mirrors have for tasks."""
        found = set(names)
        for prefix, mirror in self._mirrors.items():
            start, own = f"{mirror.rstrip('/')}/", f"{prefix.rstrip('/')}/"
            found |= {located(own + name.removeprefix(start))[1] for name in names if name.startswith(start)}
        return found

    def waiting(self) -> dict[str, int]:
        """Returns image -> callers that wait for its pull."""
        found = Counter[str]()
        for (_, name), pull in self._under_way.items():
            found[name] += pull.num_waiting if pull.is_pulling else 0
        return dict(+found)

    def refused(self) -> dict[str, dict[str, str]]:
        """Returns runtime -> image -> why it is not pulled now."""
        now = self._monotonic()
        self._refused = {key: kept for key, kept in self._refused.items() if kept[1] > now}
        found: dict[str, dict[str, str]] = {}
        for (runtime, name), (error, _) in list(self._refused.items())[-_MAX_REFUSED:]:
            found.setdefault(runtime, {})[name] = error.message[:_MAX_TOLD]
        return found

    async def _brought(
        self, pull: _Pull, key: tuple[str, str], store: ImageStore, image: str, policy: PullPolicy
    ) -> HeldImage:
        name = self.name_of(image)
        found = await store.find(image) or await store.find(name)
        if found is not None and (policy != "always" or "@" in image):
            return found
        if key in self._refused and self._refused[key][1] > self._monotonic():
            raise self._refused[key][0]
        if not self._has_room:
            raise _postponed(image)
        if policy == "never":
            raise ImageMissing(f"the image {image!r} is not on this machine, and this node does not pull it.")
        if is_local(image):
            if found is not None:
                return found
            raise PullFailed(f"the image {image!r} is not on this machine, and no registry has it by this name.")
        pull.is_pulling = True
        before = await store.image_ids()
        began_at = self._monotonic()
        try:
            await self._pulled(store, name)
        except (PullFailed, RuntimeFailed) as error:
            self.counts.num_failed += 1
            is_lasting = isinstance(error, PullFailed) or trouble_of(error.message.replace(name, "")) == "lasting"
            kind = PullFailed if is_lasting else PullPostponed
            raise kind(f"the image {image!r} could not be pulled: {error.message[-_MAX_WORDS:]}") from error
        held = await store.find(name)
        if held is None:
            raise PullFailed(f"the image {image!r} was pulled, but the engine does not find it as {name!r}.")
        self.counts.num_pulled += 1
        took_s = self._monotonic() - began_at
        self.counts.seconds += took_s
        log.info("image.pulled image=%s digest=%s took_s=%.1f bytes=%d", name, held.digest, took_s, held.size_bytes)
        is_new = held.image_id not in before
        self.counts.num_bytes += held.size_bytes if is_new else 0
        if self.on_pulled is not None:
            await self.on_pulled(key[0], name, held, is_new)
        return held

    async def _pulled(self, store: ImageStore, name: str) -> None:
        """Raises: RuntimeFailed, the last try's."""
        registry = name.partition("/")[0]
        for number in itertools.count(1):
            while (rest_s := self._resting.get(registry, 0.0) - self._monotonic()) > 0:
                await self._pause(rest_s)
            try:
                async with self._places:
                    await store.pull(name)
                return
            except RuntimeFailed as error:
                trouble = trouble_of(error.message.replace(name, ""))
                if trouble == "lasting" or number == _MAX_TRIES:
                    raise
                if trouble == "full" and (self.make_room is None or not await self.make_room()):
                    raise
            pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S[trouble] * 2 ** (number - 1)) * random.uniform(0.75, 1.25)
            log.warning("image.retried image=%s trouble=%s pause_s=%.1f", name, trouble, pause_s)
            if trouble == "busy":
                self._resting[registry] = self._monotonic() + pause_s
            else:
                await self._pause(pause_s)

    async def close(self) -> None:
        """End every pull. Idempotent."""
        tasks = [pull.task for pull in self._under_way.values() if pull.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
