"""An engine whose every token waits for the test: implements `Engine`, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from gangline.domain.conversation import Message
from gangline.domain.errors import EngineUnavailable
from gangline.domain.reply import ReplyDelta
from gangline.domain.tokens import TokenIds, logprobs, token_ids
from gangline.models.engines.contract import (
    EngineCapabilities,
    EngineChoice,
    EngineDelta,
    EngineReply,
    EngineRequest,
    assistant_message,
)

PROMPT = token_ids([1, 2, 3, 4, 5])


class HeldCall:
    """One call that the engine was asked. `say` a word (one token), then `finish`, or `fail`."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.was_cancelled = False
        self._words: asyncio.Queue[str | Exception | None] = asyncio.Queue()

    def say(self, *words: str) -> None:
        for word in words:
            self._words.put_nowait(word)

    def finish(self, *words: str) -> None:
        self.say(*words)
        self._words.put_nowait(None)

    def fail(self) -> None:
        self._words.put_nowait(EngineUnavailable("the engine at test was reset"))

    async def words(self) -> AsyncGenerator[str, None]:
        try:
            while (word := await self._words.get()) is not None:
                if isinstance(word, Exception):
                    raise word
                yield word
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


class HeldEngine:
    def __init__(self, **capabilities: Any) -> None:
        self._capabilities = EngineCapabilities(
            **(
                {
                    "engine": "held",
                    "version": "1",
                    "model": "scripted",
                    "max_context": 1000,
                    "reports_ids": True,
                    "takes_prompt_ids": False,
                    "streams_ids": True,
                    "renders": True,
                    "logprob_kind": "raw",
                }
                | capabilities
            )
        )
        self.calls: list[HeldCall] = []
        self._asked = asyncio.Condition()

    async def asked(self, number: int) -> HeldCall:
        """The `number`-th call, from 1, when it has come."""
        async with asyncio.timeout(10), self._asked:
            await self._asked.wait_for(lambda: len(self.calls) >= number)
        return self.calls[number - 1]

    async def _ask(self, request: EngineRequest) -> HeldCall:
        async with self._asked:
            self.calls.append(HeldCall(request))
            self._asked.notify_all()
        return self.calls[-1]

    async def probe(self) -> EngineCapabilities:
        return self._capabilities

    async def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def chat(self, request: EngineRequest) -> EngineReply:
        call = await self._ask(request)
        words = [word async for word in call.words()]
        has_ids = self._capabilities.reports_ids
        choice = EngineChoice(
            index=0,
            message=assistant_message("", "".join(words)),
            finish_reason="stop",
            sampled_ids=token_ids(range(10, 10 + len(words))) if has_ids else None,
            logprobs=logprobs([-1.0] * len(words)) if has_ids else None,
        )
        return EngineReply(prompt_ids=PROMPT if has_ids else None, choices=(choice,))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        call = await self._ask(request)
        number = 0
        async for word in call.words():
            yield EngineDelta(
                shown=ReplyDelta(text=word), sampled_ids=[10 + number], logprobs=[-1.0], prompt_ids=PROMPT
            )
            number += 1
        yield EngineDelta(finish_reason="stop", prompt_ids=PROMPT)

    async def render(self, messages: Sequence[Message], *_: Any) -> TokenIds:
        return np.arange(3 * len(messages), dtype=np.int32)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return ""

    async def close(self) -> None:
        pass
