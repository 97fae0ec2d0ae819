"""Policy versions of one call: the engine's own, or the gate's for engines that report none with their replies.

The gate's version holds for engines that were there when the version was set. One that came later, or came back from a
failure, has the weights that it was started with: its tokens are of unknown version until a version is set again.
"""

from __future__ import annotations

from gangline.domain.completion import VersionSpan
from gangline.models.engines.contract import EngineChoice
from gangline.node.backends.gate import Gate

__all__ = ["VersionStamps"]


class VersionStamps:
    """Each token is stamped with the gate's version when it came. A reply that came in one piece has the version that
    it was begun under: where in it the weights changed cannot be known, and the older one is never too good."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._begun_under: int | None = None
        self._spans: dict[int, list[VersionSpan]] = {}

    def begin(self) -> None:
        """The engine is asked now. Tokens of an earlier try do not count."""
        self._spans.clear()
        self._begun_under = self._gate.version

    def saw(self, choice_index: int, num_ids: int) -> None:
        """`num_ids` more tokens of a choice came just now."""
        version = self._gate.version
        if version is None or num_ids == 0:
            return
        spans = self._spans.setdefault(choice_index, [])
        end = spans[-1].end if spans else 0
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end + num_ids)
        else:
            spans.append(VersionSpan(version, end, end + num_ids))

    def spans(self, choice: EngineChoice) -> tuple[VersionSpan, ...]:
        """Version spans of all sampled tokens of a choice: as the engine reports them, else as the gate did; empty
        where they are unknown."""
        if choice.version_spans or not choice.weights_known:
            return choice.version_spans
        num_ids = 0 if choice.sampled_ids is None else len(choice.sampled_ids)
        seen = self._spans.get(choice.index)
        if seen and seen[-1].end == num_ids:
            return tuple(seen)
        if self._begun_under is None or num_ids == 0:
            return ()
        return (VersionSpan(self._begun_under, 0, num_ids),)
