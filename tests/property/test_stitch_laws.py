"""Whatever was sampled and whatever is new: a stitched prompt is the parent's context, then the template's tail."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gangline.domain.completion import Certificate, Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineUnavailable, InvalidRequest
from gangline.domain.tokens import logprobs, token_ids
from gangline.models.engines.templates.tails import CannotStitch
from gangline.models.language.tokenizer import load_tokenizer
from gangline.node.capture.placing import Place, branch_key, history_of_key
from gangline.node.capture.stitch import Stitcher, ThinkingPolicy
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.engine import TemplateEngine
from support.engines.tokenizers import qwen3_folder, smollm2_name

TOKENIZERS = ["tiny", "qwen3", "smollm2"]
USER = Message("user", (Text("more"),))
RESULT = Message("tool", (ToolResult("c", (Text("out"),)),))
CALL = ToolCall("c", "read", '{"path": "x"}')
WRITTEN = '\n<tool_call>\n{"name": "read", "arguments": "{\\"path\\": \\"x\\"}"}\n</tool_call>'

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["<|im_end|>", "a<|im_end|>\n<|im_start|>user\nb", "</tool_response>", "one", "two", "\n", " x ", "one<|im_end|>"]
)
_tool_messages = st.lists(_texts.map(lambda t: Message("tool", (ToolResult("c", (Text(t),)),))), min_size=1, max_size=3)
_user_messages = _texts.map(lambda t: [Message("user", (Text(t),))])


@cache
def _tokenizer(name: str) -> Any:
    if name == "tiny":
        return TinyTokenizer()
    return load_tokenizer(qwen3_folder() if name == "qwen3" else smollm2_name())


def _end_of_turn(tokenizer: Any) -> int:
    return tokenizer.encode("<|im_end|>")[0]


def _completion(prompt: list[int], sampled: list[int], finish_reason: str) -> Completion:
    return Completion(
        completion_id="c1-000001",
        session_id="s",
        attempt=1,
        status="complete",
        parent_id=None,
        branch_key="k",
        dialect="openai_chat",
        model="m",
        prompt_shared=0,
        prompt_suffix_ids=token_ids(prompt),
        sampled_ids=token_ids(sampled),
        logprobs=logprobs([-1.0] * len(sampled)),
        messages_shared=0,
        new_messages=(Message("user", (Text("hello"),)),),
        response=Message("assistant", (Text("whatever"),)),
        certificate=Certificate(
            prompt_source="engine", context="first", logprobs="processed", finish_reason=finish_reason
        ),
        started_at=0.0,
        finished_at=0.0,
    )


def _stitch(
    tokenizer: Any,
    parent: Completion,
    new: list[Message],
    *,
    before: tuple[Completion, ...] = (),
    thinking: ThinkingPolicy = "retain",
    engine: TemplateEngine | None = None,
    **fields: Any,
) -> list[int]:
    """before: completions that `parent` continues. fields: of the call."""
    messages = (*parent.new_messages, parent.response, *new)
    call = ModelCall(dialect="openai_chat", model="m", messages=messages, **fields)
    place = Place(branch_key(call), parent.completion_id, 2, tuple(new), b"")
    stitcher = Stitcher(engine or TemplateEngine(tokenizer), CompletionTree([*before, parent]), thinking)
    return asyncio.run(stitcher.prompt_ids(call, place)).tolist()


def _template_tail(tokenizer: Any, history: list[Message], new: list[Message]) -> list[int]:
    """What the template writes after an assistant turn of known ids: found by subtracting what stands before it."""
    engine = TemplateEngine(tokenizer)
    assistant = Message("assistant", (Text("Q"),))
    whole = asyncio.run(engine.render((*history, assistant, *new))).tolist()
    before = asyncio.run(engine.render(history)).tolist() + tokenizer.encode("Q")
    assert whole[: len(before)] == before
    return whole[len(before) :]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stitched_prompt_is_the_context_then_the_templates_own_tail(name: str, data: st.DataObject) -> None:
    tokenizer = _tokenizer(name)
    sampled = data.draw(st.lists(st.integers(0, 280), max_size=12))
    finishes = data.draw(st.booleans())
    new = data.draw(_tool_messages | _user_messages if name != "smollm2" else _user_messages)
    end = _end_of_turn(tokenizer)
    sampled = [token for token in sampled if token != end] + ([end] if finishes else [])
    history = [Message("user", (Text("hello"),))]
    prompt = asyncio.run(TemplateEngine(tokenizer).render(history)).tolist()
    # A limit may fall on the end of turn itself: it is not written twice.
    parent = _completion(prompt, sampled, data.draw(st.sampled_from(["stop", "length"])) if finishes else "length")

    stitched = _stitch(tokenizer, parent, new)

    tail = _template_tail(tokenizer, history, new)
    assert tail[0] == end
    assert stitched == prompt + sampled + (tail[1:] if finishes else tail)


def test_another_end_of_turn_than_the_templates_stands_in_its_place() -> None:
    tokenizer = TinyTokenizer()
    ended = [*tokenizer.encode("hello"), tokenizer.encode("<|endoftext|>")[0]]
    parent = _completion([1, 2], ended, "stop")
    stitched = _stitch(tokenizer, parent, [Message("user", (Text("more"),))])
    tail = tokenizer.encode("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert stitched == [1, 2, *ended, *tail]


class _OpenTokenizer(TinyTokenizer):
    """A template that writes nothing after a turn: the opener of the next one ends it, as GLM's does."""

    def render(self, messages: Any, **arguments: Any) -> list[int]:
        ids, end = super().render(messages, **arguments), _end_of_turn(self)
        return [token for token in ids if token not in (end, *self.encode("\n"))]


def test_a_turn_that_ends_unlike_any_closing_is_left_to_the_engine() -> None:
    tokenizer = _OpenTokenizer()
    parent = _completion([1, 2], [*tokenizer.encode("hello"), tokenizer.encode("<|endoftext|>")[0]], "stop")
    with pytest.raises(CannotStitch, match="does not end as the template closes one"):
        _stitch(tokenizer, parent, [Message("user", (Text("more"),))])


def test_a_turn_that_a_stop_string_ended_is_closed_in_the_context_that_follows() -> None:
    tokenizer = TinyTokenizer()
    parent = _completion([1, 2], tokenizer.encode("hello STOP"), "stop")
    parent = replace(parent, certificate=replace(parent.certificate, stop_reason="STOP"))
    tail = tokenizer.encode("<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    stitched = _stitch(tokenizer, parent, [Message("user", (Text("more"),))])
    assert stitched == [1, 2, *parent.sampled_ids.tolist(), *tail]


def test_bytes_sampled_after_the_end_of_turn_are_not_written_twice() -> None:
    tokenizer = TinyTokenizer()
    ended = tokenizer.encode("hello<|im_end|>\n")
    parent = _completion([1, 2], ended, "stop")
    stitched = _stitch(tokenizer, parent, [Message("user", (Text("more"),))])
    assert stitched == [1, 2, *ended, *tokenizer.encode("<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")]


def test_only_the_new_messages_are_rendered() -> None:
    tokenizer = TinyTokenizer()
    parent = _completion([1, 2], tokenizer.encode("hello<|im_end|>"), "stop")
    history = tuple(Message("user", (Text(f"{n}"),)) for n in range(50))
    new = (Message("tool", (ToolResult("c", (Text("out"),)),)),)
    call = ModelCall(dialect="openai_chat", model="m", messages=(*history, parent.response, *new))
    engine = TemplateEngine(tokenizer)
    stitcher = Stitcher(engine, CompletionTree([parent]), "follow_template")
    asyncio.run(stitcher.prompt_ids(call, Place("k", parent.completion_id, 51, new, b"")))
    assert max(engine.num_rendered_messages) == 3


class _StrictTokenizer(TinyTokenizer):
    """A template that takes tool results only after calls, as Mistral's does."""

    def render(self, messages: Any, **arguments: Any) -> list[int]:
        for before, message in zip([{}, *messages], messages, strict=False):
            if message["role"] == "tool" and before.get("role") != "tool" and not before.get("tool_calls"):
                raise InvalidRequest("tool results must follow tool calls")
        return super().render(messages, **arguments)


@pytest.mark.parametrize(
    ("written", "is_stitched"),
    [
        ('\n<tool_call>\n{"name": "read", "arguments": "{\\"path\\": \\"x\\"}"}\n</tool_call>', True),
        ('<tool_call>{"name": "read", "arguments": "{\\"path\\":\\"x\\"}" }\n</tool_call>', True),
        ('<tool_call>{"name": "read", "arguments": "{}"}', False),  # the tag itself is missing
    ],
)
def test_a_template_that_wants_calls_before_results_gets_them(written: str, is_stitched: bool) -> None:
    tokenizer = _StrictTokenizer()
    response = Message("assistant", (ToolCall("c", "read", '{"path": "x"}'),))
    prompt = tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    parent = _completion(prompt, [*tokenizer.encode(written), _end_of_turn(tokenizer)], "tool_calls")
    parent = replace(parent, response=response)
    new = [Message("tool", (ToolResult("c", (Text("out"),)),))]
    if is_stitched:
        tail = tokenizer.encode("\n<|im_start|>tool\nout<|im_end|>\n<|im_start|>assistant\n")
        assert _stitch(tokenizer, parent, new) == [*prompt, *parent.sampled_ids.tolist(), *tail]
    else:
        with pytest.raises(CannotStitch, match="does not end"):
            _stitch(tokenizer, parent, new)


class _ObjectsTokenizer(_StrictTokenizer):
    """A template that goes through the arguments by their names, as Qwen3-Coder's does: it refuses a list."""

    def render(self, messages: Any, **arguments: Any) -> list[int]:
        for message in messages:
            for call in message.get("tool_calls") or ():
                if not isinstance(call["function"]["arguments"], dict):
                    raise InvalidRequest("arguments must be an object")
        return super().render(messages, **arguments)


def test_a_template_that_takes_objects_only_gets_those() -> None:
    tokenizer, written = _ObjectsTokenizer(), '<tool_call>{"name": "read", "arguments": {"path": "x"}}\n</tool_call>'
    parent = replace(
        _completion([1, 2], tokenizer.encode(f"{written}<|im_end|>"), "tool_calls"),
        response=Message("assistant", (CALL,)),
    )
    tail = tokenizer.encode("\n<|im_start|>tool\nout<|im_end|>\n<|im_start|>assistant\n")
    assert _stitch(tokenizer, parent, [RESULT]) == [1, 2, *parent.sampled_ids.tolist(), *tail]


class _NoToolsTokenizer(TinyTokenizer):
    def render(self, messages: Any, **arguments: Any) -> list[int]:
        if any(message["role"] == "tool" for message in messages):
            raise InvalidRequest("no tools here")
        return super().render(messages, **arguments)


def test_a_template_that_refuses_the_new_messages_leaves_them_to_the_engine() -> None:
    tokenizer = _NoToolsTokenizer()
    parent = _completion([1, 2], tokenizer.encode("hello<|im_end|>"), "tool_calls")
    with pytest.raises(CannotStitch, match="that no call asked for"):
        _stitch(tokenizer, parent, [RESULT])
    with pytest.raises(CannotStitch, match="refuses the new messages: no tools here"):
        _stitch(tokenizer, replace(parent, response=Message("assistant", (CALL,))), [RESULT])


def test_a_call_that_a_limit_cut_is_closed_before_its_results() -> None:
    tokenizer = TinyTokenizer()
    parent = replace(
        _completion([1, 2], tokenizer.encode(WRITTEN[:20]), "length"), response=Message("assistant", (CALL,))
    )
    tail = tokenizer.encode("<|im_end|>\n<|im_start|>tool\nout<|im_end|>\n<|im_start|>assistant\n")
    assert _stitch(tokenizer, parent, [RESULT]) == [1, 2, *parent.sampled_ids.tolist(), *tail]


class _StyledTokenizer(TinyTokenizer):
    """A template whose arguments choose what it closes a turn with."""

    def render(self, messages: Any, *, template_kwargs: Any = None, **arguments: Any) -> list[int]:
        closing = self.encode(f"<|im_end|>{(template_kwargs or {}).get('closing', '')}\n")
        plain, ids = self.encode("<|im_end|>\n"), super().render(messages, **arguments)
        for at in range(len(ids) - len(plain), -1, -1):
            if ids[at : at + len(plain)] == plain:
                ids[at : at + len(plain)] = closing
        return ids


def test_each_branch_is_closed_as_its_own_template_arguments_say() -> None:
    """The sampled end of turn stands where the template's stands: after it comes the rest of that branch's closing."""
    tokenizer = _StyledTokenizer()
    parent = _completion([1, 2], tokenizer.encode("hello<|endoftext|>"), "stop")
    stitcher = Stitcher(TemplateEngine(tokenizer), CompletionTree([parent]), "retain")
    for closing in ("", " over", " and out"):
        kwargs = {"closing": closing}
        messages = (*parent.new_messages, parent.response, USER)
        call = ModelCall(dialect="openai_chat", model="m", messages=messages, template_kwargs=kwargs)
        place = Place(branch_key(call), parent.completion_id, 2, (USER,), history_of_key(""))
        stitched = asyncio.run(stitcher.prompt_ids(call, place)).tolist()
        tail = tokenizer.encode(f"{closing}\n<|im_start|>user\nmore<|im_end|>{closing}\n<|im_start|>assistant\n")
        assert stitched == [1, 2, *parent.sampled_ids.tolist(), *tail]


class _NamingTokenizer(TinyTokenizer):
    """A template that writes the name of the last call before each result, and `text` where there was none."""

    def render(self, messages: Any, **arguments: Any) -> list[int]:
        named, name = [], "text"
        for message in messages:
            calls = message.get("tool_calls") or ()
            name = calls[-1]["function"]["name"] if calls else "text" if message["role"] == "assistant" else name
            is_result = message["role"] == "tool"
            named.append({**message, "content": f"{name}: {message['content']}"} if is_result else message)
        return super().render(named, **arguments)


def test_results_are_written_as_the_template_writes_them_after_calls() -> None:
    tokenizer = _NamingTokenizer()
    written = '\n<tool_call>\n{"name": "read", "arguments": {"path":"x"}}\n</tool_call>'
    prompt = tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    parent = _completion(prompt, [*tokenizer.encode(written), _end_of_turn(tokenizer)], "tool_calls")
    parent = replace(parent, response=Message("assistant", (ToolCall("c", "read", '{"path": "x"}'),)))
    tail = "\n<|im_start|>tool\nread: out<|im_end|>\n<|im_start|>assistant\n"
    stitched = _stitch(tokenizer, parent, [Message("tool", (ToolResult("c", (Text("out"),)),))])
    assert stitched == [*prompt, *parent.sampled_ids.tolist(), *tokenizer.encode(tail)]


STRIPS = "a new user turn: the template strips the thinking before it"


class _ForgetfulTokenizer(TinyTokenizer):
    """A template that leaves out the thinking before the last user message, as Qwen3's does."""

    def render(self, messages: Any, **arguments: Any) -> list[int]:
        last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        known = [
            {k: v for k, v in message.items() if at > last or k != "reasoning_content"}
            for at, message in enumerate(messages)
        ]
        return super().render(known, **arguments)


class _CountingTokenizer(TinyTokenizer):
    """A template that writes the number of messages before them: with each turn it takes back what it wrote."""

    def render(self, messages: Any, **arguments: Any) -> list[int]:
        return self.encode(f"{len(messages)} messages\n") + super().render(messages, **arguments)


def _thinker(tokenizer: Any, *parts: Any) -> Completion:
    parent = _completion([1, 2], tokenizer.encode("hello<|im_end|>"), "stop")
    return replace(parent, response=Message("assistant", parts))


@pytest.mark.parametrize("thought", [(Thinking("hm"), Text("ok")), (Text("hm</think>ok"),)])
def test_a_user_turn_follows_a_template_that_forgets_the_thinking_before_it(thought: Any) -> None:
    forgetful, keeping = _ForgetfulTokenizer(), TinyTokenizer()
    with pytest.raises(CannotStitch, match=STRIPS) as refused:
        _stitch(forgetful, _thinker(forgetful, *thought), [USER], thinking="follow_template")
    assert refused.value.cause == "thinking_dropped"
    expected = _stitch(keeping, _thinker(keeping, *thought), [USER], thinking="follow_template")
    assert expected[:2] == [1, 2]
    # Nothing is forgotten between a call and its result, where there was no thought, or where it is to be retained.
    others: tuple[tuple[Any, Message, ThinkingPolicy], ...] = (
        (thought, RESULT, "follow_template"),
        ((Text("ok"),), USER, "follow_template"),
        (thought, USER, "retain"),
    )
    for parts, new, thinking in others:
        assert _stitch(forgetful, _thinker(forgetful, *parts), [new], thinking=thinking)[:2] == [1, 2]


@pytest.mark.parametrize(("asked", "is_stitched"), [(RESULT, False), (USER, True)])
def test_the_thinking_of_earlier_turns_counts_back_to_the_last_user_message(asked: Message, is_stitched: bool) -> None:
    tokenizer = _ForgetfulTokenizer()
    thinker = _thinker(tokenizer, Thinking("hm"), ToolCall("c", "run", "{}"))
    parent = replace(
        _completion([1], tokenizer.encode("hello<|im_end|>"), "stop"),
        completion_id="c1-000002",
        parent_id=thinker.completion_id,
        new_messages=(asked,),
        messages_shared=2,
        certificate=replace(thinker.certificate, context="diverged"),
    )
    if is_stitched:
        assert _stitch(tokenizer, parent, [USER], before=(thinker,), thinking="follow_template")
    else:
        with pytest.raises(CannotStitch, match=STRIPS):
            _stitch(tokenizer, parent, [USER], before=(thinker,), thinking="follow_template")


def test_a_template_that_takes_back_what_it_wrote_is_followed_at_a_user_turn() -> None:
    tokenizer = _CountingTokenizer()
    with pytest.raises(CannotStitch, match=STRIPS) as refused:
        _stitch(tokenizer, _thinker(tokenizer, Text("ok")), [USER], thinking="follow_template")
    assert refused.value.cause == "thinking_dropped"
    assert _stitch(tokenizer, _thinker(tokenizer, Text("ok")), [RESULT], thinking="follow_template")[:2] == [1, 2]


class _RecordingEngine(TemplateEngine):
    """Keeps what each rendering was asked with."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.asked: list[tuple[Any, Any]] = []

    async def render(
        self, messages: Any, tools: Any = (), template_kwargs: Any = None, add_generation_prompt: bool = True
    ) -> Any:
        self.asked.append((tools, template_kwargs))
        return await super().render(messages, tools, template_kwargs, add_generation_prompt)


@pytest.mark.parametrize(
    ("tokenizer", "sampled", "parts", "new"),
    [
        (TinyTokenizer(), "hello<|im_end|>", (Thinking("hm"), Text("ok")), USER),
        (TinyTokenizer(), "hello<|endoftext|>", (Text("ok"),), USER),
        (_StrictTokenizer(), f"{WRITTEN}<|im_end|>", (CALL,), RESULT),
        (_NamingTokenizer(), f"{WRITTEN}<|im_end|>", (CALL,), RESULT),
    ],
)
def test_every_rendering_is_with_the_calls_own_tools_and_template_arguments(
    tokenizer: Any, sampled: str, parts: Any, new: Message
) -> None:
    engine, tools, kwargs = _RecordingEngine(tokenizer), (ToolDefinition("read"),), {"style": "short"}
    parent = replace(_completion([1, 2], tokenizer.encode(sampled), "stop"), response=Message("assistant", parts))
    _stitch(tokenizer, parent, [new], engine=engine, thinking="follow_template", tools=tools, template_kwargs=kwargs)
    assert engine.asked == [(tools, kwargs)] * len(engine.asked)
    assert len(engine.asked) > 1


def test_placing_and_stitching_never_touch_the_parents_ids() -> None:
    tokenizer = TinyTokenizer()
    odd = [token for char in "the command" for token in tokenizer.encode(char)] + [_end_of_turn(tokenizer)]
    parent = _completion(tokenizer.encode("the file"), odd, "stop")
    stitched = _stitch(tokenizer, parent, [Message("user", (Text("more"),))])
    context = np.concatenate([parent.prompt_suffix_ids, parent.sampled_ids]).tolist()
    assert stitched[: len(context)] == context
    assert tokenizer.encode(tokenizer.decode(odd)) != odd


@pytest.mark.parametrize(("status", "is_the_templates_fault"), [(500, True), (503, False), (None, False)])
def test_a_template_that_fails_at_the_stand_ins_is_no_engine_that_fails(
    status: int | None, is_the_templates_fault: bool
) -> None:
    class Failing(TemplateEngine):
        async def render(self, *_: Any, **__: Any) -> Any:
            raise EngineUnavailable("the engine answered an error", status=status)

    parent = _completion([1, 2], [3], "stop")
    new = [Message("user", (Text("more"),))]
    call = ModelCall(dialect="openai_chat", model="m", messages=(*parent.new_messages, parent.response, *new))
    stitcher = Stitcher(Failing(TinyTokenizer()), CompletionTree([parent]), "retain")
    place = Place(branch_key(call), parent.completion_id, 2, tuple(new), b"")
    with pytest.raises(CannotStitch if is_the_templates_fault else EngineUnavailable):
        asyncio.run(stitcher.prompt_ids(call, place))


@pytest.mark.parametrize(
    ("sampled", "parts", "new"),
    [
        ("hello", (Text("hello"),), USER),
        ("hello \n", (Text("hello \n"),), USER),
        ("", (), USER),
        (WRITTEN.lstrip("\n"), (CALL,), RESULT),
        (f"{WRITTEN}\n".lstrip("\n"), (CALL,), RESULT),
    ],
)
@pytest.mark.parametrize("tokenizer", [TinyTokenizer(), _NamingTokenizer()])
def test_a_reply_whose_end_of_turn_the_engine_left_out_is_closed(
    tokenizer: Any, sampled: str, parts: Any, new: Message
) -> None:
    """The last id is content then, not another end of turn in the place of the template's."""
    parent = _completion([1, 2], tokenizer.encode(sampled), "stop")
    parent = replace(parent, response=Message("assistant", parts))
    try:
        stitched = _stitch(tokenizer, parent, [new])
    except CannotStitch:
        assert isinstance(tokenizer, _NamingTokenizer)  # may begin within the call
        return
    tail = tokenizer.decode(stitched[2 + len(parent.sampled_ids) :])
    assert tail.startswith("<|im_end|>\n<|im_start|>")
