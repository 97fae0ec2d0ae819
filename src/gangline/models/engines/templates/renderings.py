"""Conversations rendered by an engine's template, each requested only once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.errors import EngineError, EngineUnavailable
from gangline.domain.tokens import TokenIds

ResultT = TypeVar("ResultT")

_PASSING = (408, 425, 429, 502, 503, 504)
"""Statuses unrelated to the template: the engine is busy, or a proxy cannot reach it."""


class Renders(Protocol):
    """The part of `Engine` that is needed."""

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds: ...

    async def detokenize(self, ids: Sequence[int]) -> str: ...


class Renderings:
    """For one probe. All methods return None when the engine or its template refuses the conversation.

    All may raise EngineUnavailable when the engine does not answer at all, or is too busy.
    """

    def __init__(self, engine: Renders) -> None:
        self._engine = engine
        self._asked: dict[object, asyncio.Task[TokenIds | None]] = {}
        self._read: dict[object, asyncio.Task[str | None]] = {}

    async def ids(
        self,
        messages: tuple[Message, ...],
        tools: tuple[ToolDefinition, ...] = (),
        template_kwargs: dict[str, Any] | None = None,
    ) -> TokenIds | None:
        """[T]"""
        key = _key(messages, tools, template_kwargs)
        if key not in self._asked:
            asked = self._engine.render(messages, tools, template_kwargs)
            self._asked[key] = asyncio.create_task(unless_refused(asked))
        return await self._asked[key]

    async def text(
        self,
        messages: tuple[Message, ...],
        tools: tuple[ToolDefinition, ...] = (),
        template_kwargs: dict[str, Any] | None = None,
    ) -> str | None:
        """Also None if the engine has no route that decodes ids."""
        key = _key(messages, tools, template_kwargs)
        if key not in self._read:
            self._read[key] = asyncio.create_task(self._text(messages, tools, template_kwargs))
        return await self._read[key]

    async def _text(
        self,
        messages: tuple[Message, ...],
        tools: tuple[ToolDefinition, ...],
        template_kwargs: dict[str, Any] | None,
    ) -> str | None:
        ids = await self.ids(messages, tools, template_kwargs)
        return None if ids is None else await unless_refused(self._engine.detokenize(ids.tolist()))

    async def differ(
        self,
        one: tuple[Message, ...],
        two: tuple[Message, ...],
        tools: tuple[ToolDefinition, ...] = (),
        other_tools: tuple[ToolDefinition, ...] | None = None,
    ) -> bool | None:
        """Whether two conversations have different prompts. other_tools: of the second; None: the same."""
        first, second = await asyncio.gather(
            self.ids(one, tools), self.ids(two, tools if other_tools is None else other_tools)
        )
        return None if first is None or second is None else not np.array_equal(first, second)


def _key(messages: tuple[Message, ...], tools: tuple[ToolDefinition, ...], kwargs: dict[str, Any] | None) -> object:
    return messages, tuple(tool.name for tool in tools), tuple(sorted((kwargs or {}).items()))


async def unless_refused(asked: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """None if refused. Some engines answer 500 when a template fails; an engine that does not answer at all is down."""
    try:
        return await asked
    except EngineError as error:
        if isinstance(error, EngineUnavailable) and error.details.get("status") in (None, *_PASSING):
            raise
        return None
