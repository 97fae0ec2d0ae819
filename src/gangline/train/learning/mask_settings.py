"""Masks by name: the `mask` setting of an experiment, and the resulting mask of a group's traces.

A mask may depend on the training phase (`progressive`), on the session's reward (`outcome_weighted`) and on the
evaluator's scores of turns (`turn_selective`). Source: "Inside the Agentic RL Training Loop".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from gangline.domain.errors import InvalidRequest
from gangline.domain.trajectory import Trace
from gangline.train.collecting.groups import Group
from gangline.train.learning.masks import (
    ThinkingIds,
    Weights,
    action_only,
    all_sampled,
    last_turns,
    num_turns_in_epoch,
    outcome_weighted,
    selected_turns,
)
from gangline.train.learning.samples import Mask
from gangline.train.options import TrainingOptions

Encode = Callable[[str], Sequence[int]]
"""Returns the token ids of a text in the model's vocabulary, without special tokens at its ends."""

Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
Mark = Annotated[str, Field(min_length=1)] | Ids
"""A text that is a single token of the model, or ids."""


class FullMask(TrainingOptions):
    """Every sampled token that may be trained on."""

    kind: Literal["full"] = "full"


class ActionOnlyMask(TrainingOptions):
    """Tokens outside the thinking."""

    kind: Literal["action_only"]
    begin: Mark = "<think>"
    """Marker that begins the thinking: a text that is a single token of the model, or a list of ids."""
    end: Mark = "</think>"
    """Marker that ends the thinking."""


class ProgressiveMask(TrainingOptions):
    """The last turns of a trace: one in the first phase, then linearly more, and all of them from phase `until` on."""

    kind: Literal["progressive"]
    max_turns: int = Field(ge=1)
    """Number that the trained turns grow towards: roughly the turns of a long trace."""
    unit: Literal["steps", "epochs"] = "epochs"
    """What counts as a phase. An epoch is a pass over the tasks; a group belongs to the epoch of its task."""
    until: int = Field(ge=2)
    """The phase, counted from 1, from which on all turns are trained."""

    def num_turns(self, phase: Phase) -> int | None:
        """Number of last turns to train on; None: all of them."""
        number = phase.step if self.unit == "steps" else phase.epoch
        return None if number + 1 >= self.until else num_turns_in_epoch(number, self.until, self.max_turns)


class OutcomeWeightedMask(TrainingOptions):
    """All sampled tokens, weighted by the session's reward: from `low` at 0 to `high` at 1."""

    kind: Literal["outcome_weighted"]
    low: float = Field(default=0.1, ge=0)
    high: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _rises(self) -> OutcomeWeightedMask:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class TurnSelectiveMask(TrainingOptions):
    """Turns that the evaluator scored at least `threshold`, such as evaluator `per_turn` or `script`."""

    kind: Literal["turn_selective"]
    threshold: float
    unscored: Literal["leave_out", "train"] = "leave_out"
    """Treatment of turns without a score. A step without any scored turn is an error in both cases."""


MaskSettings = Annotated[
    FullMask | ActionOnlyMask | ProgressiveMask | OutcomeWeightedMask | TurnSelectiveMask, Field(discriminator="kind")
]


class Phase(NamedTuple):
    """Progress of the training when a group is trained on. Both count from 0."""

    step: int
    epoch: int
    """Passes over the tasks before the group's task."""


class GroupMasks:
    """Masks of the groups of one run."""

    def __init__(
        self,
        settings: MaskSettings,
        encode: Encode | None = None,
        own: Mask | None = None,
        control: Callable[[Mask], Mask] = lambda mask: mask,
    ) -> None:
        """encode: the model's tokenizer, needed if a thinking marker is a text. own: a mask whose weights are
        multiplied with the weights of `settings`. control: changes the resulting mask.

        Raises: InvalidRequest if such a text is not a single token.
        """
        self._settings = settings
        self._own = own
        self._control = control
        self._thinking = (
            ThinkingIds(begin=_ids("begin", settings.begin, encode), end=_ids("end", settings.end, encode))
            if isinstance(settings, ActionOnlyMask)
            else None
        )

    @property
    def needs_turn_scores(self) -> bool:
        return isinstance(self._settings, TurnSelectiveMask)

    def mask(self, group: Group, phase: Phase) -> Mask:
        """The mask of the group's traces."""
        chosen, own = self._chosen(group, phase), self._own
        return self._control(chosen if own is None else lambda trace: chosen(trace) * own(trace))

    def _chosen(self, group: Group, phase: Phase) -> Mask:
        settings = self._settings
        match settings:
            case FullMask():
                return all_sampled
            case ActionOnlyMask():
                thinking = self._thinking
                assert thinking is not None
                return lambda trace: action_only(trace, thinking)
            case ProgressiveMask():
                num_turns = settings.num_turns(phase)
                return all_sampled if num_turns is None else lambda trace: last_turns(trace, num_turns)
            case OutcomeWeightedMask():
                rewards = {session.session_id: session.reward or 0.0 for session in group.sessions}
                return lambda trace: outcome_weighted(
                    trace, rewards[trace.session_id], low=settings.low, high=settings.high
                )
            case TurnSelectiveMask():
                return lambda trace: _selected(trace, settings)


def _ids(field: str, mark: str | tuple[int, ...], encode: Encode | None) -> tuple[int, ...]:
    """Raises: InvalidRequest."""
    if not isinstance(mark, str):
        return mark
    if encode is None:
        raise InvalidRequest(f"mask.{field} is the text {mark!r}, and there is no tokenizer: give token ids.")
    ids = tuple(encode(mark))
    if len(ids) != 1:
        raise InvalidRequest(
            f"mask.{field}: {mark!r} is {len(ids)} tokens of this model, which its neighbours may change. Give the "
            "token ids as the model writes them, such as [27, 14]."
        )
    return ids


def _selected(trace: Trace, settings: TurnSelectiveMask) -> Weights:
    otherwise = float("inf") if settings.unscored == "train" else float("-inf")
    scores = {span.completion_id: otherwise if span.score is None else span.score for span in trace.spans}
    return selected_turns(trace, scores, threshold=settings.threshold)
