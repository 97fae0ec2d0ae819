"""OpenAI Responses: the visible parts of a reply -> output items, and the stream events that announce them.

The same code writes whole replies and streams, so both have the same content. Items never overlap: thinking, text and
tool calls close the item that is open. A tool call is sent when it is complete. A partial call cannot be taken back,
and clients run a call as soon as it looks finished: a truncated command must not look so.

If the client asks for a summary, thinking is sent as one, piece by piece, as OpenAI does. Otherwise it is the content
of its finished item: clients that did not ask for a summary handle no events for it.
"""

from __future__ import annotations

from typing import Any, Literal

from gangline.domain.conversation import ModelCall, ToolCall
from gangline.domain.reply import TokenLogprob
from gangline.wire.dialects.responses.items import record_key
from gangline.wire.dialects.responses.tools import tool_call_item

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
