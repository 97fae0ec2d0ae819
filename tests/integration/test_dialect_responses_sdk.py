"""The official OpenAI SDK speaks Responses through the proxy: what it sees, and what is recorded."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pydantic
import pytest

from gangline.domain.conversation import Message, Text, Thinking, ToolCall, ToolResult, message_text
from support.node.proxy import Proxied, proxied

SHELL: Any = {
    "type": "function",
    "name": "shell",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    "strict": False,
}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
FILES: Any = {
    "type": "namespace",
    "name": "files",
    "description": "Files.",
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}],
}
TOOLS = [SHELL, PATCH, {"type": "web_search"}, FILES]

SCRIPT: dict[str, Any] = {
    "rules": [
        {
            "turn": 0,
            "pattern": "What is here",
            "thinking": "List first.",
            "text": "Looking.",
            "tool_calls": [
                {"name": "shell", "arguments": {"command": "ls"}},
                {"name": "apply_patch", "arguments": {"input": '*** Begin\n+"é"\n'}},
                {"name": "files__look", "arguments": {}},
            ],
        },
        {"turn": 1, "pattern": "out 2", "text": "There is a file."},
        {"turn": 1, "text": "A second answer."},
        {"pattern": "cut", "text": "This is cut", "finish": "length"},
        {"pattern": "nothing", "text": ""},
        {"pattern": "as json", "text": '{"answer": 42}'},
    ],
    "default": {"text": "Hello world."},
}


async def _ask(running: Proxied, stream: bool, **request: Any) -> Any:
    request = {"model": "scripted", **request}
    async with running.client() as client:
        if not stream:
            return await client.responses.create(**request)
        async with client.responses.stream(**request) as events:
            async for _ in events:
                pass
            return await events.get_final_response()


def _outputs(response: Any) -> list[dict[str, Any]]:
    calls = [item for item in response.output if item.type.endswith("_call")]
    return [
        {"type": f"{call.type}_output", "call_id": call.call_id, "output": f"out {number}"}
        for number, call in enumerate(calls)
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_conversation_with_thinking_is_stitched_and_exact(stream: bool) -> None:
    async with proxied(SCRIPT) as running:
        said: list[Any] = [{"role": "user", "content": "What is here?"}]
        settings: Any = {"instructions": "Be brief.", "tools": TOOLS, "store": False, "reasoning": {"summary": "auto"}}
        first = await _ask(running, stream, input=said, **settings)
        assert first.status == "completed"
        assert [item.type for item in first.output] == [
            "reasoning",
            "message",
            "function_call",
            "custom_tool_call",
            "function_call",
        ]
        thinking, text, shell, patch, look = first.output
        assert thinking.summary[0].text.strip() == "List first."
        assert text.content[0].text.strip() == "Looking."
        assert (shell.name, json.loads(shell.arguments), shell.namespace) == ("shell", {"command": "ls"}, None)
        assert (patch.name, patch.input) == ("apply_patch", '*** Begin\n+"é"\n')
        assert (look.name, look.namespace) == ("look", "files")
        assert [tool.type for tool in first.tools] == ["function", "custom", "namespace"]

        said += [item.to_dict(exclude_none=True) for item in first.output]
        second = await _ask(running, stream, input=[*said, *_outputs(first)], **settings)
        assert second.output_text == "There is a file."
        assert second.usage.input_tokens > first.usage.input_tokens
        assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens

        one, two = running.journal.completions
        assert one.dropped == ("tools[2]: web_search",)
        assert two.parent_id == one.completion_id
        assert two.certificate.context == "exact"
        assert two.certificate.prompt_source == "stitched"
        assert [type(part) for part in one.response.parts] == [Thinking, Text, ToolCall, ToolCall, ToolCall]
        assert [message.role for message in two.new_messages] == ["tool", "tool", "tool"]


async def test_a_client_that_keeps_no_thinking_and_no_ids_is_stitched_too() -> None:
    """Codex sends back neither the ids of items nor their status."""
    async with proxied(SCRIPT) as running:
        said: list[Any] = [{"role": "user", "content": "What is here?"}]
        first = await _ask(running, True, input=said, tools=TOOLS)
        kept = [item.to_dict(exclude_none=True) for item in first.output if item.type != "reasoning"]
        bare = [{name: item[name] for name in item if name not in ("id", "status")} for item in kept]
        await _ask(running, True, input=[*said, *bare, *_outputs(first)], tools=TOOLS)
        assert running.journal.completions[1].certificate.context == "exact"


async def test_system_items_are_no_instructions_and_stay() -> None:
    async with proxied(SCRIPT) as running:
        first = await _ask(
            running, False, input=[{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
        )
        await _ask(running, False, input="And?", previous_response_id=first.id, instructions="Be brief.")
        said = running.session.tree.messages(running.journal.completions[1])
        assert [message_text(message) for message in said] == ["Be brief.", "S", "hi", "Hello world.", "And?"]


@pytest.mark.parametrize("form", ["reference", "encrypted"])
async def test_thinking_that_is_only_referred_to_is_shown_to_an_engine_that_renders(form: str) -> None:
    async with proxied(SCRIPT, tier="observe") as running:
        said: list[Any] = [{"role": "user", "content": "What is here?"}]
        first = await _ask(running, False, input=said, tools=TOOLS)
        thought, *others = [item.to_dict(exclude_none=True) for item in first.output]
        key = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
        said += [{"type": "item_reference", "id": thought["id"]} if form == "reference" else key, *others]
        await _ask(running, False, input=[*said, *_outputs(first)], tools=TOOLS)
        one, two = running.journal.completions
        assert running.session.tree.messages(two)[1] == one.response
        text = said.index(next(item for item in said if item.get("type") == "message"))
        said[text] = {"role": "assistant", "content": "Looking, said the client."}
        await _ask(running, False, input=[*said, *_outputs(first)], tools=TOOLS)
        turn = running.session.tree.messages(running.journal.completions[2])[1]
        assert turn.parts[:2] == (one.response.parts[0], Text("Looking, said the client."))
        assert [part.call_id for part in turn.parts[2:] if isinstance(part, ToolCall)] == [
            part.call_id for part in one.response.parts if isinstance(part, ToolCall)
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_goes_on_from_an_earlier_one_by_its_id(stream: bool) -> None:
    async with proxied(SCRIPT) as running:
        first = await _ask(running, stream, input="What is here?", instructions="Be brief.", tools=TOOLS)
        second = await _ask(
            running,
            stream,
            input=_outputs(first),
            previous_response_id=first.id,
            instructions="Be brief.",
            tools=TOOLS,
        )
        assert second.output_text == "There is a file."
        assert second.previous_response_id == first.id
        assert running.journal.completions[1].certificate.context == "exact"

        third = await _ask(running, stream, input="And?", previous_response_id=second.id)
        await _ask(running, stream, input="And?", previous_response_id=third.id, instructions="Be long.")
        kept = [running.session.tree.messages(completion) for completion in running.journal.completions]
        assert [message_text(said[0]) for said in kept] == ["Be brief.", "Be brief.", "What is here?", "Be long."]
        assert kept[2] == (*kept[1][1:], running.journal.completions[1].response, Message("user", (Text("And?"),)))
        assert kept[3][1:-2] == kept[2]

        with pytest.raises(openai.BadRequestError) as refused:
            await _ask(running, stream, input="And?", previous_response_id="resp_unknown")
        assert refused.value.param == "previous_response_id"


class _Answer(pydantic.BaseModel):
    answer: int


async def test_structured_output_is_parsed_by_the_sdk() -> None:
    async with proxied(SCRIPT) as running, running.client() as client:
        parsed = await client.responses.parse(model="scripted", input="answer as json", text_format=_Answer)
        assert parsed.output_parsed == _Answer(answer=42)
        async with client.responses.stream(model="scripted", input="as json", text_format=_Answer) as events:
            assert (await events.get_final_response()).output_parsed == _Answer(answer=42)


async def test_a_reply_that_was_cut_off_is_incomplete() -> None:
    async with proxied(SCRIPT) as running, running.client() as client:
        whole = await client.responses.create(model="scripted", input="cut")
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (whole.output[0].status, whole.output_text) == ("incomplete", "This is cut")
        events = [event async for event in await client.responses.create(model="scripted", input="cut", stream=True)]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == "This is cut"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_reply_is_one_empty_text(stream: bool) -> None:
    async with proxied(SCRIPT) as running:
        response = await _ask(running, stream, input="nothing")
        assert [part.text for item in response.output for part in item.content] == [""]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_come_when_they_are_asked_for(stream: bool) -> None:
    async with proxied(SCRIPT) as running:
        include: Any = ["message.output_text.logprobs"]
        response = await _ask(running, stream, input="hi", include=include, top_logprobs=1)
        part = response.output[0].content[0]
        assert "".join(entry.token for entry in part.logprobs) == part.text == "Hello world."
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 1 for entry in part.logprobs)


async def test_counting_samples_nothing_and_agrees_with_the_usage() -> None:
    async with proxied(SCRIPT) as running, running.client() as client:
        counted = await client.responses.input_tokens.count(model="scripted", input="hi", instructions="Be brief.")
        assert not running.journal.completions
        response = await client.responses.create(model="scripted", input="hi", instructions="Be brief.")
        assert counted.input_tokens == response.usage.input_tokens


async def test_a_stream_that_breaks_is_a_failed_response() -> None:
    faulty = {"default": {"text": "one two three four", "faults": {"drop_connection": 2, "times": None}}}
    async with proxied(faulty) as running, running.client() as client:
        events = [event async for event in await client.responses.create(model="scripted", input="hi", stream=True)]
        assert events[0].type == "response.created"
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"
        assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_slow_reply_is_kept_alive_by_events_that_the_sdk_accepts() -> None:
    slow = {"default": {"text": "late", "delay_s": 0.3}}
    async with proxied(slow, keep_alive_s=0.05) as running, running.client() as client:
        async with client.responses.stream(model="scripted", input="hi") as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "late"
        assert kinds[0] == "response.created"
        assert kinds.count("response.in_progress") > 1


async def test_errors_are_the_classes_of_the_sdk() -> None:
    async with proxied(SCRIPT) as running, running.client() as client, running.client(api_key="no") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.create(model="scripted", input="hi")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="scripted", input=[{"role": "user", "content": [{"type": "odd"}]}])  # type: ignore[list-item]
        assert refused.value.param == "input[0].content[0].type"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")
        await running.session.fence("the session is over")
        with pytest.raises(openai.PermissionDeniedError) as over:
            await client.responses.create(model="scripted", input="hi")
        assert over.value.response.headers["x-should-retry"] == "false"


async def test_a_websocket_is_refused_so_that_the_client_falls_back() -> None:
    async with proxied(SCRIPT) as running, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {running.session.key}", "Upgrade": "websocket", "Connection": "Upgrade"}
        async with http.get(f"{running.base_url}/responses", headers=headers) as answer:
            assert answer.status == 426
            assert "error" in await answer.json()


async def test_failed_tools_and_late_system_messages_are_recorded_in_order() -> None:
    async with proxied(SCRIPT) as running:
        said: list[Any] = [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "no such file"},
            {"role": "developer", "content": "Say less."},
        ]
        await _ask(running, False, input=said)
        (completion,) = running.journal.completions
        assert completion.new_messages == (
            Message("user", (Text("hi"),)),
            Message("assistant", (ToolCall("c1", "shell", "{}"),)),
            Message("tool", (ToolResult("c1", (Text("no such file"),)),)),
            Message("developer", (Text("Say less."),)),
        )


async def test_items_may_be_referred_to_by_their_ids() -> None:
    """The AI SDK does so unless it is told not to store."""
    async with proxied(SCRIPT) as running:
        said: list[Any] = [{"role": "user", "content": "What is here?"}]
        first = await _ask(running, True, input=said, tools=TOOLS)
        said += [{"type": "item_reference", "id": item.id} for item in first.output]
        second = await _ask(running, True, input=[*said, *_outputs(first)], tools=TOOLS)
        assert second.output_text == "There is a file."
        one, two = running.journal.completions
        assert (two.parent_id, two.certificate.context) == (one.completion_id, "exact")
        with pytest.raises(openai.BadRequestError):
            await _ask(running, False, input=[{"type": "item_reference", "id": "msg_0123456789abcdef00"}])
