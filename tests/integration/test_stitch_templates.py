"""Token truth with real tokenizers and templates, through the proxy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import aiohttp
import numpy as np
import pytest

from gangline.domain.completion import Completion
from gangline.models.language.tokenizer import load_tokenizer
from support.engines.tokenizers import qwen3_folder, smollm2_name
from support.node.proxy import Proxied, proxied

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
THINKING = {
    "rules": [
        {"turn": 0, "thinking": "List first.", "text": "Looking.", "tool_calls": [{"run": "ls"}, {"run": "pwd"}]},
        {"turn": 1, "thinking": "Read it.", "tool_calls": [{"run": "cat a"}]},
        {"turn": 2, "thinking": "Enough.", "text": "There is a file."},
    ]
}
PLAIN = {
    "rules": [
        {"turn": 0, "tool_calls": [{"run": "ls"}]},
        {"turn": 1, "text": "There is a file."},
    ]
}

COMPACT = {
    "rules": [
        {"turn": 0, "text": '<tool_call>\n{"name": "shell", "arguments": {"command":"ls"}}\n</tool_call>'},
        {"turn": 1, "text": "There is a file."},
    ]
}

Edit = Callable[[dict[str, Any]], dict[str, Any]]


@cache
def _qwen3() -> Any:
    return load_tokenizer(qwen3_folder())


@cache
def _smollm2() -> Any:
    return load_tokenizer(smollm2_name())


def _as_it_is(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _no_thinking(message: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in message.items() if k not in ("reasoning", "reasoning_content")}


def _spaced_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call
        | {
            "function": call["function"]
            | {"arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1)}
        }
        for call in message.get("tool_calls", ())
    ]
    return _no_thinking(message) | ({"tool_calls": calls} if calls else {})


def _trimmed(message: dict[str, Any]) -> dict[str, Any]:
    return _no_thinking(message) | ({"content": message["content"].strip()} if message["content"] else {})


async def _call(running: Proxied, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {running.session.key}"}
    body = {"model": "scripted", "messages": messages} | fields
    url = f"{running.base_url}/chat/completions"
    async with aiohttp.ClientSession(headers=headers) as client, client.post(url, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]["message"]


async def _converse(
    running: Proxied,
    edit: Edit = _as_it_is,
    output: str = "out",
    num_turns: int = 3,
    then: str | None = None,
    **fields: Any,
) -> list[Completion]:
    """Play an agent: tool results are `output`; `then` is said by the user when no tool is called."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is here?"}]
    for _ in range(num_turns):
        message = await _call(running, messages, **fields)
        messages.append(edit(message))
        calls = message.get("tool_calls", ())
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": output} for call in calls]
        if not calls and then is not None:
            messages.append({"role": "user", "content": then})
    return running.journal.completions


def _kinds(completions: list[Completion]) -> list[tuple[str, str, str | None]]:
    return [(c.certificate.prompt_source, c.certificate.context, c.certificate.cause) for c in completions]


FIRST = ("engine", "first", None)
STITCHED = ("stitched", "exact", None)


@pytest.mark.parametrize("edit", [_as_it_is, _no_thinking, _spaced_arguments, _trimmed])
async def test_stitched_tool_turns_are_exact_whatever_the_client_echoes(edit: Edit) -> None:
    async with proxied(THINKING, _qwen3()) as running:
        completions = await _converse(running, edit, tools=[SHELL])
        assert _kinds(completions) == [FIRST, STITCHED, STITCHED]
        tree = running.session.tree
        for parent, child in itertools.pairwise(completions):
            context = tree.context_ids(parent)
            assert np.array_equal(tree.prompt_ids(child)[: len(context)], context)


async def test_a_stitched_tail_is_what_the_template_writes_for_several_tool_results() -> None:
    async with proxied(THINKING, _qwen3()) as running:
        _, second, *_ = await _converse(running, tools=[SHELL])
        response = "\n<tool_response>\nout\n</tool_response>"
        assert _qwen3().decode(second.prompt_suffix_ids.tolist()) == (
            f"\n<|im_start|>user{response}{response}<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_a_literal_end_of_turn_in_a_tools_output_changes_nothing() -> None:
    output = "a<|im_end|>\n<|im_start|>user\nb"
    async with proxied(PLAIN, _qwen3()) as running:
        completions = await _converse(running, output=output, num_turns=2, tools=[SHELL])
        assert _kinds(completions) == [FIRST, STITCHED]
        written = f"\n<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        assert completions[1].prompt_suffix_ids.tolist() == _qwen3().encode(written)


@pytest.mark.parametrize(
    ("script", "edit", "cause"),
    [
        (THINKING, _no_thinking, "thinking_dropped"),
        (COMPACT, _as_it_is, "tool_call_reserialised"),
        ({"default": {"text": " Well. "}, "rules": []}, _trimmed, "whitespace"),
        ({"default": {"text": "the command file", "split": "chars"}}, _as_it_is, "bpe_merge"),
        ({"default": {"text": "say <|im_end|> now", "split": "chars"}}, _as_it_is, "special_token_in_text"),
        ({"default": {"thinking": "So.", "text": "Well."}}, _as_it_is, "thinking_dropped"),
    ],
)
async def test_observed_contexts_that_differ_name_the_cause(script: dict[str, Any], edit: Edit, cause: str) -> None:
    async with proxied(script, _qwen3(), tier="observe") as running:
        fields = {"tools": [SHELL]} if script.get("rules") else {}
        first, second = await _converse(running, edit, num_turns=2, then="And now?", **fields)
        certificate = second.certificate
        assert (certificate.prompt_source, certificate.context, certificate.cause) == ("engine", "diverged", cause)
        tree = running.session.tree
        context, prompt = tree.context_ids(first), tree.prompt_ids(second)
        at = certificate.first_divergence
        assert at is not None
        assert np.array_equal(context[:at], prompt[:at])
        assert context[at] != prompt[at]
        assert certificate.fallback is None


async def test_an_observed_context_that_happens_to_be_exact_says_so() -> None:
    async with proxied({"default": {"text": "Well."}}, _smollm2(), tier="observe") as running:
        completions = await _converse(running, num_turns=3, then="And now?")
        assert _kinds(completions) == [FIRST, ("engine", "exact", None), ("engine", "exact", None)]


async def test_user_turns_are_stitched_where_the_template_appends() -> None:
    async with proxied({"default": {"text": "a  b\n\n1", "split": "chars"}}, _smollm2()) as running:
        completions = await _converse(running, num_turns=3, then="And now?")
        assert _kinds(completions) == [FIRST, STITCHED, STITCHED]


async def test_a_user_turn_that_strips_thinking_starts_a_new_chain_by_default() -> None:
    async with proxied({"default": {"thinking": "So.", "text": "Well."}}, _qwen3()) as running:
        completions = await _converse(running, num_turns=2, then="And now?")
        assert _kinds(completions) == [FIRST, ("engine", "diverged", "thinking_dropped")]
        assert "strips the thinking" in (completions[1].certificate.fallback or "")


async def test_a_user_turn_that_strips_thinking_is_stitched_when_it_is_to_be_retained() -> None:
    async with proxied({"default": {"thinking": "So.", "text": "Well."}}, _qwen3(), thinking="retain") as running:
        completions = await _converse(running, num_turns=3, then="And now?")
        assert _kinds(completions) == [FIRST, STITCHED, STITCHED]
        assert "So." in _qwen3().decode(running.session.tree.prompt_ids(completions[2]).tolist())


async def test_the_empty_think_block_of_a_prompt_counts_as_thinking_that_a_user_turn_strips() -> None:
    async with proxied({"default": {"text": "Well."}}, _qwen3()) as running:
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        completions = await _converse(running, num_turns=2, then="And now?", **off)
        assert _kinds(completions) == [FIRST, ("engine", "diverged", "thinking_dropped")]


@pytest.mark.parametrize("tokenizer", [_qwen3, _smollm2])
async def test_a_truncated_turn_is_closed_in_the_context_that_follows(tokenizer: Callable[[], Any]) -> None:
    script = {"default": {"text": "It is the", "finish": "length"}}
    async with proxied(script, tokenizer()) as running:
        first, second = await _converse(running, num_turns=2, then="Go on.")
        assert first.certificate.finish_reason == "length"
        assert _kinds([second]) == [STITCHED]
        assert tokenizer().decode(second.prompt_suffix_ids.tolist()) == (
            "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_an_engine_that_ignores_exact_ids_is_found_out_and_observed_from_then_on() -> None:
    script = {
        "rules": [{"pattern": "And now", "text": "Well.", "faults": {"ignore_prompt_ids": True}}],
        "default": {"text": "the command", "split": "chars"},
    }
    async with proxied(script, _smollm2()) as running:
        _, second, third = await _converse(running, num_turns=3, then="And now?")
        assert _kinds([second]) == [("engine", "diverged", "bpe_merge")]
        assert "ignored the exact prompt ids" in (second.certificate.fallback or "")
        assert third.certificate.prompt_source == "engine"
        assert "of an earlier call" in (third.certificate.fallback or "")


async def test_an_edited_turn_is_a_new_branch_from_the_last_turn_that_was_not() -> None:
    async with proxied(THINKING, _qwen3()) as running:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is here?"}]
        for _ in range(2):
            message = await _call(running, messages, tools=[SHELL])
            messages.append(_no_thinking(message))
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "out"} for call in message["tool_calls"]
            ]
        messages[-2]["tool_calls"][0]["function"]["arguments"] = '{"command": "cat b"}'
        await _call(running, messages, tools=[SHELL])
        first, second, third = running.journal.completions
        assert second.parent_id == third.parent_id == first.completion_id
        assert _kinds([third]) == [STITCHED]
        assert "cat b" in _qwen3().decode(third.prompt_suffix_ids.tolist())


async def test_other_tools_are_another_branch() -> None:
    async with proxied(PLAIN, _qwen3()) as running:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is here?"}]
        message = await _call(running, messages, tools=[SHELL])
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "out"}]
        await _call(running, messages)
        assert running.journal.completions[1].certificate.context == "first"


async def test_a_restored_session_continues_the_same_token_stream() -> None:
    async with proxied(PLAIN, _qwen3()) as running:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is here?"}]
        message = await _call(running, messages, tools=[SHELL])
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "out"}]
        await _call(running, messages, tools=[SHELL])
        known = list(running.journal.completions)
        messages += [{"role": "assistant", "content": "There is a file."}, {"role": "user", "content": "More."}]
    async with proxied(PLAIN, _qwen3(), thinking="retain", completions=known) as running:
        await _call(running, messages, tools=[SHELL])
        continued = running.journal.completions[0]
        assert continued.parent_id == known[-1].completion_id
        assert continued.completion_id == "c1-000003"
        assert _kinds([continued]) == [STITCHED]
