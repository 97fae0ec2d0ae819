"""OpenAI Responses: the reply -> one response object, or the events of its stream.

A stream is: created, in_progress, the items in sequence, then completed, incomplete or failed; sequence numbers grow by
one. Clients need `response.created` first, so the first keep-alive before the reply starts the stream. Later
keep-alives repeat `response.in_progress`: Codex only counts parsed events, not comments.

The visible parts of a reply become output items, which a stream's events announce. The same code writes whole replies
and streams, so both have the same content. Items never overlap: thinking, text and tool calls close the item that is
open. A tool call is sent when it is complete. A partial call cannot be taken back, and clients run a call as soon as it
looks finished: a truncated command must not look so.

If the client asks for a summary, thinking is sent as one, piece by piece, as OpenAI does. Otherwise it is the content
of its finished item: clients that did not ask for a summary handle no events for it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gangline.domain.conversation import ModelCall, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, TokenLogprob
from gangline.wire.dialects.responses.errors import stream_error
from gangline.wire.dialects.responses.items import record_key
from gangline.wire.dialects.responses.request import RESPONSE_ID_PREFIX
from gangline.wire.dialects.responses.tools import tool_call_item

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


Event = tuple[str, dict[str, Any]]
"""(type, fields), without the sequence number."""

ItemStatus = Literal["completed", "incomplete"]


class OutputItems:
    """Feed it in order and call `close` at the end. Each call returns the resulting events."""

    def __init__(self, call: ModelCall, reply_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        """The finished items, in order."""
        self._call = call
        self._reply_id = reply_id
        self._summarised = _wants_summary(call)
        self._open: Literal["thinking", "text"] | None = None
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def think(self, piece: str) -> list[Event]:
        events = self._switch("thinking")
        self._pieces.append(piece)
        if not self._summarised:
            return events
        return [*events, self._at("response.reasoning_summary_text.delta", summary_index=0, delta=piece)]

    def say(self, piece: str, logprobs: tuple[TokenLogprob, ...] = ()) -> list[Event]:
        events = self._switch("text")
        if not piece:
            return events
        self._pieces.append(piece)
        shown = self._shown(logprobs)
        return [*events, self._at("response.output_text.delta", content_index=0, delta=piece, logprobs=shown)]

    def note_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Log-probs of all tokens, in order. A text's log-probs are found by its text."""
        self._logprobs += logprobs

    def call_tool(self, call: ToolCall, status: ItemStatus = "completed") -> list[Event]:
        events = self.close()
        item = tool_call_item(call, self._call.tools, self._item_key())
        if item["type"] == "custom_tool_call":
            field, name = "input", "response.custom_tool_call_input"
        else:
            field, name = "arguments", "response.function_call_arguments"
        begun = item | {field: "", "status": "in_progress"}
        events.append(self._at("response.output_item.added", item=begun, item_id=None))
        if item[field]:
            events.append(self._at(f"{name}.delta", item_id=item["id"], delta=item[field]))
        events.append(self._at(f"{name}.done", item_id=item["id"], **{field: item[field]}))
        return [*events, self._finish(item | {"status": status})]

    def close(self, status: ItemStatus = "completed") -> list[Event]:
        """End the open item, if any."""
        if self._open is None:
            return []
        whole = "".join(self._pieces)
        events = self._end_thinking(whole) if self._open == "thinking" else self._end_text(whole, status)
        self._open = None
        self._pieces.clear()
        return events

    # -- one kind each -------------------------------------------------------------------------------------------

    def _switch(self, kind: Literal["thinking", "text"]) -> list[Event]:
        if self._open == kind:
            return []
        events = self.close()
        self._open = kind
        return [*events, *(self._begin_thinking() if kind == "thinking" else self._begin_text())]

    def _begin_thinking(self) -> list[Event]:
        added = self._at("response.output_item.added", item=self._reasoning(), item_id=None)
        if not self._summarised:
            return [added]
        part = {"type": "summary_text", "text": ""}
        return [added, self._at("response.reasoning_summary_part.added", summary_index=0, part=part)]

    def _begin_text(self) -> list[Event]:
        return [
            self._at("response.output_item.added", item=self._message([], "in_progress"), item_id=None),
            self._at("response.content_part.added", content_index=0, part=_text_part("", [])),
        ]

    def _end_thinking(self, whole: str) -> list[Event]:
        if not self._summarised:
            return [self._finish(self._reasoning(content=[{"type": "reasoning_text", "text": whole}]))]
        part = {"type": "summary_text", "text": whole}
        return [
            self._at("response.reasoning_summary_text.done", summary_index=0, text=whole),
            self._at("response.reasoning_summary_part.done", summary_index=0, part=part),
            self._finish(self._reasoning(summary=[part])),
        ]

    def _end_text(self, whole: str, status: ItemStatus) -> list[Event]:
        shown = self._shown(_of_text(self._logprobs, whole))
        part = _text_part(whole, shown)
        return [
            self._at("response.output_text.done", content_index=0, text=whole, logprobs=shown),
            self._at("response.content_part.done", content_index=0, part=part),
            self._finish(self._message([part], status)),
        ]

    def _reasoning(self, **fields: list[dict[str, Any]]) -> dict[str, Any]:
        key = record_key(self._reply_id)
        return {"id": self._item_id(), "type": "reasoning", "summary": [], "encrypted_content": key, **fields}

    def _message(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {"id": self._item_id(), "type": "message", "status": status, "role": "assistant", "content": content}

    def _finish(self, item: dict[str, Any]) -> Event:
        event = self._at("response.output_item.done", item=item, item_id=None)
        self.items.append(item)
        return event

    def _at(self, kind: str, **fields: Any) -> Event:
        """An event of the open item; `item_id=None` if the event has no item id."""
        if "item_id" not in fields:
            fields["item_id"] = self._item_id()
        elif fields["item_id"] is None:
            del fields["item_id"]
        return kind, {"output_index": len(self.items), **fields}

    def _item_id(self) -> str:
        return f"{'rs' if self._open == 'thinking' else 'msg'}_{self._item_key()}"

    def _item_key(self) -> str:
        return f"{self._reply_id}{len(self.items):02x}"

    def _shown(self, logprobs: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
        if self._call.num_top_logprobs is None:
            return []
        return [_token(entry) | {"top_logprobs": [_token(top) for top in entry.top]} for entry in logprobs]


def _wants_summary(call: ModelCall) -> bool:
    asked: dict[str, Any] = call.echo.get("reasoning", {})
    return bool(asked.get("summary") or asked.get("generate_summary"))


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _token(entry: TokenLogprob) -> dict[str, Any]:
    utf8 = entry.token.encode("utf-8", "replace") if entry.utf8 is None else entry.utf8
    return {"token": entry.token, "bytes": list(utf8), "logprob": entry.logprob}


def _of_text(logprobs: list[TokenLogprob], text: str) -> tuple[TokenLogprob, ...]:
    """The tokens of `text`: thinking comes before it, calls after it. All tokens if they do not spell the text."""
    start = "".join(entry.token for entry in logprobs).rfind(text) if text else -1
    if start < 0:
        return tuple(logprobs)
    chosen: list[TokenLogprob] = []
    at = 0
    for entry in logprobs:
        if at < start + len(text) and at + len(entry.token) > start:
            chosen.append(entry)
        at += len(entry.token)
    return tuple(chosen)
