"""Google: the reply -> one `GenerateContentResponse`, or the chunks of its stream.

Laws of a stream
- Chunks are complete responses of the same form; `finishReason` and `usageMetadata` are only on the last.
- The last chunk is never empty: the newest piece of text is held back for it. Gemini CLI samples the whole turn again
  if the last chunk has no content.
- Function calls are sent whole, on the last chunk, as in the finished reply. Their `args` are always an object.
- The thought signature is on the first function call, else on the last part: clients keep it there even if they drop
  thoughts.
- There are no comments: Gemini CLI's reader stops at the first line that is not `data: `. It skips white space, which
  serves as the keep-alive.
- No line contains U+2028, U+2029 or U+0085 unescaped: the JavaScript SDK's reader takes the first two for the end of
  a line, some Python readers the third.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, Usage
from gangline.domain.errors import GanglineError
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, TokenLogprob
from gangline.wire.dialects.google.contents import reply_signature
from gangline.wire.dialects.google.errors import google_error
from gangline.wire.dialects.google.tools import MALFORMED_ARGUMENTS

# Engines have further reasons; `abort` means that the reply was cut short.
_FINISH_REASONS = {"length": "MAX_TOKENS", "abort": "MAX_TOKENS", "content_filter": "SAFETY"}

_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))

_Part = dict[str, Any]


def google_reply_body(call: ModelCall, reply: Reply) -> bytes:
    candidates = [_candidate(call, choice, reply.reply_id) for choice in reply.choices]
    head = _head(reply.reply_id, reply.model)
    return _encode({"candidates": candidates, "usageMetadata": _usage(reply.usage)} | head)


def _encode(fields: dict[str, Any]) -> bytes:
    encoded = msgspec.json.encode(fields)
    for character, escape in _LINE_ENDS:
        encoded = encoded.replace(character, escape)
    return encoded


def _head(reply_id: str, model: str) -> dict[str, Any]:
    return {"modelVersion": model, "responseId": reply_id}


def _candidate(call: ModelCall, choice: ReplyChoice, reply_id: str) -> dict[str, Any]:
    parts = _said(choice.message) if _shows_thoughts(call) else _said(choice.message)[1:]
    return _finished(call, choice, [part for part in parts if part["text"]], reply_id, choice.logprobs or ())


def _shows_thoughts(call: ModelCall) -> bool:
    return bool(call.echo.get("thoughts"))


def _said(message: Message) -> list[_Part]:
    """The thought, then the text; either may be empty."""
    thought = "".join(part.text for part in message.parts if isinstance(part, Thinking))
    text = "".join(part.text for part in message.parts if isinstance(part, Text))
    return [{"text": thought, "thought": True}, {"text": text}]


def _finished(
    call: ModelCall, choice: ReplyChoice, parts: list[_Part], reply_id: str, logprobs: tuple[TokenLogprob, ...]
) -> dict[str, Any]:
    """A candidate that ends with `parts` and its function calls."""
    calls = [_function_call(part) for part in choice.message.parts if isinstance(part, ToolCall)]
    if calls:
        calls[0]["thoughtSignature"] = reply_signature(reply_id)
    elif parts:
        parts[-1]["thoughtSignature"] = reply_signature(reply_id)
    candidate: dict[str, Any] = {
        "content": {"role": "model", "parts": [*parts, *calls] or [{"text": ""}]},
        "finishReason": _FINISH_REASONS.get(choice.finish_reason, "STOP"),
        "index": choice.index,
    }
    if call.num_top_logprobs is not None:
        whole = choice.logprobs or ()
        mean = sum(entry.logprob for entry in whole) / len(whole) if whole else 0.0
        candidate |= {"avgLogprobs": mean, "logprobsResult": _logprobs(logprobs)}
    return candidate


def _function_call(call: ToolCall) -> _Part:
    return {"functionCall": {"id": call.call_id, "name": call.name, "args": _args(call.arguments)}}


def _args(arguments: str) -> msgspec.Raw | dict[str, str]:
    """The model's own JSON text, without white space that could contain a line end; wrapped if it is not an object."""
    if not arguments.strip():
        return {}
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return msgspec.Raw(msgspec.json.format(arguments.encode(), indent=-1))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    return {MALFORMED_ARGUMENTS: arguments}


def _logprobs(entries: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    return {
        "topCandidates": [{"candidates": [_token_logprob(top) for top in entry.top]} for entry in entries],
        "chosenCandidates": [_token_logprob(entry) for entry in entries],
        "logProbabilitySum": sum(entry.logprob for entry in entries),
    }


def _token_logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logProbability": entry.logprob}


def _usage(usage: Usage) -> dict[str, Any]:
    """`candidatesTokenCount` excludes thoughts, `promptTokenCount` includes cached tokens."""
    fields: dict[str, Any] = {
        "promptTokenCount": usage.num_prompt_tokens,
        "candidatesTokenCount": max(usage.num_sampled_tokens - usage.num_thinking_tokens, 0),
        "totalTokenCount": usage.num_prompt_tokens + usage.num_sampled_tokens,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": usage.num_prompt_tokens}],
    }
    if usage.num_thinking_tokens:
        fields["thoughtsTokenCount"] = usage.num_thinking_tokens
    if usage.num_cached_tokens:
        fields["cachedContentTokenCount"] = usage.num_cached_tokens
    return fields


class _Streamed:
    """The sent and the held-back parts of one choice."""

    def __init__(self) -> None:
        self.thought = ""
        self.text = ""
        self.held: list[_Part] = []
        self.held_logprobs: list[TokenLogprob] = []
        self.num_logprobs = 0

    def feed(
        self, thought: str, text: str, logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[list[_Part], list[TokenLogprob]]:
        """The parts that can be sent now: all but the newest. Log-probs are sent with the part that they came with."""
        parts: list[_Part] = [{"text": thought, "thought": True}] if thought else []
        parts += [{"text": text}] if text else []
        self.thought, self.text = self.thought + thought, self.text + text
        if not parts:
            self.held_logprobs += logprobs
            return [], []
        out, out_logprobs = [*self.held, *parts[:-1]], self.held_logprobs
        self.held = parts[-1:]
        self.held_logprobs = [*logprobs] if out else [*out_logprobs, *logprobs]
        self.num_logprobs += len(out_logprobs) if out else 0
        return out, out_logprobs if out else []

    def rest(self, parts: list[_Part]) -> list[_Part]:
        """The held-back parts, and the parts of the finished reply beyond the deltas."""
        thought, text = parts[0]["text"], parts[1]["text"]
        rest = list(self.held)
        if len(thought) > len(self.thought) and thought.startswith(self.thought):
            rest.append({"text": thought[len(self.thought) :], "thought": True})
        if len(text) > len(self.text) and text.startswith(self.text):
            rest.append({"text": text[len(self.text) :]})
        return rest


class GoogleEventWriter:
    """Writes one stream: server-sent events, or one JSON array if the client did not ask for events."""

    def __init__(self, call: ModelCall, *, reply_id: str, model: str, created_at: int) -> None:
        self._call = call
        self._reply_id = reply_id
        self._head = _head(reply_id, model)
        self._as_array = bool(call.echo.get("array"))
        self._has_begun = False
        self._choices: dict[int, _Streamed] = {}

    @property
    def media_type(self) -> str:
        return "application/json" if self._as_array else "text/event-stream"

    def start(self, num_prompt_tokens: int) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return b"\n"

    def delta(self, delta: ReplyDelta) -> bytes:
        thought = delta.thinking if _shows_thoughts(self._call) else ""
        parts, logprobs = self._streamed(delta.choice_index).feed(thought, delta.text, delta.logprobs)
        if not parts:
            return b""
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": delta.choice_index}
        if self._call.num_top_logprobs is not None and logprobs:
            candidate["logprobsResult"] = _logprobs(tuple(logprobs))
        return self._chunk({"candidates": [candidate]})

    def finish(self, reply: Reply) -> bytes:
        candidates = [self._last(choice) for choice in reply.choices]
        last = self._chunk({"candidates": candidates, "usageMetadata": _usage(reply.usage)})
        return last + (b"]" if self._as_array else b"")

    @property
    def error_stands_alone(self) -> bool:
        return not self._as_array

    def error(self, error: GanglineError) -> bytes:
        """Not an event: both SDKs look for a line of bare JSON, and take an error event for an empty chunk.

        The JavaScript SDK only sees it in a separate chunk. Without an empty line after it, the SDK reports an
        incomplete stream if it arrives in one chunk with an event; otherwise it would take the stream for complete.
        """
        body = google_error(error).body
        return self._separator() + body + b"]" if self._as_array else body + b"\n"

    def _last(self, choice: ReplyChoice) -> dict[str, Any]:
        streamed = self._streamed(choice.index)
        parts = _said(choice.message)
        if not _shows_thoughts(self._call):
            parts[0]["text"] = ""
        logprobs = (choice.logprobs or ())[streamed.num_logprobs :]
        return _finished(self._call, choice, streamed.rest(parts), self._reply_id, logprobs)

    def _streamed(self, index: int) -> _Streamed:
        return self._choices.setdefault(index, _Streamed())

    def _chunk(self, fields: dict[str, Any]) -> bytes:
        encoded = _encode(fields | self._head)
        return self._separator() + encoded if self._as_array else b"data: " + encoded + b"\n\n"

    def _separator(self) -> bytes:
        begun, self._has_begun = self._has_begun, True
        return b",\r\n" if begun else b"["
