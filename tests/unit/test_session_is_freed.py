"""A session that is over is freed at once, without a collection of garbage: it holds all that was said in it."""

from __future__ import annotations

import asyncio
import gc
import weakref

from gangline.domain.conversation import Message, ModelCall, Text
from gangline.node.calls.retries import CallMark
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from support.engines.held import HeldEngine
from support.node.proxy import MemoryJournal


async def _lived(engine: HeldEngine) -> list[weakref.ref[object]]:
    """Of a session after a call in one piece and a streamed one: itself, its records, a call."""
    session = ModelSession(SessionSpec(session_id="s", attempt=1, key="key"), engine, MemoryJournal())
    for number in (1, 2):
        message = Message("user", (Text(f"hello {number}"),))
        call = ModelCall(dialect="openai_chat", model="m", messages=(message,), stream=number == 2)
        subscription = session.subscribe(call, CallMark(bytes([number])))
        held = await engine.asked(number)
        held.finish("a", "b")
        assert [len(news) async for news in subscription.flight.news(10.0)] or number == 1
        await subscription.flight.reply()
        subscription.delivered()
        subscription.leave()
    await session.fence("it is over")
    return [weakref.ref(session), weakref.ref(session.tree), weakref.ref(subscription.flight)]


async def test_a_session_that_is_over_is_freed_at_once() -> None:
    engine = HeldEngine()
    gc.disable()
    try:
        left = await _lived(engine)
        engine.calls.clear()
        for _ in range(3):  # the loop forgets what it ran last
            await asyncio.sleep(0)
        assert [reference() for reference in left] == [None, None, None]
    finally:
        gc.enable()
