"""The weight updates that a gate saw, by phase: the most recent ones, and totals of all."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from gangline.domain.errors import Conflict
from gangline.domain.node_views import GateMode
from gangline.domain.weight_updates import GATE_PHASES, GateUpdate

_NUM_KEPT = 32
_MAX_NAMES = 32
"""Most reported phases with a separate total: each becomes a metric label for the node's lifetime."""
_OTHERS = "others"


class GateUpdates:
    """Fed by the gate: an update begins when the gate closes, is drained, and ends when the gate opens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._drained_at: float | None = None
        self._reported: dict[str, float] = {}
        """For the update in progress."""
        self._last: deque[GateUpdate] = deque(maxlen=_NUM_KEPT)
        self._ended = {"drain": 0.0, "held": 0.0}
        """Phase measured by the gate -> seconds over all ended updates."""
        self.num_ended = 0
        self.reported_s: dict[str, float] = {}
        """Phase -> total seconds that trainers reported."""

    @property
    def last(self) -> tuple[GateUpdate, ...]:
        """The most recent ended updates, newest last."""
        return tuple(self._last)

    @property
    def measured_s(self) -> dict[str, float]:
        """Phase measured by the gate -> total seconds, including the update in progress."""
        drain_s, held_s = self._so_far()
        return {"drain": self._ended["drain"] + drain_s, "held": self._ended["held"] + held_s}

    def _so_far(self) -> tuple[float, float]:
        """Seconds of drain and of hold in the update in progress."""
        if self._began_at is None:
            return 0.0, 0.0
        now = self._clock()
        drained_at = now if self._drained_at is None else self._drained_at
        return drained_at - self._began_at, now - drained_at

    def begin(self, *, is_drained: bool) -> None:
        """Begin an update, or continue it: a pause that renews a lease belongs to the same update.

        is_drained: no call in flight needs to end first.
        """
        now = self._clock()
        self._began_at = now if self._began_at is None else self._began_at
        if is_drained and self._drained_at is None:
            self._drained_at = now

    def drained(self) -> None:
        """Record that no call is in flight. Idempotent."""
        self.begin(is_drained=True)

    def end(self, mode: GateMode, version: int | None, *, has_expired: bool) -> GateUpdate:
        drain_s, held_s = self._so_far()
        update = GateUpdate(
            ended_at=time.time(),
            mode=mode,
            version=version,
            drain_s=drain_s,
            held_s=held_s,
            has_expired=has_expired,
            reported=self._reported,
        )
        self._last.append(update)
        self._ended = self.measured_s
        self.num_ended += 1
        self._began_at, self._drained_at, self._reported = None, None, {}
        return update

    def report(self, phases: Mapping[str, float]) -> None:
        """Add seconds of the trainer's own phases to the update in progress, or to the last one. A phase that is
        reported again replaces its earlier seconds. Names of the gate's own phases are ignored.

        Raises: Conflict when there was no update.
        """
        if self._began_at is None and not self._last:
            raise Conflict("the gate has seen no weight update: pause it around one, then report its phases.")
        before = self._last[-1].reported if self._began_at is None else self._reported
        new = {phase: seconds for phase, seconds in phases.items() if phase not in GATE_PHASES}
        for phase, seconds in new.items():
            is_named = phase in self.reported_s or len(self.reported_s) < _MAX_NAMES
            name = phase if is_named else _OTHERS
            self.reported_s[name] = self.reported_s.get(name, 0.0) + max(seconds - before.get(phase, 0.0), 0.0)
        if self._began_at is None:
            self._last[-1] = msgspec.structs.replace(self._last[-1], reported=before | new)
        else:
            self._reported = before | new
