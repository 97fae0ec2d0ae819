"""The selection: decides which sessions are accepted, rejected or left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import msgspec

from gangline.domain.lifecycle import UNGRADED
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest, metadata_value
from gangline.domain.views import Verdict as PersonsVerdict
from gangline.models.engines.fields import media_in
from gangline.rows.conversations.conversation import Conversation

Standing = Literal["accepted", "rejected", "left_out"]
"""rejected: a graded answer that is wrong, for training verifiers and preferences. left_out: not in any row."""
HELD_OUT = "left out: held out"
"""The reason for sessions of held-out tasks, which are for evaluation."""


class Recorded(msgspec.Struct, frozen=True):
    """A session that ended, and its task."""

    result: SessionResult
    task: TaskRequest | None
    """None if the task is no longer stored."""
    said: PersonsVerdict | None = None
    """A person's verdict on the session, from an annotation of `Selection.annotated`."""

    @property
    def metadata(self) -> dict[str, Any]:
        return {} if self.task is None else self.task.metadata


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Criteria for accepting a session. All given ones must hold."""

    annotated: str | None = None
    """Name of a dataset of annotations; sessions outside it are ignored. A verdict `good` accepts a graded session with
    any reward, and `bad` rejects it.
    """
    min_reward: float = 1.0
    outcomes: tuple[str, ...] = ("completed",)
    """Outcomes of accepted sessions."""
    resolved: bool = False
    """The grader of tests reported that every fail-to-pass and every pass-to-pass test passes."""
    cheats: bool = False
    """Also accept sessions that touched protected files or spoiled their grading."""
    max_tokens: int | None = None
    """Maximum tokens of the main conversation; longer ones are left out."""
    max_turns: int | None = None
    """Maximum turns of the main conversation; longer ones are left out."""
    where: tuple[tuple[str, str], ...] = ()
    """Metadata keys of the tasks, dotted for nested ones, and their values; other tasks are ignored."""
    per_task: int | None = None
    """Maximum accepted sessions per task: highest reward first, then shortest."""
    duplicates: bool = False
    """Also keep sessions with the same content as an earlier one."""
    held_out: bool = False
    """Include sessions of held-out tasks."""


class Verdict(msgspec.Struct, frozen=True):
    standing: Standing
    why: str = ""
    """Empty for an accepted session."""


def is_wanted(selection: Selection, metadata: Mapping[str, Any]) -> bool:
    return all(metadata_value(metadata, key) == value for key, value in selection.where)


def judged(selection: Selection, recorded: Recorded, conversation: Conversation | None) -> Verdict:
    result = recorded.result
    if (why := _why_left_out(selection, result, conversation)) is not None:
        return Verdict("left_out", why)
    if recorded.said == "good":
        return Verdict("accepted")
    why = "annotated as bad" if recorded.said == "bad" else next(_why_rejected(selection, result), None)
    return Verdict("accepted") if why is None else Verdict("rejected", why)


def _why_left_out(selection: Selection, result: SessionResult, conversation: Conversation | None) -> str | None:
    if result.outcome in UNGRADED or result.reward is None:
        return "not graded"
    if conversation is None:
        return "no answered model call"
    if not conversation.messages or not conversation.num_prompt_messages:
        return "calls in tokens, without messages"
    if (media := media_in(conversation.messages)) is not None:
        return f"has {media}"
    if selection.max_tokens is not None and conversation.num_tokens > selection.max_tokens:
        return "too many tokens"
    if selection.max_turns is not None and conversation.num_turns > selection.max_turns:
        return "too many turns"
    return None


def _why_rejected(selection: Selection, result: SessionResult) -> Iterator[str]:
    if not selection.cheats and _is_cheat(result):
        yield "cheat"
    if result.outcome not in selection.outcomes:
        yield f"outcome {result.outcome}"
    if result.reward is None or not result.reward >= selection.min_reward:
        yield "reward"
    if selection.resolved and True not in _values(result.reward_details, "resolved"):
        yield "not resolved"


def _is_cheat(result: SessionResult) -> bool:
    """Whether its grading was spoiled, or its patch touched files that grading protects."""
    if result.failure is not None and result.failure.code == "grading_spoiled":
        return True
    return any(_values(result.reward_details, "not_applied"))


def _values(details: object, name: str) -> Iterator[object]:
    """Values of that name at any depth, as evaluators can be combined."""
    if isinstance(details, Mapping):
        for key, value in cast("Mapping[str, object]", details).items():
            if key == name:
                yield value
            yield from _values(value, name)
    elif isinstance(details, list | tuple):
        for value in cast("list[object]", details):
            yield from _values(value, name)
