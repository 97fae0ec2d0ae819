"""The text side of a raw generate route: from a conversation to ids, and from sampled ids to a reply.

Three kinds, one plug-in each: the engine's own routes (`generate`), a tokenizer with its chat template
(`generate_template`), and the `renderers` library (`generate_renderers`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gangline.domain.completion import ParseStatus
from gangline.domain.conversation import Message, ModelCall, ToolDefinition
from gangline.domain.errors import EngineRefused, InvalidRequest
from gangline.domain.reply import ReplyDelta
from gangline.domain.tokens import TokenIds, token_ids
from gangline.models.engines.fields import messages_fields
from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.messages import template_messages
from gangline.models.language.parsing.detect import opens_thinking
from gangline.models.language.parsing.parser import Parsers
from gangline.models.language.parsing.replies import ReplyText
from gangline.models.language.text import IncrementalText, StopStrings
from gangline.models.language.tools import tool_fields


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed content of some sampled ids."""

    shown: ReplyDelta
    num_kept: int
    """Number of ids kept; the rest came after a stop string."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    """The stop string that ended the reply."""
    parse: ParseStatus | None = None
    """Set together with the finish reason."""


class ReplyReader(Protocol):
    """Parses one choice."""

    async def feed(self, ids: Sequence[int], finish_reason: str | None) -> Read:
        """`finish_reason`: the engine's, with its last ids. A `Read` with a finish reason is the last."""
        ...


class TextSide(Protocol):
    stop_ids: tuple[int, ...]
    """Ids that end a turn; empty if only the engine knows them."""
    stops_here: bool
    """Whether stop strings are found on this side; otherwise the engine must find them."""

    @property
    def reads_calls(self) -> bool | None:
        """Whether tool calls are parsed from replies; None: unknown."""
        ...

    @property
    def num_ids(self) -> int | None:
        """Size of the vocabulary; None if only the engine knows."""
        ...

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        """Raises: EngineRefused when the template rejects the conversation."""
        ...

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Text including special tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """For clients that request log-probs."""
        ...

    async def reader(self, call: ModelCall, prompt_ids: TokenIds, choice_index: int) -> ReplyReader: ...


class LocalText(ABC):
    """The part of a `TextSide` that all with the model's tokenizer on this side share."""

    stops_here = True

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_ids = tokenizer.num_ids
        self._rendering = asyncio.Lock()

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        # A long conversation takes tens of milliseconds, and a tokenizer may not be used by two threads.
        async with self._rendering:
            return await asyncio.to_thread(self.rendered, messages, tools, template_kwargs, add_generation_prompt)

    def rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        offered = [tool_fields(tool) for tool in tools] or None
        try:
            shaped = template_messages(messages_fields(messages))
            return token_ids(self._ids(shaped, offered, template_kwargs, add_generation_prompt))
        except InvalidRequest as refused:
            raise EngineRefused(str(refused), status=400) from refused

    @abstractmethod
    def _ids(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
        add_generation_prompt: bool,
    ) -> Sequence[int]:
        """Raises: EngineRefused, InvalidRequest."""

    async def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def token_text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])


class TokenReader:
    """Decodes text as it is sampled, with a local tokenizer: detokenises, cuts at stop strings, parses."""

    def __init__(
        self, tokenizer: ChatTokenizer, parsers: Parsers, call: ModelCall, prompt_ids: TokenIds, choice_index: int
    ) -> None:
        in_thinking = opens_thinking(tokenizer, prompt_ids.tolist()[-8:], parsers.thinking)
        self._text = IncrementalText(tokenizer, skip_special=not parsers.need_special_tokens)
        self._stops = StopStrings(call.sampling.stop)
        self._reply = ReplyText(parsers, call, choice_index=choice_index, in_thinking=in_thinking)
        self._choice_index = choice_index

    async def feed(self, ids: Sequence[int], finish_reason: str | None) -> Read:
        shown = ReplyDelta(choice_index=self._choice_index)
        for position, token_id in enumerate(ids):
            if finish_reason == "stop" and position + 1 == len(ids):
                break  # the end of turn is not text
            text, stop = self._stops.feed(self._text.feed(token_id))
            shown = joined(shown, self._reply.feed(text))
            if stop is not None:
                return self._end(shown, position + 1, "stop", stop)
        if finish_reason is None:
            return Read(shown=shown, num_kept=len(ids))
        text, stop = self._stops.feed(self._text.flush())
        shown = joined(shown, self._reply.feed(text if stop else text + self._stops.flush()))
        return self._end(shown, len(ids), "stop" if stop else finish_reason, stop)

    def _end(self, shown: ReplyDelta, num_kept: int, reason: str, stop: str | None) -> Read:
        return Read(
            shown=joined(shown, self._reply.finish()),
            num_kept=num_kept,
            finish_reason=self._reply.finish_reason(reason),
            stop_reason=stop,
            parse=self._reply.status,
        )


def joined(first: ReplyDelta, then: ReplyDelta) -> ReplyDelta:
    return ReplyDelta(
        choice_index=first.choice_index,
        thinking=first.thinking + then.thinking,
        text=first.text + then.text,
        tool_calls=first.tool_calls + then.tool_calls,
    )
