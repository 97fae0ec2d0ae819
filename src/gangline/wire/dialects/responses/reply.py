"""OpenAI Responses: the reply -> one response object, or the events of its stream.

A stream is: created, in_progress, the items in sequence, then completed, incomplete or failed; sequence numbers grow by
one. Clients need `response.created` first, so the first keep-alive before the reply starts the stream. Later
keep-alives repeat `response.in_progress`: Codex only counts parsed events, not comments.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gangline.domain.conversation import ModelCall, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta
from gangline.wire.dialects.responses.errors import stream_error
from gangline.wire.dialects.responses.output import Event, ItemStatus, OutputItems
from gangline.wire.dialects.responses.request import RESPONSE_ID_PREFIX

# Why a reply is incomplete; `abort` means that it was cut short.
_INCOMPLETE = {"length": "max_output_tokens", "abort": "max_output_tokens", "content_filter": "content_filter"}

_HELD_PIECES = 256
"""Pieces between two keep-alives while all output is held back: without them the client would think the stream dead."""

_STATUS = Literal["in_progress", "completed", "incomplete", "failed"]


def responses_reply_body(call: ModelCall, reply: Reply) -> bytes:
    writer = ResponsesEventWriter(call, reply_id=reply.reply_id, model=reply.model, created_at=reply.created_at)
    _, ending = writer.last_events(reply)[-1]
    return msgspec.json.encode(ending["response"])


class ResponsesEventWriter:
    """Writes one stream. Call `start`, deltas, then `finish` or `error`, once; `keep_alive` at any time."""

    media_type = "text/event-stream"

    def __init__(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> None:
        self._call = call
        self._skeleton = _skeleton(call, reply_id, model, created_at)
        self._output = OutputItems(call, reply_id)
        self._sequence = 0
        self._begun = False
        self._fed = False
        self._num_held = 0

    def start(self, num_prompt_tokens: int) -> bytes:
        """Usage is sent only at the end, including the prompt's length."""
        return self._begin()

    def keep_alive(self) -> bytes:
        self._num_held = 0
        return self._begin() or self._written([("response.in_progress", self._response("in_progress"))])

    def delta(self, delta: ReplyDelta) -> bytes:
        """This API has one choice. Tool calls wait for `finish`."""
        if delta.choice_index != 0:
            return b""
        shown = self._begin() + self._written(self._feed(delta))
        self._num_held = 0 if shown else self._num_held + 1
        return self.keep_alive() if self._num_held >= _HELD_PIECES else shown

    def finish(self, reply: Reply) -> bytes:
        return self._begin() + self._written(self.last_events(reply))

    @property
    def error_stands_alone(self) -> bool:
        return False

    def error(self, error: GanglineError) -> bytes:
        failed = self._response("failed", error=stream_error(error))
        return self._begin() + self._written([("response.failed", failed)])

    def last_events(self, reply: Reply) -> list[Event]:
        """The rest of the reply: all of it if there were no deltas."""
        choice = reply.choices[0]
        reason = _INCOMPLETE.get(choice.finish_reason)
        status: ItemStatus = "completed" if reason is None else "incomplete"
        events = [*([] if self._fed else self._feed(_all_but_calls(choice))), *self._end_items(choice, status)]
        details = None if reason is None else {"reason": reason}
        response = self._response(
            status,
            incomplete_details=details,
            completed_at=reply.created_at if reason is None else None,
            output=self._output.items,
            usage=_usage(reply.usage),
        )
        return [*events, (f"response.{status}", response)]

    def _feed(self, delta: ReplyDelta) -> list[Event]:
        self._fed = True
        self._output.note_logprobs(delta.logprobs)
        thinking = self._output.think(delta.thinking) if delta.thinking else []
        return thinking + (self._output.say(delta.text, delta.logprobs) if delta.text else [])

    def _end_items(self, choice: ReplyChoice, status: ItemStatus) -> list[Event]:
        """Only the last item can be incomplete. An empty reply is one empty text."""
        calls = [part for part in choice.message.parts if isinstance(part, ToolCall)]
        events = self._output.close("completed" if calls else status)
        for call in calls:
            events += self._output.call_tool(call, status if call is calls[-1] else "completed")
        if not self._output.items:
            events += self._output.say("") + self._output.close(status)
        return events

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        fields = self._response("in_progress")
        return self._written([("response.created", fields), ("response.in_progress", fields)])

    def _response(self, status: _STATUS, **fields: Any) -> dict[str, Any]:
        return {"response": self._skeleton | {"status": status, **fields}}

    def _written(self, events: list[Event]) -> bytes:
        return b"".join([self._event(kind, fields) for kind, fields in events])

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _all_but_calls(choice: ReplyChoice) -> ReplyDelta:
    parts = choice.message.parts
    return ReplyDelta(
        thinking="".join(part.text for part in parts if isinstance(part, Thinking)),
        text="".join(part.text for part in parts if isinstance(part, Text)),
        logprobs=choice.logprobs or (),
    )


def _skeleton(call: ModelCall, reply_id: str, model: str, created_at: int) -> dict[str, Any]:
    """Every field of a response object: the request's value, else OpenAI's default."""
    echo = call.echo
    return {
        "id": f"{RESPONSE_ID_PREFIX}{reply_id}",
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": echo.get("instructions"),
        "max_output_tokens": echo.get("max_output_tokens"),
        "max_tool_calls": echo.get("max_tool_calls"),
        "model": model,
        "output": [],
        "parallel_tool_calls": echo.get("parallel_tool_calls", True),
        "presence_penalty": echo.get("presence_penalty", 0.0),
        "frequency_penalty": echo.get("frequency_penalty", 0.0),
        "previous_response_id": echo.get("previous_response_id"),
        "prompt_cache_key": echo.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None} | echo.get("reasoning", {}),
        "safety_identifier": echo.get("safety_identifier"),
        "service_tier": "default",
        "store": echo.get("store", True),
        "temperature": echo.get("temperature", 1.0),
        "text": {"format": {"type": "text"}} | echo.get("text", {}),
        "tool_choice": echo.get("tool_choice", "auto"),
        "tools": [_tool(tool) for tool in echo.get("tools", ())],
        "top_logprobs": echo.get("top_logprobs", 0),
        "top_p": echo.get("top_p", 1.0),
        "truncation": echo.get("truncation", "disabled"),
        "usage": None,
        "user": echo.get("user"),
        "metadata": echo.get("metadata", {}),
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False} | tool


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_thinking_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_sampled_tokens,
    }
