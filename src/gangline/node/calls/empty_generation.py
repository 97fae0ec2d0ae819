"""Empty generations: replies that end by themselves without text, thinking or a tool call.

The task says how often such a reply is sampled again (`capture.empty_generation_retries`). Laws
- A reply that was given up is recorded as aborted, so that it is never trained on, and shows the client nothing.
- The call stays one call: one turn, one number, one id. Only its seed changes: the same one samples the same reply.
- The last reply is delivered as it is, and its record says `empty_generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gangline.domain.completion import EMPTY_GENERATION
from gangline.domain.conversation import SamplingParams, Text, Thinking
from gangline.domain.reply import ReplyDelta
from gangline.domain.seeds import derived_seed
from gangline.models.engines.contract import EngineChoice
from gangline.node.calls.sampling_policy import NUM_SEEDS

__all__ = ["GIVEN_UP", "Tries", "is_empty"]

GIVEN_UP = "empty_generation: sampled again"
"""Why the record of a reply that was given up is aborted."""

_CUT_SHORT = ("length", "abort", None)
"""Finish reasons of replies that did not end by themselves."""


def is_empty(choices: Sequence[EngineChoice], stop: Sequence[str]) -> bool:
    """Whether no choice of a reply has any content, and nothing but the model ended them.

    stop: the client's own stop strings. One that comes first leaves nothing, as the client asked.
    """
    for choice in choices:
        if choice.finish_reason in _CUT_SHORT or choice.parse not in (None, "ok") or choice.stop_reason in stop:
            return False
        for part in choice.message.parts:
            if not isinstance(part, Text | Thinking) or part.text:
                return False
    return True


class Tries:
    """The tries of one call. While one may be given up, its deltas are held back until one has content."""

    def __init__(self, num_retries: int, show: Callable[[ReplyDelta], None]) -> None:
        self.num_given_up = 0
        self._num_retries = num_retries
        self._show = show
        self._held: list[ReplyDelta] = []
        self._is_holding = num_retries > 0

    def show(self, delta: ReplyDelta) -> None:
        self._held.append(delta)
        if not self._is_holding or delta.text or delta.thinking or delta.tool_calls:
            self.deliver()

    def deliver(self) -> None:
        """Show all that was held back; the rest is shown as it comes."""
        self._is_holding = False
        for delta in self._held:
            self._show(delta)
        self._held.clear()

    def give_up(self) -> bool:
        """Forget an empty reply, if it may be sampled again. Returns whether it may."""
        if self.num_given_up >= self._num_retries:
            return False
        self.num_given_up += 1
        self._held.clear()
        return True

    def metadata(self, choices: Sequence[EngineChoice], stop: Sequence[str]) -> dict[str, Any]:
        """For the record of the reply that is delivered."""
        told: dict[str, Any] = {EMPTY_GENERATION: "delivered"} if is_empty(choices, stop) else {}
        return told | ({"empty_retries": self.num_given_up} if self.num_given_up else {})

    def sampling(self, first: SamplingParams) -> SamplingParams:
        """Parameters of the next try. `first`: those of the first one."""
        if first.seed is None:
            return first
        return msgspec.structs.replace(first, seed=derived_seed(first.seed, self.num_given_up) % NUM_SEEDS)
