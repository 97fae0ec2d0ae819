"""A node that may open no more files, in the middle of a model call: the cause is named, and no engine is blamed."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.node.backends.pool import BackendPool
from gangline.store.journal.log import AttemptOpened, Journal
from support.node.backends import KillableEngine
from support.node.proxy import Proxied, proxied_engine

CALL: Any = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process may open none, inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    fillers: list[int] = []
    while (free := os.open("/dev/null", os.O_RDONLY)) < max(taken):  # no gap below the limit
        fillers.append(free)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


async def _call(client: aiohttp.ClientSession, running: Proxied, stream: bool) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {running.session.key}"}
    body = CALL | {"stream": stream}
    async with client.post(f"{running.base_url}/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.json() if answer.status != 200 else await answer.read()


def _names_the_cause(status: int, answer: Any, running: Proxied) -> None:
    assert (status, answer["error"]["code"]) == (503, "too_many_open_files")
    assert "`ulimit -n" in answer["error"]["message"]
    failure = running.session.failures.engine
    assert failure is not None
    assert (failure.boundary, failure.code, failure.retryable) == ("node", "too_many_open_files", True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_cannot_connect_to_its_engine_names_the_cause_and_keeps_the_engine(stream: bool) -> None:
    pool = BackendPool(probe_interval_s=3600.0, max_failures=1)
    async with KillableEngine({"default": {"text": "hi"}}) as engine, aiohttp.ClientSession() as client:
        try:
            await pool.add(engine.url)
            async with proxied_engine(pool.engine_for("s1", "t")) as running:
                assert (await _call(client, running, stream))[0] == 200  # its connection is kept
                (backend,) = pool._backends.values()
                await backend.engine.close()  # and the engine's is not
                with no_more_files():
                    _names_the_cause(*await _call(client, running, stream), running)
                    await pool.check()
                assert [(view.state, view.num_failures) for view in pool.views()] == [("healthy", 0)]
                assert (await _call(client, running, stream))[0] == 200
                assert running.session.failures.engine is None
        finally:
            await pool.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_whose_record_finds_no_file_names_the_cause(tmp_path: Path, stream: bool) -> None:
    journal = await asyncio.to_thread(Journal.open, tmp_path, segment_bytes=1)
    async with KillableEngine({"default": {"text": "hi"}}) as engine, aiohttp.ClientSession() as client:
        try:
            await journal.open_attempt(AttemptOpened("s1", 1, "t", 1))
            async with proxied_engine(engine.url, journal=journal) as running:
                assert (await _call(client, running, stream))[0] == 200
                await asyncio.sleep(0.1)
                with no_more_files():
                    status, answer = await _call(client, running, stream)
                if stream:  # it had begun: the error is its last event
                    assert b"too_many_open_files" in answer or status == 503
                else:
                    _names_the_cause(status, answer, running)
                assert (await _call(client, running, stream))[0] == 200
                assert len(running.session.tree) == 2
        finally:
            await journal.close()
