"""Helpers of the official SDKs that write requests of their own, on a real node: they work, or are refused in words."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from anthropic import beta_async_tool
from google import genai
from google.genai import types

from gangline.domain.node_views import OpenedSession
from gangline.rows.audit import audit
from gangline.serving.scripted.server import scripted_server
from support.node.node import RunningNode, running_node

# The SDK derives its client session from aiohttp's, which aiohttp discourages.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

SCRIPT = {
    "context_length": 4096,
    "rules": [
        {"pattern": "json", "text": '{"answer": 42}'},
        {"turn": 0, "text": "Looking.", "tool_calls": [{"run": "ls"}]},
        {"turn": 1, "tool_calls": [{"run": "cat a.txt"}]},
        {"turn": 2, "text": "It says 42."},
    ],
    "default": {"text": "Nothing more."},
}
ASKED: Any = {"role": "user", "content": "What is here?"}
JSON: Any = {"role": "user", "content": "answer as json"}


class Answer(pydantic.BaseModel):
    answer: int


@pytest.fixture
async def node(tmp_path: Path) -> AsyncGenerator[RunningNode]:
    async with scripted_server(SCRIPT) as engine, running_node(tmp_path, engine) as running:
        yield running


def _openai(opened: OpenedSession) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0)


def _anthropic(opened: OpenedSession) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=opened.base_urls["anthropic"], api_key=opened.api_key, max_retries=0)


def _google(opened: OpenedSession) -> Any:
    options = types.HttpOptions(base_url=opened.base_urls["google"], api_version="v1beta")
    return genai.Client(api_key=opened.api_key, vertexai=False, http_options=options).aio


async def _records(node: RunningNode, opened: OpenedSession, num_traces: int = 1) -> list[str]:
    """The contexts of a session's records, whose traces hold each sampled token once."""
    result = await node.client.finalize(opened.session_id, completions=True)
    assert result.trajectory is not None
    assert len(result.trajectory.traces) == num_traces
    num_trained = sum(int(trace.loss_mask.sum()) for trace in result.trajectory.traces)
    assert num_trained == sum(len(one.sampled_ids) for one in result.completions)
    assert audit(result.trajectory, result.completions).ok
    return [one.certificate.context for one in result.completions]


async def test_chat_parses_and_streams_into_the_types_of_the_sdk(node: RunningNode) -> None:
    opened = await node.client.open_session()
    async with _openai(opened) as client:
        asked: Any = {"model": "scripted", "response_format": Answer}
        parsed = await client.chat.completions.parse(messages=[JSON], **asked)
        assert parsed.choices[0].message.parsed == Answer(answer=42)
        said: Any = {"role": "assistant", "content": parsed.choices[0].message.content}
        async with client.chat.completions.stream(messages=[JSON, said, JSON], **asked) as events:
            kinds = {event.type async for event in events}
            final = await events.get_final_completion()
        assert final.choices[0].message.parsed == Answer(answer=42)
        assert {"chunk", "content.delta", "content.done"} <= kinds
    assert await _records(node, opened) == ["first", "exact"]


async def test_responses_parse_and_stream_on_from_a_reply(node: RunningNode) -> None:
    opened = await node.client.open_session()
    async with _openai(opened) as client:
        asked: Any = {"model": "scripted", "input": "answer as json", "text_format": Answer}
        parsed = await client.responses.parse(**asked)
        assert parsed.output_parsed == Answer(answer=42)
        async with client.responses.stream(**asked, previous_response_id=parsed.id) as events:
            assert (await events.get_final_response()).output_parsed == Answer(answer=42)
    assert await _records(node, opened) == ["first", "exact"]


async def test_messages_parse_and_stream(node: RunningNode) -> None:
    opened = await node.client.open_session()
    async with _anthropic(opened) as client:
        asked: Any = {"model": "scripted", "max_tokens": 200}
        parsed = await client.beta.messages.parse(messages=[JSON], output_format=Answer, **asked)
        assert parsed.parsed_output == Answer(answer=42)
        said: Any = {"role": "assistant", "content": '{"answer": 42}'}
        async with client.messages.stream(messages=[JSON, said, JSON], **asked) as events:
            assert "".join([text async for text in events.text_stream]) == '{"answer": 42}'
    assert await _records(node, opened) == ["first", "exact"]


async def _shell(command: str) -> str:
    """Run a command.

    Args:
        command: what the shell is given
    """
    return f"out of {command}"


async def test_a_runner_that_wants_its_history_compacted_is_refused_in_words(node: RunningNode) -> None:
    opened = await node.client.open_session()
    async with _anthropic(opened) as client:
        runner = client.beta.messages.tool_runner(
            model="scripted", max_tokens=200, messages=[ASKED], tools=[beta_async_tool(_shell, name="shell")]
        )
        with pytest.raises(anthropic.BadRequestError, match="compaction"):  # noqa: PT012
            async for _ in runner:
                runner.compact_before_next_turn()
    assert await _records(node, opened) == ["first"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_of_google_calls_functions_by_itself(node: RunningNode, stream: bool) -> None:
    commands: list[str] = []

    async def shell(command: str) -> str:
        """Run a command."""
        commands.append(command)
        return f"out of {command}"

    opened = await node.client.open_session()
    async with _google(opened) as client:
        chat = client.chats.create(model="scripted", config=types.GenerateContentConfig(tools=[shell]))
        if stream:
            text = "".join([chunk.text or "" async for chunk in await chat.send_message_stream("What is here?")])
        else:
            text = (await chat.send_message("What is here?")).text
        assert "It says 42." in text
        await chat.send_message("And more?")
    assert commands == ["ls", "cat a.txt"]
    assert await _records(node, opened) == ["first", "exact", "exact", "exact"]
