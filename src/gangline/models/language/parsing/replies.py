"""Converts a reply's text, in arbitrary pieces, to the deltas of its stream."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.domain.completion import ParseStatus
from gangline.domain.conversation import ModelCall
from gangline.domain.reply import ReplyDelta, ToolCallDelta
from gangline.models.language.parsing.events import CallEvent, Event, Schemas, TextEvent, ThinkingEvent
from gangline.models.language.parsing.parser import Parsers, ReplyParser
from gangline.models.language.tools import tool_fields


class ReplyText:
    """One choice of one call. Its tool calls are numbered from `first_call` on."""

    def __init__(
        self,
        parsers: Parsers,
        call: ModelCall,
        *,
        choice_index: int = 0,
        in_thinking: bool = False,
        first_call: int = 0,
    ) -> None:
        """in_thinking: the prompt has opened the think block."""
        self._parser = ReplyParser(
            parsers, in_thinking=in_thinking, schemas=_schemas(call), reads_calls=_wants_calls(call)
        )
        self._choice_index = choice_index
        self._num_calls = first_call

    @property
    def status(self) -> ParseStatus:
        return self._parser.status

    def feed(self, text: str) -> ReplyDelta:
        return self._shown(self._parser.feed(text))

    def finish(self) -> ReplyDelta:
        """The text held back so far. Called once, after the last text."""
        return self._shown(self._parser.finish())

    def finish_reason(self, reported: str) -> str:
        """`tool_calls` for a reply that stopped by itself after calls, as in chat routes."""
        return "tool_calls" if reported == "stop" and self._parser.num_calls else reported

    def _shown(self, events: Sequence[Event]) -> ReplyDelta:
        calls = [event for event in events if isinstance(event, CallEvent)]
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return ReplyDelta(
            choice_index=self._choice_index,
            thinking="".join(event.text for event in events if isinstance(event, ThinkingEvent)),
            text="".join(event.text for event in events if isinstance(event, TextEvent)),
            tool_calls=tuple(
                ToolCallDelta(first + i, call.arguments, call.call_id or f"call_{first + i}", call.name)
                for i, call in enumerate(calls)
            ),
        )


def _wants_calls(call: ModelCall) -> bool:
    return bool(call.tools) and (call.tool_choice is None or call.tool_choice.mode != "none")


def _schemas(call: ModelCall) -> Schemas:
    """The schemas in the form sent to the engine."""
    functions = [tool_fields(tool)["function"] for tool in call.tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}
