"""The model calls of a recorded session, in the order of their answers, and whether it can be forked after one of them.

A call can be answered from its record if the record contains everything that the answer and the comparison of requests
need. A session that cannot be forked is refused with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gangline.domain.completion import EMPTY_GENERATION, Completion
from gangline.domain.conversation import ModelCall, Text, ToolCall, ToolResult
from gangline.rows.forks.tolerance import Tolerance

REQUEST = "request_fields"
"""Name in a record's metadata: digests of the request's fields other than its conversation."""

USAGE = "usage"
"""Name in a record's metadata: the usage that the client was sent, if the engine reported it."""

REPLAYED = "replayed"
"""Name in a record's metadata: the parent's completion that it repeats; see `ForkSpec`."""

RESUMED = "resumed"
"""Name in a record's metadata: the lost node's record that it repeats; see `CaptureSpec.durable`."""

_FIELDS = (
    "tool_choice",
    "parallel_tool_calls",
    "sampling",
    "num_choices",
    "num_top_logprobs",
    "response_format",
    "dropped",
    "agent_role",
)


LINEAGE_FILE = "fork.json"
"""Name of the artifact with a `ForkLineage`."""


RESUME_FILE = "resumed.json"
"""Like `LINEAGE_FILE`, for a session that continues after a lost node: its own earlier attempt."""


class ForkLineage(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a fork's session, and how far it followed its parent."""

    session_id: str
    attempt: int
    turn: int
    num_replayed: int
    """Calls answered from the record: fewer than `turn` if the agent ended or diverged before it."""
    num_tolerated: int
    """Messages with a value that differs in each run; the engine was sent the recorded ones."""
    was_edited: bool | None = None
    """Whether the engine was sent the fork's edit; None if it has no edit."""
    engine: str | None = None
    """The role whose own engines answered after the fork; None: the policy's."""


class RecordedCall(msgspec.Struct, frozen=True):
    turn: int
    """1 for the call that was answered first."""
    choices: tuple[Completion, ...]
    """At least one; more if the client asked for several."""

    @property
    def first(self) -> Completion:
        return self.choices[0]


def request_fields(call: ModelCall) -> dict[str, str]:
    """Returns digests of the fields with other values than the default, without the conversation, the model and the
    tools."""
    return {name: _digest(value) for name, plain in _PLAIN if (value := getattr(call, name)) != plain}


_plain = ModelCall(dialect="", model="", messages=())
_PLAIN: list[tuple[str, Any]] = [(name, getattr(_plain, name)) for name in _FIELDS]


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


def recorded_calls(completions: Iterable[Completion]) -> list[RecordedCall]:
    """Returns calls by turn, without replies that were given up and sampled again."""
    by_reply: dict[str, list[Completion]] = {}
    for completion in completions:
        if completion.status == "complete" or completion.metadata.get(EMPTY_GENERATION) != "retried":
            key = str(completion.metadata.get("reply_id", completion.completion_id))
            by_reply.setdefault(key, []).append(completion)
    return [RecordedCall(turn, tuple(choices)) for turn, choices in enumerate(by_reply.values(), start=1)]


def why_not_forkable(completions: Sequence[Completion], turn: int, tolerance: Tolerance) -> str | None:
    """Returns why the session cannot be forked after its call `turn`; None if it can."""
    calls = recorded_calls(completions)
    if not calls:
        return "it has no recorded model call"
    if not 1 <= turn <= len(calls):
        return f"turn {turn} is none of its turns: it has 1 to {len(calls)}"
    for call in calls[:turn]:
        if (why := _why_not_replayable(call)) is not None:
            return f"call {call.turn} {why}"
    return _named_again(calls[:turn], tolerance)


def _why_not_replayable(call: RecordedCall) -> str | None:
    first = call.first
    if first.status != "complete":
        return "was cut off before its answer"
    if REQUEST not in first.metadata:
        return "has no record of its request's fields: a call in tokens, or recorded by an earlier version"
    if "num_top_logprobs" in first.metadata[REQUEST]:
        return "asked for log-probs, whose texts are not kept"
    if "agent_role" in first.metadata:
        return "is of one role among several"
    if first.certificate.engine_role is not None:
        return f"was answered by the engines of role {first.certificate.engine_role!r}, not by the policy's"
    if any(len(choice.sampled_ids) == 0 for choice in call.choices):
        return "has no token ids"
    return None


def _named_again(calls: Sequence[RecordedCall], tolerance: Tolerance) -> str | None:
    """Returns the reason if a later call of the model names a value that differs in each run."""
    seen: set[str] = set()
    for call in calls:
        for message in call.first.new_messages:
            if message.role != "assistant":
                seen.update(value for text in _texts(message.parts) for value in tolerance.handles(text))
        whole_text = "\n".join(
            part.arguments for choice in call.choices for part in choice.response.parts if isinstance(part, ToolCall)
        )
        if (value := next((value for value in seen if value in whole_text), None)) is not None:
            return f"call {call.turn} names {value!r}, which is another value in each run: fork before that call"
    return None


def _texts(parts: Iterable[object]) -> Iterable[str]:
    for part in parts:
        if isinstance(part, Text):
            yield part.text
        elif isinstance(part, ToolResult):
            yield from (piece.text for piece in part.content if isinstance(piece, Text))
