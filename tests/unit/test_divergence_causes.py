"""Causes of a prompt that does not begin with its parent's context: one case each, and its nearest other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.errors import EngineUnavailable
from gangline.domain.tokens import common_prefix_len, token_ids
from gangline.node.capture.divergence import find_cause
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.engine import TemplateEngine
from support.strategies import Sample, user

QUESTION = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"
LS, LS_SPACED, RM = '{"command": "ls"}', '{"command":"ls"}', '{"command": "rm"}'


@cache
def _tiny() -> TinyTokenizer:
    return TinyTokenizer()


class _Mute(TemplateEngine):
    """An engine without a route that decodes."""

    async def detokenize(self, ids: Sequence[int]) -> str:
        raise EngineUnavailable("no /detokenize")


async def _cause(
    sampled: str,
    rendered: str,
    response: Sequence[Part],
    echo: Sequence[Part] | None = None,
    *,
    finish: str = "stop",
    by_chars: bool = False,
    question: str = QUESTION,
    asked: Message | None = None,
    engine: type[TemplateEngine] = TemplateEngine,
    user_turn_follows: bool = False,
) -> str:
    """sampled, rendered: texts of the turn, as the model wrote it and as the prompt of the next call has it.

    by_chars: sampled one character a token. question: the text before the turn in that prompt. asked: its user message.
    """
    encode = _tiny().encode
    sample = Sample()
    body, ended, _ = sampled.partition(END)
    ids = [token for char in body for token in encode(char)] if by_chars else encode(body)
    parent: Completion = sample.add(
        prompt=encode(QUESTION), sampled=ids + encode(ended), messages=(user("hello"),), finish_reason=finish
    )
    parent = replace(parent, response=Message("assistant", tuple(response)))
    tree = CompletionTree([parent])
    context, prompt = tree.context_ids(parent), token_ids(encode(question + rendered))
    first = common_prefix_len(context, prompt)
    assert first < len(context)
    echoed = (asked or user("hello"), Message("assistant", tuple(response if echo is None else echo)))
    return await find_cause(
        engine(_tiny()), tree, parent, echoed, context, prompt, first, user_turn_follows=user_turn_follows
    )


CALL = ToolCall("c", "run", LS)
OK, SAID = Text("ok"), Text("the answer")


@pytest.mark.parametrize(
    ("expected", "case"),
    [
        # Another end of turn than the sampled one: only where the rest of the turn is the same.
        ("end_of_turn", {"sampled": "ok<|endoftext|>", "rendered": f"ok{END}", "response": [OK]}),
        (
            "tool_call_reserialised",
            {
                "sampled": "ok<|endoftext|>",
                "rendered": f"ok{END}",
                "response": [OK, ToolCall("c", "run", LS)],
                "echo": [OK, ToolCall("c", "run", RM)],
            },
        ),
        ("whitespace", {"sampled": "ok<|endoftext|>", "rendered": f"ok{END}", "response": [OK], "echo": [Text("no")]}),
        # The same text in other ids.
        (
            "bpe_merge",
            {"sampled": f"the answer{END}", "rendered": f"the answer{END}", "response": [SAID], "by_chars": True},
        ),
        (
            "special_token_in_text",
            {"sampled": "the <|x|>", "rendered": f"the <|x|>{END}", "response": [Text("the <|x|>")], "by_chars": True},
        ),
        # A turn that a limit ended, and one that it ended after another beginning.
        (
            "truncated_turn",
            {"sampled": "the ans", "rendered": f"other{END}", "response": [Text("the ans")], "finish": "length"},
        ),
        (
            "truncated_turn",
            {"sampled": "the ans", "rendered": f"other{END}", "response": [Text("the ans")], "finish": "abort"},
        ),
        ("unknown", {"sampled": "the ans", "rendered": f"other{END}", "response": [Text("the ans")]}),
        (
            "unknown",
            {
                "sampled": "ok",
                "rendered": "ok",
                "response": [OK],
                "finish": "length",
                "question": QUESTION.replace("hello", "hallo"),
            },
        ),
        # Thinking: dropped by the client, or by the template at a user's turn.
        (
            "thinking_dropped",
            {"sampled": f"hm ok{END}", "rendered": f"ok{END}", "response": [Thinking("hm"), OK], "echo": [OK]},
        ),
        (
            "thinking_dropped",
            {
                "sampled": f"hm ok{END}",
                "rendered": f"ok{END}",
                "response": [Thinking("hm"), OK],
                "user_turn_follows": True,
            },
        ),
        ("unknown", {"sampled": f"hm ok{END}", "rendered": f"ok{END}", "response": [Thinking("hm"), OK]}),
        # Thinking that the client wrote anew, trimmed, or added.
        *(
            (expected, {"sampled": f"a{END}", "rendered": f"b{END}", "response": response, "echo": echo})
            for expected, response, echo in (
                ("history_edited", [Thinking("plan A"), OK], [Thinking("plan B"), OK]),
                ("history_edited", [Thinking("plan A"), CALL], [Thinking("plan B"), CALL]),
                ("history_edited", [CALL], [Thinking("plan B"), CALL]),
                ("whitespace", [Thinking("\nplan A\n"), OK], [Thinking("plan A"), OK]),
                ("tool_call_reserialised", [Thinking("plan A"), CALL], [Thinking("plan A"), CALL]),
            )
        ),
        # Calls: other arguments, arguments that a template writes anew, and what stands around them.
        (
            "tool_call_reserialised",
            {
                "sampled": f"a{END}",
                "rendered": f"b{END}",
                "response": [ToolCall("c", "run", LS)],
                "echo": [ToolCall("c", "run", RM)],
            },
        ),
        (
            "tool_call_reserialised",
            {
                "sampled": f"a{END}",
                "rendered": f"b{END}",
                "response": [ToolCall("c", "run", LS_SPACED), Text(" <|x|> ")],
            },
        ),
        (
            "tool_call_reserialised",
            {"sampled": f"a{END}", "rendered": f"b{END}", "response": [ToolCall("c", "run", LS)]},
        ),
        (
            "whitespace",
            {"sampled": f"a{END}", "rendered": f"b{END}", "response": [Text("ok "), ToolCall("c", "run", LS)]},
        ),
        (
            "whitespace",
            {"sampled": f"a{END}", "rendered": f"b{END}", "response": [Text("ok "), ToolCall("c", "run", "no JSON")]},
        ),
        # Marks of special tokens in what was said.
        ("special_token_in_text", {"sampled": f"a{END}", "rendered": f"b{END}", "response": [Text("<|x|>")]}),
        ("special_token_in_text", {"sampled": f"a{END}", "rendered": f"b{END}", "response": [Text("<｜x｜>")]}),
        # White space: in the messages, or in the decoded texts alone.
        ("whitespace", {"sampled": f"a{END}", "rendered": f"b{END}", "response": [OK], "echo": [Text("o k")]}),
        ("whitespace", {"sampled": f"a{END}", "rendered": f"b{END}", "response": [Text(" ok")]}),
        ("whitespace", {"sampled": f"a  b{END}", "rendered": f"a b{END}", "response": [OK]}),
        ("unknown", {"sampled": f"a{END}", "rendered": f"b{END}", "response": [OK]}),
        # Without decoded texts the messages alone are known.
        ("unknown", {"sampled": f"a  b{END}", "rendered": f"a b{END}", "response": [OK], "engine": _Mute}),
        (
            "whitespace",
            {
                "sampled": f"a  b{END}",
                "rendered": f"a b{END}",
                "response": [OK],
                "echo": [Text("o k")],
                "engine": _Mute,
            },
        ),
    ],
    ids=str,
)
async def test_a_divergence_has_one_cause(expected: str, case: dict[str, Any]) -> None:
    assert await _cause(**case) == expected


async def test_a_cause_before_the_turn_is_sought_in_all_messages() -> None:
    """In the response only its own message is looked at; before it, what the user and the tools said as well."""
    other: dict[str, Any] = {"rendered": f"b{END}", "response": [OK], "asked": user("hello ")}
    assert await _cause(f"a{END}", **other) == "unknown"
    assert await _cause(f"a{END}", **other, question=QUESTION.replace("hello", "hallo")) == "whitespace"


async def test_marks_in_a_tools_output_are_seen() -> None:
    sample = Sample()
    asked = Message("tool", (ToolResult("c", (Text("a <|x|> b"),)),))
    encode = _tiny().encode
    parent = sample.add(prompt=encode(QUESTION), sampled=encode(f"ok{END}"), messages=(asked,))
    prompt = token_ids([*encode(QUESTION)[:3], 5, *encode(QUESTION)[3:]])
    found = await find_cause(
        TemplateEngine(_tiny()),
        sample.tree,
        parent,
        (asked, parent.response),
        sample.tree.context_ids(parent),
        prompt,
        3,
        user_turn_follows=False,
    )
    assert found == "special_token_in_text"
