"""Requests of a fork: each that differs from the recorded one in anything that the model sees is found out, in every
dialect."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from gangline.agents.harnesses.codex import CodexHarness
from gangline.domain.completion import Certificate, Completion
from gangline.domain.conversation import Message, ModelCall, Text, ToolCall, ToolResult
from gangline.domain.errors import ForkDiverged, GanglineError
from gangline.domain.tokens import logprobs, token_ids
from gangline.node.calls.proxy import DialectRoutes
from gangline.node.capture.meaning import VolatileText
from gangline.node.capture.placing import branch_key
from gangline.node.replay.forms import Forms
from gangline.node.replay.replay import Replay
from gangline.rows.forks.calls import REQUEST, request_fields
from gangline.rows.forks.tolerance import Tolerance
from gangline.settings import plugins
from gangline.wire.dialects.contract import RawRequest

SCHEMA = {"type": "object", "properties": {"command": {"type": "string", "description": "what to run"}}}
CALL_ID = "call_00112233445566770000"
BODIES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "openai_chat": (
        "/v1/chat/completions",
        {},
        {
            "model": "m",
            "temperature": 0.5,
            "max_tokens": 100,
            "stop": ["END"],
            "tools": [{"type": "function", "function": {"name": "run", "description": "runs", "parameters": SCHEMA}}],
            "tool_choice": "auto",
            "messages": [
                {"role": "system", "content": "You are a dog."},
                {"role": "user", "content": [{"type": "text", "text": "Pull the sled."}]},
                {
                    "role": "assistant",
                    "content": "I pull.",
                    "tool_calls": [
                        {
                            "id": CALL_ID,
                            "type": "function",
                            "function": {"name": "run", "arguments": '{"command": "pull"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": CALL_ID, "content": "It moves."},
            ],
        },
    ),
    "anthropic": (
        "/v1/messages",
        {"anthropic-version": "2023-06-01"},
        {
            "model": "m",
            "max_tokens": 100,
            "temperature": 0.5,
            "system": "You are a dog.",
            "tools": [{"name": "run", "description": "runs", "input_schema": SCHEMA}],
            "messages": [
                {"role": "user", "content": "Pull the sled."},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "I pull."},
                        {"type": "tool_use", "id": CALL_ID, "name": "run", "input": {"command": "pull"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": CALL_ID, "content": "It moves.", "is_error": False}
                    ],
                },
            ],
        },
    ),
    "openai_responses": (
        "/v1/responses",
        {},
        {
            "model": "m",
            "temperature": 0.5,
            "max_output_tokens": 100,
            "instructions": "You are a dog.",
            "tools": [{"type": "function", "name": "run", "description": "runs", "parameters": SCHEMA}],
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Pull the sled."}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I pull."}]},
                {"type": "function_call", "call_id": CALL_ID, "name": "run", "arguments": '{"command": "pull"}'},
                {"type": "function_call_output", "call_id": CALL_ID, "output": "It moves."},
            ],
        },
    ),
    "google": (
        "/v1beta/models/m:generateContent",
        {},
        {
            "systemInstruction": {"parts": [{"text": "You are a dog."}]},
            "generationConfig": {"temperature": 0.5, "maxOutputTokens": 100},
            "tools": [{"functionDeclarations": [{"name": "run", "description": "runs", "parameters": SCHEMA}]}],
            "contents": [
                {"role": "user", "parts": [{"text": "Pull the sled."}]},
                {
                    "role": "model",
                    "parts": [
                        {"text": "I pull."},
                        {"functionCall": {"id": CALL_ID, "name": "run", "args": {"command": "pull"}}},
                    ],
                },
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"id": CALL_ID, "name": "run", "response": {"output": "It moves."}}}
                    ],
                },
            ],
        },
    ),
}
ANSWER = Message("assistant", (Text("Done."),))


def parsed(name: str, body: Any) -> ModelCall:
    path, headers, _ = BODIES[name]
    raw = RawRequest(headers=headers, body=json.dumps(body).encode())
    match = ROUTES.find("POST", path, raw)
    assert match.dialect.name == name
    return match.dialect.parse_call(match.request)


ROUTES = DialectRoutes([plugins.load("dialect", name)() for name in plugins.names("dialect")])


def replay_of(*calls: ModelCall) -> Replay:
    """Of a session with these calls."""
    following = [after.messages[len(call.messages)] for call, after in pairwise(calls)]
    records = [
        record_of(call, number, answer)
        for number, (call, answer) in enumerate(zip(calls, [*following, ANSWER], strict=True))
    ]
    return Replay(records, len(records), Forms(VolatileText(), Tolerance()))


def record_of(call: ModelCall, number: int, answer: Message) -> Completion:
    return Completion(
        completion_id=f"c1-{number:06d}",
        session_id="parent",
        attempt=1,
        status="complete",
        parent_id=None,
        branch_key=branch_key(call),
        dialect=call.dialect,
        model=call.model,
        prompt_shared=0,
        prompt_suffix_ids=token_ids([1, 2]),
        sampled_ids=token_ids([3]),
        logprobs=logprobs([-0.5]),
        messages_shared=0,
        new_messages=call.messages,
        response=answer,
        tools=call.tools,
        certificate=Certificate(prompt_source="engine", context="first", logprobs="processed", finish_reason="stop"),
        started_at=1.0,
        finished_at=2.0,
        metadata={"reply_id": f"r{number}", REQUEST: request_fields(call)},
    )


def changed(value: Any) -> Iterator[Any]:
    """Every value that differs from this one in one place."""
    match value:
        case dict():
            for key, inner in value.items():
                yield {name: one for name, one in value.items() if name != key}
                yield from ({**value, key: other} for other in changed(inner))
            yield {**value, "planted": "x"}
        case list():
            for place, inner in enumerate(value):
                yield value[:place] + value[place + 1 :]
                yield [*value[:place], inner, *value[place:]]
                yield from ([*value[:place], other, *value[place + 1 :]] for other in changed(inner))
            yield value[::-1]
        case bool():
            yield not value
        case int() | float():
            yield value + 1
            yield value / 2
        case str():
            yield value + "x"
            yield "x" + value
            yield value[:-1]
            yield value.swapcase()
        case _:
            yield "planted"


def seen(call: ModelCall) -> Any:
    """All of a call that the model, or its engine, is given."""
    own_way = {"stream": False, "include_usage": False, "undeclared": {}, "echo": {}, "agent_id": None}
    messages: list[Any] = []
    call_ids: list[str] = []
    for message in call.messages:
        parts: list[Any] = []
        for part in message.parts:
            one = msgspec.to_builtins(part)
            if isinstance(part, ToolCall):
                call_ids.append(part.call_id)
                # An assistant's turn is compared by its meaning.
                one = {"name": part.name, "arguments": part.arguments}
            elif isinstance(part, Text):
                one["text"] = part.text.strip()
            elif isinstance(part, ToolResult):
                one["call_id"] = call_ids.index(part.call_id) if part.call_id in call_ids else part.call_id
            parts.append(one)
        if message.role == "assistant":  # in which order it says and does, no template shows
            parts.sort(key=str)
        messages.append((message.role, message.name, parts))
    rest = msgspec.to_builtins(msgspec.structs.replace(call, messages=(), **own_way))
    return rest, messages


@pytest.mark.parametrize("name", BODIES)
def test_no_planted_difference_is_answered_from_the_record(name: str) -> None:
    body = BODIES[name][2]
    recorded = parsed(name, body)
    assert replay_of(recorded).match(parsed(name, body)).recorded is not None
    num_planted, undetected = 0, []
    for other in changed(body):
        try:
            call = parsed(name, other)
        except GanglineError:
            continue
        if seen(call) == seen(recorded):
            continue
        num_planted += 1
        try:
            replay_of(recorded).match(call)
        except ForkDiverged:
            continue
        undetected.append(json.dumps(other))
    assert num_planted > 50
    assert undetected == []


UNITS = {"openai_chat": ("messages", 2), "anthropic": ("messages", 2), "openai_responses": ("input", 3)}
"""Where a dialect has its items, and how many of them are an assistant's turn with its tool result. Google has
`contents`, 2."""
NUM_FORKS = int(os.environ.get("GANGLINE_PLANTED_FORKS", "1000")) // len(BODIES)


def is_echo(call: ModelCall, recorded: ModelCall) -> bool:
    """Whether all that differs is the text of assistant's turns with tool calls, which some clients do not send back:
    the conversation continues from what was sampled."""
    (rest, messages), (own_rest, own_messages) = seen(recorded), seen(call)
    if rest != own_rest or len(messages) != len(own_messages):
        return False
    for (role, name, parts), (own_role, own_name, own) in zip(messages, own_messages, strict=True):
        calls = [part for part in parts if "arguments" in part]
        left_out = role == "assistant" and bool(calls) and own == calls
        if (role, name) != (own_role, own_name) or (parts != own and not left_out):
            return False
    return True


def generated(name: str, chance: random.Random) -> list[dict[str, Any]]:
    """The requests of an agent with three to seven turns, in its own words."""

    def words() -> str:
        return " ".join("".join(chance.choices("abcdehilnorstu", k=chance.randint(1, 7))) for _ in range(4))

    field, length = UNITS.get(name, ("contents", 2))
    body = json.loads(json.dumps(BODIES[name][2]).replace("Pull the sled.", words()).replace("You are a dog.", words()))
    unit = json.dumps(body[field][-length:])
    items = body[field][:-length]
    requests = [{**body, field: list(items)}]
    for _ in range(chance.randint(2, 6)):
        turn = unit.replace(CALL_ID, f"call_{chance.randrange(16**20):020x}").replace("I pull.", words())
        items += json.loads(turn.replace("It moves.", words()).replace("pull", words()))
        requests.append({**body, field: list(items)})
    return requests


@pytest.mark.parametrize("name", BODIES)
def test_no_difference_planted_into_the_forks_of_generated_agents_is_undetected(name: str) -> None:
    chance, num_forks, undetected = random.Random(name), 0, list[str]()
    while num_forks < NUM_FORKS:
        requests = generated(name, chance)
        recorded = [parsed(name, body) for body in requests]
        at = chance.randrange(len(requests))
        planted = chance.choice(list(changed(requests[at])))
        try:
            call = parsed(name, planted)
        except GanglineError:
            continue
        if any(is_echo(call, one) for one in recorded):  # another call of the record, or none that differs
            continue
        num_forks += 1
        replay = replay_of(*recorded)
        for before in requests[:at]:
            assert replay.match(parsed(name, before)).recorded is not None
        try:
            replay.match(call)
        except ForkDiverged:
            continue
        undetected.append(json.dumps(planted))
    assert undetected == []


@pytest.mark.parametrize(
    ("rules", "recorded", "given", "is_same"),
    [
        ((), "-rw-r--r-- 1 a b 12 Nov 24 12:31 x", "-rw-r--r-- 1 a b 12 Nov 25 01:02 x", True),
        ((), "-rw-r--r-- 1 a b 12 Nov 24 12:31 x", "-rw-r--r-- 1 a b 13 Nov 24 12:31 x", False),
        (
            CodexHarness.varying_text,
            "Chunk ID: c89ba3\nWall time: 0.1 seconds\nx",
            "Chunk ID: 145e35\nWall time: 0.2 seconds\nx",
            True,
        ),
        (CodexHarness.varying_text, "Chunk ID: c89ba3\nx", "Chunk ID: 145e35\ny", False),
        ((), "Chunk ID: c89ba3", "Chunk ID: 145e35", False),
    ],
)
def test_only_what_a_rule_names_may_differ(rules: tuple[str, ...], recorded: str, given: str, is_same: bool) -> None:
    tolerance = Tolerance(rules)
    assert (tolerance.without(recorded) == tolerance.without(given)) is is_same


def test_a_value_that_differs_in_each_run_and_is_named_by_the_model_ends_what_can_be_forked() -> None:
    assert Tolerance(CodexHarness.varying_text).handles("Process running with session ID 4711\n") == ["4711"]
