"""Conversations that the Anthropic SDK leaves with the provider (`thread`), on a real node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool, beta_tool
from anthropic.types.beta import BetaMessage

from gangline.domain.node_views import OpenedSession
from gangline.domain.session import SessionResult
from gangline.rows.audit import audit
from gangline.serving.scripted.server import scripted_server
from support.node.node import RunningNode, running_node
from support.node.proxy import proxied

SCRIPT = {
    "context_length": 4096,
    "rules": [
        {"turn": 0, "thinking": "List first.", "text": "Looking.", "tool_calls": [{"run": "ls"}]},
        {"turn": 1, "thinking": "Now read.", "tool_calls": [{"run": "cat a.txt"}]},
        {"turn": 2, "text": "It says 42."},
    ],
    "default": {"text": "Nothing more."},
}
ASK: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 200,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "What is here?"}],
}
LATER: Any = {"name": "later", "description": "Found later.", "input_schema": {"type": "object", "properties": {}}}


def _output(command: str) -> str:
    """Run a command.

    Args:
        command: what the shell is given
    """
    return f"out of {command}"


async def _later(command: str) -> str:
    return _output(command)


_later.__doc__ = _output.__doc__
SHELL = beta_tool(_output, name="shell")
ASYNC_SHELL = beta_async_tool(_later, name="shell")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncGenerator[RunningNode]:
    async with scripted_server(SCRIPT) as engine, running_node(tmp_path, engine) as running:
        yield running


def options_of(opened: OpenedSession) -> dict[str, Any]:
    return {"base_url": opened.base_urls["anthropic"], "api_key": opened.api_key, "max_retries": 0}


def run_sync(opened: OpenedSession, stream: bool) -> BetaMessage:
    with anthropic.Anthropic(**options_of(opened)) as client:
        runner: Any = client.beta.messages.tool_runner(**ASK, tools=[SHELL], stream=stream)
        return runner.until_done()


async def run_async(opened: OpenedSession, stream: bool) -> BetaMessage:
    async with anthropic.AsyncAnthropic(**options_of(opened)) as client:
        runner: Any = client.beta.messages.tool_runner(**ASK, tools=[ASYNC_SHELL], stream=stream)
        return await runner.until_done()


async def one_exact_trace(node: RunningNode, opened: OpenedSession) -> SessionResult:
    result = await node.client.finalize(opened.session_id, completions=True)
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert int(trace.loss_mask.sum()) == sum(len(one.sampled_ids) for one in result.completions)
    assert audit(result.trajectory, result.completions).ok
    assert [one.certificate.context for one in result.completions[1:]] == ["exact"] * (len(result.completions) - 1)
    return result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_tool_runner_keeps_its_history_and_leaves_one_trace(
    node: RunningNode, is_async: bool, stream: bool
) -> None:
    opened = await node.client.open_session()
    last = await (run_async(opened, stream) if is_async else asyncio.to_thread(run_sync, opened, stream))
    assert [block.text for block in last.content if block.type == "text"] == ["It says 42."]
    result = await one_exact_trace(node, opened)
    assert len(result.completions) == 3
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    roles = [message.role for message in (*trace.prompt_messages, *trace.response_messages)]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [tool.name for tool in trace.tools] == ["shell"]


async def test_a_thread_samples_the_tokens_of_the_whole_conversation(node: RunningNode) -> None:
    opened = [await node.client.open_session() for _ in range(2)]
    rows: list[Any] = []
    for one, thread in zip(opened, (None, False), strict=True):
        options: dict[str, Any] = {} if thread is None else {"thread": thread}
        async with anthropic.AsyncAnthropic(**options_of(one)) as client:
            await client.beta.messages.tool_runner(**ASK, tools=[ASYNC_SHELL], **options).until_done()
        result = await one_exact_trace(node, one)
        assert result.trajectory is not None
        (trace,) = result.trajectory.traces
        rows.append((trace.prompt_ids.tolist(), trace.response_ids.tolist(), trace.loss_mask.tolist()))
    assert rows[0] == rows[1]


async def test_a_thread_that_another_session_holds_is_replayed_by_the_sdk(node: RunningNode) -> None:
    opened, other = await node.client.open_session(), await node.client.open_session()
    async with anthropic.AsyncAnthropic(**options_of(opened)) as client:
        thread = client.beta.messages.thread(model="scripted", max_tokens=200, system="Be brief.")
        await thread.send({"role": "user", "content": "one"})
        client.base_url, client.api_key = other.base_urls["anthropic"], other.api_key
        await thread.send({"role": "user", "content": "two"})
    result = await node.client.finalize(other.session_id, completions=True)
    (record,) = result.completions
    assert [message.role for message in record.new_messages] == ["system", "user", "assistant", "user"]


async def test_a_thread_goes_on_after_the_node_was_started_again(tmp_path: Path) -> None:
    async with scripted_server(SCRIPT) as engine:
        async with running_node(tmp_path, engine) as node:
            opened = await node.client.open_session()
            async with anthropic.AsyncAnthropic(**options_of(opened)) as client:
                thread = client.beta.messages.thread(model="scripted", max_tokens=200, system="Be brief.")
                await thread.send({"role": "user", "content": "one"})
                port = int(node.url.rpartition(":")[2])
        async with running_node(tmp_path, engine, port=port) as node:
            async with anthropic.AsyncAnthropic(**options_of(opened)) as client:
                thread._client = client
                await thread.send({"role": "user", "content": "two"})
            assert len((await one_exact_trace(node, opened)).completions) == 2


async def test_tools_that_a_thread_does_not_keep_are_refused_so_that_the_sdk_sends_all() -> None:
    async def search(command: str) -> Any:
        """Search for tools.

        Args:
            command: what to search for
        """
        return [{"type": "tool_reference", "tool_name": "later"}]

    async with (
        proxied(SCRIPT) as running,
        anthropic.AsyncAnthropic(base_url=f"{running.url}/s/s1", api_key=running.session.key, max_retries=0) as client,
    ):
        tools: Any = [beta_async_tool(search, name="shell"), LATER | {"defer_loading": True}]
        last = await client.beta.messages.tool_runner(**ASK, tools=tools).until_done()
        assert [block.text for block in last.content if block.type == "text"] == ["It says 42."]
        records = running.journal.completions
        assert [record.certificate.context for record in records] == ["first", "exact", "exact"]
        (result,) = [part for message in records[1].new_messages for part in message.parts]
        assert "Found later." in str(result)


@pytest.mark.parametrize("again", [{"tools": [LATER]}, {"system": "Be long."}])
async def test_what_a_thread_holds_may_not_be_sent_again(again: dict[str, Any]) -> None:
    async with (
        proxied(SCRIPT) as running,
        anthropic.AsyncAnthropic(base_url=f"{running.url}/s/s1", api_key=running.session.key, max_retries=0) as client,
    ):
        ask: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        first = await client.beta.messages.create(**ask, thread={"type": "create"})
        goes_on: Any = {"type": "continue", "previous_message_id": first.id}
        with pytest.raises(anthropic.BadRequestError, match=next(iter(again))):
            await client.beta.messages.create(**ask | again, thread=goes_on)
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.beta.messages.create(**ask, thread=goes_on | {"previous_message_id": "msg_1"})
        body: Any = caught.value.body
        assert body["error"]["details"] == {"error_code": "thread_not_found"}
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await client.beta.messages.create(**ask, thread=goes_on, tool_choice={"type": "any"})
        assert len(running.journal.completions) == 1
