"""The official OpenAI SDK through the proxy: what it sees, and what is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from gangline.domain.conversation import Text, Thinking, ToolCall
from support.node.proxy import Proxied, proxied

SHELL: Any = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}

SCRIPT = {
    "rules": [
        {"turn": 0, "thinking": "List first.", "text": "Looking.", "tool_calls": [{"run": "ls"}, {"run": "pwd"}]},
        {"turn": 1, "text": "There is a file."},
    ],
    "default": {"text": "Hello world."},
}


def _messages() -> list[Any]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is here?"}]


def _echo(message: Any, *, thinking: bool = False) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    if not thinking:
        fields.pop("reasoning", None)
        fields.pop("reasoning_content", None)
    return fields


def _results(message: Any) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": f"out {number}"}
        for number, call in enumerate(message.tool_calls)
    ]


async def _streamed(client: openai.AsyncOpenAI, **request: Any) -> Any:
    async with client.chat.completions.stream(**request) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_completion()


async def _ask(running: Proxied, stream: bool, messages: list[Any], **options: Any) -> Any:
    request = {"model": "scripted", "messages": messages, **options}
    async with running.client() as client:
        if stream:
            return await _streamed(client, stream_options={"include_usage": True}, **request)
        return await client.chat.completions.create(**request)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_conversation_is_stitched_and_every_context_is_exact(stream: bool) -> None:
    async with proxied(SCRIPT) as running:
        messages = _messages()
        first = await _ask(running, stream, messages, tools=[SHELL])
        message = first.choices[0].message
        assert message.content.strip() == "Looking."
        assert message.reasoning_content == "\nList first.\n"
        assert [call.function.name for call in message.tool_calls] == ["shell", "shell"]
        assert first.choices[0].finish_reason == "tool_calls"

        messages += [_echo(message), *_results(message)]
        second = await _ask(running, stream, messages, tools=[SHELL])
        assert second.choices[0].message.content == "There is a file."
        assert second.choices[0].finish_reason == "stop"

        one, two = running.journal.completions
        assert (one.certificate.context, one.certificate.prompt_source) == ("first", "engine")
        assert (two.certificate.context, two.certificate.prompt_source) == ("exact", "stitched")
        assert two.parent_id == one.completion_id
        assert second.usage.prompt_tokens == len(running.session.tree.prompt_ids(two))
        assert second.usage.completion_tokens == len(two.sampled_ids)
        assert len(two.sampled_ids) == len(two.logprobs)
        assert np.isfinite(two.logprobs).all()
        assert one.response.parts[0] == Thinking("\nList first.\n")
        assert one.response.parts[1] == Text(message.content)


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_call_ids_are_unique_to_the_record_and_recorded(stream: bool) -> None:
    async with proxied(SCRIPT) as running:
        replies = [await _ask(running, stream, _messages(), tools=[SHELL]) for _ in range(2)]
        shown = [[call.id for call in reply.choices[0].message.tool_calls] for reply in replies]
        kept = [
            [part.call_id for part in completion.response.parts if isinstance(part, ToolCall)]
            for completion in running.journal.completions
        ]
        assert shown == kept
        assert len({call_id for ids in shown for call_id in ids}) == 4


async def test_a_stream_and_a_whole_reply_record_the_same_tokens() -> None:
    async with proxied(SCRIPT) as running:
        await _ask(running, False, _messages(), tools=[SHELL])
        await _ask(running, True, _messages(), tools=[SHELL])
        whole, streamed = running.journal.completions
        assert whole.sampled_ids.tolist() == streamed.sampled_ids.tolist()
        assert whole.logprobs.tolist() == streamed.logprobs.tolist()
        assert running.session.tree.prompt_ids(whole).tolist() == running.session.tree.prompt_ids(streamed).tolist()
        assert whole.certificate == streamed.certificate


async def test_two_calls_with_the_same_prompt_are_siblings() -> None:
    async with proxied(SCRIPT) as running:
        await _ask(running, False, _messages(), tools=[SHELL])
        first = await _ask(running, False, _messages(), tools=[SHELL])
        message = first.choices[0].message
        messages = [*_messages(), _echo(message), *_results(message)]
        await _ask(running, False, messages, tools=[SHELL])
        await _ask(running, False, messages, tools=[SHELL])
        a, b, c, d = running.journal.completions
        assert (a.parent_id, b.parent_id) == (None, None)
        # The second root said the same; only the record key in the echoed call ids tells whose child it is.
        assert (c.parent_id, d.parent_id) == (b.completion_id, b.completion_id)


async def test_each_choice_is_a_record() -> None:
    async with proxied(SCRIPT) as running:
        for stream in (False, True):
            reply = await _ask(running, stream, _messages(), n=3)
            assert [choice.message.content for choice in reply.choices] == ["Hello world."] * 3
        assert [c.choice_index for c in running.journal.completions] == [0, 1, 2, 0, 1, 2]


async def test_logprobs_are_shown_only_when_asked_for() -> None:
    async with proxied(SCRIPT) as running:
        for stream in (False, True):
            plain = await _ask(running, stream, _messages())
            assert plain.choices[0].logprobs is None
            asked = await _ask(running, stream, _messages(), logprobs=True, top_logprobs=1)
            shown = asked.choices[0].logprobs.content
            recorded = running.journal.completions[-1].logprobs
            assert [round(entry.logprob, 3) for entry in shown] == [round(float(value), 3) for value in recorded]
            assert len(shown[0].top_logprobs) == 1


async def test_a_client_that_asks_as_of_vllm_gets_the_ids_of_its_prompt_and_of_each_choice() -> None:
    """Harbor's agents in its own process fill their `RolloutDetail` with them."""
    async with proxied(SCRIPT) as running:
        plain = await _ask(running, False, _messages())
        assert not {"prompt_token_ids", "token_ids"} & {*plain.to_dict(), *plain.choices[0].to_dict()}
        asked = await _ask(running, False, _messages(), n=2, extra_body={"return_token_ids": True})
        recorded = running.journal.completions[-2:]
        assert [choice.token_ids for choice in asked.choices] == [one.sampled_ids.tolist() for one in recorded]
        assert asked.prompt_token_ids == recorded[0].prompt_suffix_ids.tolist() != []
        assert not any("return_token_ids" in one.dropped for one in recorded)


async def test_the_key_alone_identifies_the_session() -> None:
    async with proxied(SCRIPT) as running:
        async with running.client(base_url=f"{running.url}/v1") as client:
            await client.chat.completions.create(model="any-name", messages=_messages())
            models = [model.id async for model in client.models.list()]
        assert models == ["scripted"]
        assert running.journal.completions[0].metadata["requested_model"] == "any-name"


async def test_sampling_parameters_reach_the_engine_and_the_record() -> None:
    async with proxied({"default": {"text": "Hello world. And more."}}) as running:
        reply = await _ask(running, False, _messages(), max_tokens=2, temperature=0.5, stop=["zzz"], seed=3)
        assert reply.choices[0].finish_reason == "length"
        sampling = running.journal.completions[0].certificate.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.stop, sampling.seed) == (2, 0.5, ("zzz",), 3)
        assert len(running.journal.completions[0].sampled_ids) == 2
