"""The node's side against servers that lie, flood, stall, die or send rubbish; and reconnection after a restart."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gangline.agents.tools.action_server import ActionServer, ActionServerOptions
from gangline.agents.tools.answers import ShellResult
from gangline.domain.errors import ActionRefused, ActionServerFailed, LimitExceeded, RuntimeFailed
from gangline.domain.sandbox import Channel, ExecResult
from support.node.tools import action_server

Answerer = Callable[[dict[str, Any]], list[bytes]]
"""A request -> the bytes that the server says then."""


class LyingChannel(Channel):
    """A server that greets as it should, and then answers as a test says."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerer = answerer
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self._said.put_nowait(b'{"id": "", "ok": {}}\n')
        self._is_begun = False
        self.is_closed = False

    async def read(self, max_bytes: int = 1 << 16) -> bytes:
        return b"" if self.is_closed else await self._said.get()

    async def write(self, data: bytes) -> None:
        if self.is_closed:
            raise RuntimeFailed("the channel was closed")
        if not self._is_begun:
            self._is_begun = True
            return
        for piece in self._answerer(json.loads(data)):
            self._said.put_nowait(piece)

    async def close(self) -> None:
        self.is_closed = True
        self._said.put_nowait(b"")

    async def ended(self) -> ExecResult:
        return ExecResult(exit_code=None, signal=9, stderr=b"last words")


class LyingHandle:
    def __init__(self, answerer: Answerer) -> None:
        self.made = LyingChannel(answerer)

    async def channel(self, command: object, **more: object) -> LyingChannel:
        return self.made


async def failure_of(answerer: Answerer) -> str:
    """How a command fails on such a server; the channel must be closed, and the next action fail at once."""
    handle = LyingHandle(answerer)
    options = ActionServerOptions(grace_s=0.2)
    server = await ActionServer.start(handle, options=options)  # type: ignore[arg-type]
    with pytest.raises(ActionServerFailed) as failed:
        async with asyncio.timeout(30):
            await server.shell.run("true", timeout_s=0.1)
    assert handle.made.is_closed
    with pytest.raises(ActionServerFailed) as again:
        await server.files.view("a")
    assert again.value.message == failed.value.message
    assert "Start another one" in failed.value.message
    assert not failed.value.retryable
    assert failed.value.boundary == "harness", "it is the agent's own doing"
    await server.close()
    return failed.value.message


def answer(request: dict[str, Any], **changes: Any) -> list[bytes]:
    captured = {"head": "", "tail": "", "omitted_bytes": 0}
    honest: dict[str, Any] = {
        "state": "ended", "output": captured, "earlier": captured, "exit_code": 0, "duration_s": 0.1, "folder": "/",
        "foreground": [], "is_new": False,
    }  # fmt: skip
    return [json.dumps({"id": request["id"], "ok": {**honest, **changes}}).encode() + b"\n"]


async def test_an_honest_answer_is_taken() -> None:
    server = await ActionServer.start(LyingHandle(lambda request: answer(request)))  # type: ignore[arg-type]
    assert (await server.shell.run("true", timeout_s=5)).exit_code == 0
    await server.close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"state": "gone"}, "Invalid enum value 'gone'"),
        ({"exit_code": "0"}, "Expected `int | null`"),
        ({"exit_code": -1}, ">= 0"),
        ({"exit_code": 10**30}, "out of range|<= 255"),
        ({"duration_s": -1}, ">= 0"),
        ({"folder": "/" * 10_000}, "length <= 8192"),
        ({"foreground": ["x"] * 100}, "length <= 16"),
        ({"output": {"head": "not base64!"}}, "base64"),
        ({"output": {"head": "QUFB" * 50_000}}, "more than 65536 bytes of output"),
        ({"earlier": {"tail": "QUFB" * 50_000}}, "more than 65536 bytes of output"),
        ({"is_new": None}, "Expected `bool`"),
    ],
)
async def test_an_answer_out_of_its_type_or_bounds_ends_the_server(changes: dict[str, Any], told: str) -> None:
    assert re.search(told, await failure_of(lambda request: answer(request, **changes)))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"rubbish\n", "a line that is not an answer"),
        (b"\xff\xfe\n", "a line that is not an answer"),
        (b"[" * 100_000 + b"\n", "a line that is not an answer"),
        (b'{"id": "x-1", "ok": {}}\n', "answered a request that was not asked"),
        (b'{"id": "", "ok": {}}\n', "answered a request that was not asked"),
        (b"", r"ended by signal 9 (last words)"),
    ],
)
async def test_rubbish_and_answers_to_nothing_end_the_server(said: bytes, told: str) -> None:
    assert told in await failure_of(lambda _: [said])


async def test_nesting_without_end_is_an_answer_that_cannot_be_read() -> None:
    deep = b'{"a":' * 50_000 + b"1" + b"}" * 50_000

    def nested(request: dict[str, Any]) -> list[bytes]:
        return [b'{"id": "%s", "ok": %s}\n' % (request["id"].encode(), deep)]

    assert "answer" in await failure_of(nested)


async def test_a_line_without_end_is_cut_off() -> None:
    flood = [b"x" * (1 << 16)] * 200
    assert "more than 8388608 bytes in one answer" in await failure_of(lambda _: flood)


async def test_a_server_that_stalls_is_given_up() -> None:
    assert "did not answer within 0.3 s" in await failure_of(lambda _: [])


async def test_a_refusal_of_any_size_is_shortened() -> None:
    def refuse(request: dict[str, Any]) -> list[bytes]:
        told = {"id": request["id"], "refused": {"reason": "r" * 10_000, "message": "m" * 100_000}}
        return [json.dumps(told).encode() + b"\n"]

    server = await ActionServer.start(LyingHandle(refuse))  # type: ignore[arg-type]
    with pytest.raises(ActionRefused) as refused:
        await server.shell.run("true", timeout_s=5)
    assert (len(refused.value.message), len(refused.value.reason)) == (2000, 100)
    await server.close()


async def test_an_action_that_is_too_large_is_not_sent() -> None:
    server = await ActionServer.start(LyingHandle(lambda request: answer(request)))  # type: ignore[arg-type]
    with pytest.raises(LimitExceeded):
        await server.files.write("a", "x" * (25 << 20))
    await server.close()


async def test_a_late_answer_to_a_caller_that_has_gone_is_dropped(tmp_path: Path) -> None:
    begun, released = tmp_path / "begun", tmp_path / "released"
    async with action_server(tmp_path) as server:
        command = f"touch '{begun}'; until [ -e '{released}' ]; do sleep 0.05; done; echo late"
        gone = asyncio.create_task(server.shell.run(command, timeout_s=600))
        async with asyncio.timeout(60):
            while not begun.exists():
                await asyncio.sleep(0.02)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        with pytest.raises(ActionRefused, match="has been running"):
            await server.shell.run("echo next", timeout_s=20)
        released.touch()
        assert (await _accepted(server, "echo next")).output.text == "next\n"


async def _accepted(server: ActionServer, command: str) -> ShellResult:
    """Asks until no earlier command runs."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await server.shell.run(command, timeout_s=20)
            except ActionRefused:
                await asyncio.sleep(0.05)


async def test_an_agent_that_kills_its_server_gets_that_told(tmp_path: Path) -> None:
    async with action_server(tmp_path) as server:
        with pytest.raises(ActionServerFailed, match="ended by signal 9"):
            await server.shell.run("kill -9 $PPID", timeout_s=20)


async def test_a_sandbox_without_python_is_told(tmp_path: Path) -> None:
    with pytest.raises(ActionServerFailed, match=r"which needs no-such-python .*127"):
        async with action_server(tmp_path, ActionServerOptions(python="no-such-python")):
            pass
