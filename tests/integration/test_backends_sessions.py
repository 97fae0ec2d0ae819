"""A session of the proxy whose backend dies: the same token stream goes on elsewhere, and the record says so."""

from __future__ import annotations

from contextlib import AsyncExitStack

import openai
import pytest

from gangline.node.backends.pool import BackendPool
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from support.node.backends import KillableEngine
from support.node.proxy import MemoryJournal, served

ECHO = {"default": {"text": "ready"}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_goes_on_exactly_where_its_dead_backend_left_it(stream: bool) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(KillableEngine(ECHO)) for _ in range(2)]
        pool = BackendPool(3600.0)
        stack.push_async_callback(pool.close)
        for engine in engines:
            await pool.add(engine.url)
        journal = MemoryJournal()
        spec = SessionSpec(session_id="s1", attempt=1, key="gls-right")
        session = ModelSession(spec, pool.engine_for("s1", "t"), journal)
        stack.push_async_callback(session.fence, "the test is over")
        proxy = Proxy()
        proxy.add(session)
        url = await stack.enter_async_context(served(proxy))
        client = openai.AsyncOpenAI(base_url=f"{url}/s/s1/v1", api_key="gls-right", max_retries=0)
        stack.push_async_callback(client.close)

        messages = [{"role": "user", "content": "one"}]
        for turn in ("two", "three", "four"):
            answer = await _ask(client, messages, stream=stream)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
            if turn == "two":
                await engines[0].kill()

        assert [view.num_sessions for view in pool.views()] == [0, 1]
        first, second, third = journal.completions
        assert [one.certificate.context for one in (first, second, third)] == ["first", "exact", "exact"]
        assert [one.certificate.prompt_source for one in (second, third)] == ["stitched", "stitched"]
        (move,) = second.metadata["backend_replaced"]
        assert (move["from"], move["to"]) == (engines[0].url, engines[1].url)
        assert "backend_replaced" not in first.metadata
        assert "backend_replaced" not in third.metadata


async def _ask(client: openai.AsyncOpenAI, messages: list[dict[str, str]], *, stream: bool) -> str:
    reply = await client.chat.completions.create(model="m", messages=messages, stream=stream)  # type: ignore[call-overload]
    if not stream:
        return reply.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices])
