"""Decides which call is a retry of which: a client that asks again for an answer it did not get must not sample twice.

The rule
- Two requests can be one call only if dialect, path and body are the same, in one session, within the window.
- Of those, the later one *is* the earlier one when
  - both carry the same idempotency key (the official SDKs keep theirs over all tries of one call); or
  - it says that it is a retry (`x-stainless-retry-count` above 0), and the idempotency keys do not differ; or
  - the earlier one has no listener left and was never delivered in full: its client has gone, and the same question
    again is the same request.
- After a restart the node knows only the idempotency keys in its journal.
- Never when the earlier one failed or was aborted: there is no answer to give.
- Never when the session continued from the earlier answer: its client had it, so asking again requests another sample.
- Everything else is a new call: an unmarked repetition after a full delivery (a deliberate resample), the same body
  sent several times at once (best of n), a compaction (another body).

A retry of a call in flight listens to it. A retry of a finished call gets the same answer under the same ids, and is
not a turn. If a client leaves before it was sent anything, its call stays alive for a short grace period so that a
retry finds it. A stream that had begun is cancelled at once, since its client has shown the content and keeps it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from gangline.domain.reply import Reply, ReplyDelta
from gangline.wire.dialects.contract import RawRequest

_log = logging.getLogger("gangline.calls")

_GONE = "client disconnected"

AGENT_ROLE = "x-gangline-role"
"""Header in which a client names its role among several."""

MAX_FINISHED = 16
"""Answers kept for retries, per session."""

_MAX_SURPLUS = 8
"""Extra answers that may be kept for a while."""


class CallMark(msgspec.Struct, frozen=True):
    """The fields by which two requests are compared."""

    digest: bytes
    """Digest of dialect, path, body and role."""
    key: str | None = None
    """Idempotency key."""
    says_retry: bool = False

    @property
    def retry_key(self) -> str | None:
        """Identifies a retry, also after a restart of the node; None without an idempotency key."""
        if self.key is None:
            return None
        return hashlib.sha256(self.digest + self.key.encode(errors="replace")).hexdigest()[:32]


def mark_of(dialect: str, path: str, request: RawRequest) -> CallMark:
    digest = hashlib.sha256(request.body)
    digest.update(f"\0{dialect}\0{path}".encode(errors="replace"))
    if (role := request.headers.get(AGENT_ROLE)) is not None:  # the same request from another role is another call
        digest.update(f"\0{role}".encode(errors="replace"))
    count = request.headers.get("x-stainless-retry-count", "0")
    return CallMark(digest.digest(), request.headers.get("idempotency-key"), count.isdecimal() and int(count) > 0)


class Answering(Protocol):
    """A model call with listeners: in flight or answered, before or after a restart of the node."""

    @property
    def record_key(self) -> str: ...

    @property
    def created_at(self) -> float:
        """Unix time, UTC, seconds."""
        ...

    @property
    def num_prompt_tokens(self) -> int | None:
        """None until the engine reported it."""
        ...

    @property
    def num_replays(self) -> int: ...

    @property
    def ended_already(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def replayed(self) -> None: ...

    async def reply(self) -> Reply: ...

    def news(self, idle_s: float) -> AsyncGenerator[Sequence[ReplyDelta], None]: ...

    def compact(self) -> None: ...

    def abort(self, message: str) -> None: ...


class _Entry:
    def __init__(self, mark: CallMark, flight: Answering, now: float) -> None:
        self.mark = mark
        self.flight = flight
        self.asked_at = now
        self.num_listeners = 0
        self.is_delivered = False

    def is_meant_by(self, mark: CallMark) -> bool:
        """Whether a request with this mark is a retry of the call. `mark`: has the same digest."""
        if self.flight.failed:
            return False
        if mark.key is not None and mark.key == self.mark.key:
            return True
        keys_differ = mark.key is not None and self.mark.key is not None
        if mark.says_retry and not keys_differ:
            return True
        return self.num_listeners == 0 and not self.is_delivered


class Subscription:
    """One request that listens to a call. Call `leave` exactly once."""

    def __init__(self, entry: _Entry, *, grace_s: float, is_retry: bool) -> None:
        self.flight = entry.flight
        self.is_retry = is_retry
        self.has_sent = False
        """Whether any of the answer was sent to this client; set by the sender."""
        self._entry = entry
        self._grace_s = grace_s
        entry.num_listeners += 1

    def delivered(self) -> None:
        """Record that the whole answer was sent."""
        self._entry.is_delivered = True

    def leave(self) -> None:
        entry = self._entry
        entry.num_listeners -= 1
        if entry.flight.ended_already:
            entry.flight.compact()
        if entry.num_listeners or entry.flight.ended_already:
            return
        if self.has_sent or self._grace_s <= 0:
            entry.flight.abort(_GONE)
        else:
            asyncio.get_running_loop().call_later(self._grace_s, self._abort_unheard)

    def _abort_unheard(self) -> None:
        if self._entry.num_listeners == 0:
            self._entry.flight.abort(_GONE)


class Retries:
    """The calls of one session that a retry can refer to."""

    def __init__(
        self,
        has_gone_on: Callable[[Answering], bool],
        *,
        window_s: float = 600.0,
        grace_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        answered: Mapping[str, Answering] | None = None,
    ) -> None:
        """has_gone_on: whether a later call of the session continues this call's answer.
        answered: retry key -> a call that was answered before a restart of the node.
        """
        self._has_gone_on = has_gone_on
        self._window_s = window_s
        self._grace_s = grace_s
        self._clock = clock
        self._entries: list[_Entry] = []
        self._answered = dict(answered or {})

    def subscribe(self, mark: CallMark, start: Callable[[], Answering]) -> Subscription:
        """Listen to the call that `mark` refers to, or start one. Raises: the errors of `start`."""
        entry = self._find(mark) or self._find_answered(mark)
        if entry is None:
            entry = _Entry(mark, start(), self._clock())
            self._forget_old()
            self._entries.append(entry)
            return Subscription(entry, grace_s=self._grace_s, is_retry=False)
        entry.flight.replayed()
        _log.info(
            "call.%s reply=%s replays=%d",
            *("replayed" if entry.flight.ended_already else "attached", entry.flight.record_key),
            entry.flight.num_replays,
        )
        return Subscription(entry, grace_s=self._grace_s, is_retry=True)

    def _find(self, mark: CallMark) -> _Entry | None:
        oldest, digest = self._clock() - self._window_s, mark.digest
        for entry in reversed(self._entries):
            if entry.mark.digest != digest or entry.asked_at < oldest:
                continue
            if entry.is_meant_by(mark) and not self._has_gone_on(entry.flight):
                return entry
        return None

    def _find_answered(self, mark: CallMark) -> _Entry | None:
        """Returns an entry from before the restart. It counts as answered now, so that its retry window starts
        again."""
        flight = self._answered.pop(mark.retry_key or "", None)
        if flight is None or self._has_gone_on(flight):
            return None
        entry = _Entry(mark, flight, self._clock())
        self._forget_old()
        self._entries.append(entry)
        return entry

    def _forget_old(self) -> None:
        """Forget several calls at once: scanning all of them each time costs more than keeping a few for longer."""
        if len(self._entries) < MAX_FINISHED + _MAX_SURPLUS:
            return
        oldest = self._clock() - self._window_s
        kept = [entry for entry in self._entries if entry.asked_at >= oldest and not entry.flight.failed]
        finished = [entry for entry in kept if entry.flight.ended_already]
        surplus = {id(entry) for entry in finished[: max(len(finished) - MAX_FINISHED, 0)]}
        self._entries = [entry for entry in kept if id(entry) not in surplus]
