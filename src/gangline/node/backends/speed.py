"""How fast an engine answers this node's calls: times to the first token and tokens per second, in the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from gangline.domain.node_views import EngineSpeed
from gangline.models.engines.times import EngineLoad

_SLOT_S = 5.0
_NUM_SLOTS = 12


@dataclass(slots=True)
class _Slot:
    """Sums over five seconds."""

    number: int
    num_first: int = 0
    first_s: float = 0.0
    num_replies: int = 0
    reply_s: float = 0.0
    num_tokens: int = 0


class SpeedMeter:
    """One per engine. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._slots: deque[_Slot] = deque(maxlen=_NUM_SLOTS)
        self._waiting: dict[TimedCall, float] = {}
        """Streamed calls without a token -> when they began."""
        self._load: EngineLoad | None = None
        self._page_first_s: float | None = None

    @contextmanager
    def call(self, *, is_streamed: bool) -> Generator[TimedCall]:
        """Measure one call for the duration of the block."""
        began = self._clock()
        timed = TimedCall(self, began)
        if is_streamed:
            self._waiting[timed] = began
        try:
            yield timed
            slot = self._slot()
            slot.num_replies += 1
            slot.reply_s += self._clock() - began
        finally:
            self._waiting.pop(timed, None)

    def sampled(self, timed: TimedCall, num_tokens: int) -> None:
        slot = self._slot()
        slot.num_tokens += num_tokens
        if self._waiting.pop(timed, None) is not None:
            slot.num_first += 1
            slot.first_s += self._clock() - timed.began

    def read(self, load: EngineLoad) -> None:
        """Take in the figures of the engine's own metrics page."""
        before, self._load = self._load, load
        if before is not None:
            num, seconds = load.num_first - before.num_first, load.first_s - before.first_s
            self._page_first_s = seconds / num if num > 0 else None

    def view(self) -> EngineSpeed:
        now = self._clock()
        slots = [slot for slot in self._slots if slot.number > now // _SLOT_S - _NUM_SLOTS]
        num_first, num_replies = sum(slot.num_first for slot in slots), sum(slot.num_replies for slot in slots)
        known_s = min(max(now - self._since, _SLOT_S), _SLOT_S * _NUM_SLOTS)
        return EngineSpeed(
            first_token_s=sum(slot.first_s for slot in slots) / num_first if num_first else self._page_first_s,
            waits_s=max((now - began for began in self._waiting.values()), default=0.0),
            reply_s=sum(slot.reply_s for slot in slots) / num_replies if num_replies else None,
            tokens_per_s=sum(slot.num_tokens for slot in slots) / known_s,
            num_queued=None if self._load is None else self._load.num_queued,
        )

    def _slot(self) -> _Slot:
        number = int(self._clock() // _SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(_Slot(number))
        return self._slots[-1]


class TimedCall:
    """A call in flight."""

    def __init__(self, meter: SpeedMeter, began: float) -> None:
        self._meter = meter
        self.began = began

    def sampled(self, num_tokens: int) -> None:
        """Count tokens that came, of which the first ends the call's wait."""
        self._meter.sampled(self, num_tokens)
