"""The phases of a weight update with their seconds, and which one dominated. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gangline.domain.node_views import GateMode

GATE_PHASES = ("drain", "held")
"""Phases that a gate measures itself."""

_LONG_S = 5.0
_MOST = 0.75
_ADVICE = {
    "transfer": "writing the weights into the shared folder",
    "drain": "calls in flight had to end first, and mode keep does not wait for them",
    "load": "the engines read the weights",
    "held": "the trainer held the gate closed; it can report its own phases to POST /v1/gate/phases",
    "unreported": "the trainer held the gate closed for longer than the phases that it reported",
}


class GateUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A weight update as a node's gate saw it: from its first pause until it opened."""

    ended_at: float
    """Unix time, UTC, seconds."""
    mode: GateMode
    version: int | None
    """Policy version when the gate opened; None: never set."""
    drain_s: float
    """From the pause until no call was in flight; 0 under `keep`."""
    held_s: float
    """From then until the gate opened: the trainer's own work."""
    has_expired: bool
    """Whether it ended because its lease expired."""
    reported: dict[str, float] = {}
    """Phase -> seconds, as the trainer reported them."""

    @property
    def phases(self) -> dict[str, float]:
        """Phase -> seconds. The trainer's reported phases replace `held`, and the rest is `unreported`."""
        if not self.reported:
            return {"drain": self.drain_s, "held": self.held_s}
        rest = max(self.held_s - sum(self.reported.values()), 0.0)
        return {"drain": self.drain_s, **self.reported, "unreported": rest}


def slowest_phase(phases: Mapping[str, float]) -> str | None:
    """Returns the phase that took most of a long update; None if there is none, or the update was short."""
    total_s = sum(phases.values())
    slowest = max(phases, key=phases.__getitem__, default="")
    return slowest if total_s >= _LONG_S and phases[slowest] >= _MOST * total_s else None


def advice_on_phases(phases: Mapping[str, float]) -> str | None:
    """Returns a sentence if one phase took most of a weight update, with the reason or the remedy."""
    if (slowest := slowest_phase(phases)) is None:
        return None
    why = _ADVICE.get(slowest, "by the trainer's own report")
    return (
        f"{phases[slowest]:.1f} of the {sum(phases.values()):.1f} seconds of a weight update were the phase "
        f"{slowest}: {why}"
    )
