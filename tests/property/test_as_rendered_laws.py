"""Whatever a template does with a history: a stitched prompt is as rendered but for the model's own turns, or says so.

Templates are generated: they number results, mark the first one, move the system text, write at the front, close the
last message otherwise, join neighbours, strip thinking, drop old turns, end a turn in several ways or not at all. What
a template writes outside of the model's turns is held against the same of the sent prompt, by the template itself.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineRefused, InvalidRequest
from gangline.domain.task import CaptureSpec
from gangline.domain.tokens import TokenIds
from gangline.models.engines.templates.tails import Tails
from gangline.models.language.messages import template_messages
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.families import Family, FamilyEngine, Turn
from support.node.proxy import MemoryJournal

SHELL = ToolDefinition("shell", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}})
OPENER = "<|im_start|>assistant\n"
END = "<|im_end|>"
OWN = "\0"


@dataclass(frozen=True)
class Template:
    numbers: str = "no"
    """`results`, `calls`: what is counted, over the whole conversation. `first`: the first result is marked."""
    system: str = "front"
    """`last_user`: before the last user message. `refused`."""
    front: str = "no"
    """`after_user`: a line at the front where a user spoke last. `after_tool`. `count`: of the messages."""
    last: str = "same"
    """`newline`: the last message is closed without the line break that stands there later."""
    joins: bool = False
    """Neighbours of one role are one turn."""
    thinking: str = "kept"
    """`stripped`: always. `until_user`: before the last user message."""
    opens_thinking: bool = False
    """The generation prompt opens a thought, which the history shows only with one."""
    forgets: bool = False
    """Only the last three messages, and the first one."""
    wants_calls: bool = False
    """Refuses results that no call asked for."""
    writes_calls: bool = True
    names_results: bool = False
    """With the name of the call before, or `unknown`."""

    def write(self, messages: list[dict[str, Any]], tools: Any, prompt: bool, *, own: bool = True) -> str:
        """own: the assistant's turns as they are, else a mark for each."""
        return "".join(self._pieces(messages, tools, prompt, own))

    def _pieces(self, messages: list[dict[str, Any]], tools: Any, prompt: bool, own: bool) -> list[str]:
        system = [m["content"] for m in messages if m["role"] == "system"]
        if system and self.system == "refused":
            raise InvalidRequest("no system message here")
        shown = [m for m in messages if m["role"] != "system"]
        users = [at for at, m in enumerate(shown) if m["role"] == "user"]
        last_user = users[-1] if users else -1
        pieces = [self._front(shown)]
        if system and self.system == "front":
            pieces.append(f"<|im_start|>system\n{system[0]}{END}\n")
        counted, name = 0, "unknown"
        for at, message in enumerate(shown):
            role, calls = message["role"], message.get("tool_calls") or ()
            if self.wants_calls and role == "tool" and not any(m.get("tool_calls") for m in shown[:at]):
                raise InvalidRequest("results need calls")
            counted += len(calls) if self.numbers == "calls" else role == "tool" and self.numbers != "no"
            name = calls[-1]["function"]["name"] if calls else "unknown" if role == "assistant" else name
            if self.forgets and 0 < at < len(shown) - 3:
                continue
            if role == "assistant":
                pieces.append(self._turn(message, at > last_user) if own else OWN)
                continue
            body = message["content"]
            if role == "tool":
                body = self._result(body, counted, name)
            elif at == last_user and system and self.system == "last_user":
                body = f"{system[0]}\n\n{body}"
            joined_before = self.joins and at > 0 and shown[at - 1]["role"] == role
            joined_after = self.joins and at + 1 < len(shown) and shown[at + 1]["role"] == role
            line = "" if self.last == "newline" and at + 1 == len(shown) else "\n" if self.last == "newline" else ""
            pieces.append("\n" if joined_before else f"<|im_start|>{role}\n")
            pieces.append(body + ("" if joined_after else f"{line}{END}\n"))
        return [*pieces, self.opening if prompt else ""]

    @property
    def opening(self) -> str:
        return OPENER + ("<think>\n" if self.opens_thinking else "")

    def _front(self, shown: list[dict[str, Any]]) -> str:
        if self.front == "count":
            return f"{len(shown)} messages\n"
        role = shown[-1]["role"] if shown else ""
        return "FRONT\n" if self.front == f"after_{role}" else ""

    def _result(self, body: str, counted: int, name: str) -> str:
        named = f"{name}: {body}" if self.names_results else body
        if self.numbers == "first":
            return named if counted > 1 else f"first {named}"
        return named if self.numbers == "no" else f"#{counted} {named}"

    def _turn(self, message: dict[str, Any], is_new: bool) -> str:
        thought = message.get("reasoning_content")
        keeps = thought and (self.thinking == "kept" or (self.thinking == "until_user" and is_new))
        said = f"<think>\n{thought}\n</think>\n\n" if keeps else ""
        calls = [f"<tool_call>{json.dumps(c['function'])}</tool_call>" for c in message.get("tool_calls") or ()]
        said += (message.get("content") or "") + ("".join(calls) if self.writes_calls else "")
        return f"{OPENER}{said}{END}\n"


@dataclass
class Tokenizer(TinyTokenizer):
    template: Template = field(default_factory=Template)

    def __post_init__(self) -> None:
        super().__init__()

    def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True, **_: Any) -> list[int]:
        return self.encode(self.template.write(list(messages), tools, add_generation_prompt))


TEMPLATES = st.builds(
    Template,
    numbers=st.sampled_from(["no", "no", "results", "calls", "first"]),
    system=st.sampled_from(["front", "front", "last_user", "refused"]),
    front=st.sampled_from(["no", "no", "no", "after_user", "after_tool", "count"]),
    last=st.sampled_from(["same", "same", "newline"]),
    joins=st.booleans(),
    thinking=st.sampled_from(["kept", "stripped", "until_user"]),
    opens_thinking=st.booleans(),
    forgets=st.sampled_from([False, False, False, True]),
    wants_calls=st.booleans(),
    writes_calls=st.sampled_from([True, True, False]),
    names_results=st.booleans(),
)
TURNS = st.builds(
    Turn,
    text=st.sampled_from(["ok", "the answer", " x \n", "a  b", "one"]),
    thinking=st.sampled_from(["", "Hm."]),
    calls=st.sampled_from([(), (), (("shell", '{"command": "ls"}'),), (("shell", "{}"), ("other", '{"a":1}'))]),
    finish=st.sampled_from(["stop", "stop", "stop", "length"]),
    end=st.sampled_from([None, None, None, "<|endoftext|>", ""]),
    split=st.booleans(),
)


def _hermes(turn: Turn) -> tuple[list[str], str]:
    pieces = ["<think>", f"\n{turn.thinking}\n", "</think>", "\n\n"] if turn.thinking else []
    pieces.append(turn.text)
    for name, arguments in turn.calls:
        pieces += ["<tool_call>", json.dumps({"name": name, "arguments": arguments}), "</tool_call>"]
    return pieces, END


@dataclass
class Talk:
    template: Template
    thinking: str = "follow_template"
    not_as_rendered: str = "fall_back"
    echoes_thinking: bool = False
    history: list[Message] = field(default_factory=list[Message])
    calls: list[ModelCall] = field(default_factory=list[ModelCall])

    async def run(self, turns: list[Turn], *, user_after_result: bool = False) -> list[Completion]:
        tokenizer = Tokenizer(template=self.template)
        engine = FamilyEngine(Family("generated", lambda: tokenizer, _hermes), turns)
        journal = MemoryJournal()
        capture = CaptureSpec(thinking=self.thinking, not_as_rendered=self.not_as_rendered)  # pyright: ignore
        session = ModelSession(SessionSpec(session_id="s1", attempt=1, key="k", capture=capture), engine, journal)
        for number in range(len(turns)):
            call = ModelCall(dialect="d", model="m", messages=tuple(self.history), tools=(SHELL,))
            self.calls.append(call)
            message = (await session.start_call(call).reply()).choices[0].message
            kept = [part for part in message.parts if self.echoes_thinking or not isinstance(part, Thinking)]
            self.history.append(Message("assistant", tuple(kept)))
            asked = [part for part in kept if isinstance(part, ToolCall)]
            self.history += [Message("tool", (ToolResult(one.call_id, (Text(f"out {number}"),)),)) for one in asked]
            if not asked or user_after_result:
                self.history.append(Message("user", (Text(f"question {number}"),)))
        await session.fence("done")
        return journal.completions

    def sent_outside(self, completions: list[Completion], at: Completion) -> str:
        """The sent prompt without the model's turns: its closings and generation prompts are taken off."""
        tree, pieces, decode = CompletionTree(completions), list[str](), TinyTokenizer().decode
        while at.certificate.prompt_source == "stitched" and at.parent_id is not None:
            piece = decode(at.prompt_suffix_ids.tolist())
            pieces.append(OWN + piece.removeprefix(END).removeprefix("\n").removesuffix(self.template.opening))
            at = tree[at.parent_id]
        number = completions.index(at)
        fields = _fields(self.calls[number])
        pieces.append(self.template.write(fields, None, prompt=False, own=False))
        return "".join(reversed(pieces))

    def begins_late(self, completions: list[Completion], at: Completion) -> bool:
        """Whether its chain begins with a prompt that has turns of the model already."""
        tree = CompletionTree(completions)
        while at.certificate.prompt_source == "stitched" and at.parent_id is not None:
            at = tree[at.parent_id]
        return any(message.role == "assistant" for message in self.calls[completions.index(at)].messages)

    def rendered_outside(self, number: int) -> str:
        return self.template.write(_fields(self.calls[number]), None, prompt=False, own=False)


def _fields(call: ModelCall) -> list[dict[str, Any]]:
    from gangline.models.engines.fields import messages_fields

    return template_messages(messages_fields(call.messages))


def _start(*, system: bool) -> list[Message]:
    user = Message("user", (Text("Go."),))
    return [Message("system", (Text("Be good."),)), user] if system else [user]


def _check(talk: Talk, completions: list[Completion]) -> None:
    for number, one in enumerate(completions):
        certificate = one.certificate
        if certificate.prompt_source != "stitched":
            assert certificate.as_rendered is None
            continue
        is_same = talk.sent_outside(completions, one) == talk.rendered_outside(number)
        # The thinking in turns that the engine rendered is not known: where it is stripped later, that is a difference.
        assert is_same or certificate.as_rendered is False, (number, certificate)
        if certificate.as_rendered is False:
            assert not is_same or talk.begins_late(completions, one), (number, certificate)
        assert (certificate.unlike_rendering is not None) == (certificate.as_rendered is False)
        if talk.not_as_rendered == "fall_back":
            assert certificate.as_rendered is not False


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    template=TEMPLATES,
    turns=st.lists(TURNS, min_size=2, max_size=6),
    system=st.booleans(),
    thinking=st.sampled_from(["follow_template", "retain"]),
    policy=st.sampled_from(["fall_back", "stitch"]),
    echoes=st.booleans(),
    user_after_result=st.booleans(),
)
def test_a_stitched_prompt_is_as_rendered_or_says_that_it_is_not(
    template: Template,
    turns: list[Turn],
    system: bool,
    thinking: str,
    policy: str,
    echoes: bool,
    user_after_result: bool,
) -> None:
    talk = Talk(template, thinking, policy, echoes, _start(system=system and template.system != "refused"))
    completions = asyncio.run(talk.run(turns, user_after_result=user_after_result))
    _check(talk, completions)


ROUND = Turn(calls=(("shell", '{"command": "ls"}'),))


@pytest.mark.parametrize("numbers", ["results", "calls", "first"])
def test_results_of_a_second_round_are_numbered_as_the_template_numbers_them(numbers: str) -> None:
    """Command R7B, Cohere and DeepSeek-R1-distill count or mark results over the whole conversation."""
    talk = Talk(Template(numbers=numbers), history=_start(system=True))
    completions = asyncio.run(talk.run([ROUND, ROUND, ROUND, Turn(text="ok")]))
    assert [one.certificate.prompt_source for one in completions] == ["engine", *["stitched"] * 3]
    assert all(one.certificate.as_rendered for one in completions[1:])
    _check(talk, completions)


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (Template(system="last_user"), [Turn(text="ok"), Turn(text="ok")]),  # Mistral-Nemo
        (Template(front="after_tool"), [ROUND, Turn(text="ok")]),  # verl's test of templates that are not prefix-stable
        (Template(front="after_user"), [ROUND, Turn(text="ok")]),
        (Template(last="newline"), [ROUND, ROUND]),  # Hermes 3
    ],
)
@pytest.mark.parametrize("policy", ["fall_back", "stitch"])
@pytest.mark.parametrize("thinking", ["follow_template", "retain"])
def test_a_template_that_writes_the_history_otherwise_is_followed_or_the_certificate_says_so(
    template: Template, turns: list[Turn], policy: str, thinking: str
) -> None:
    talk = Talk(template, thinking, policy, history=_start(system=True))
    completions = asyncio.run(talk.run([*turns, Turn(text="ok")]))
    _check(talk, completions)
    unlike = [one.certificate for one in completions if one.certificate.as_rendered is False]
    fallen = [one.certificate for one in completions if "another prompt" in (one.certificate.fallback or "")]
    assert bool(unlike) == (policy == "stitch")
    assert bool(fallen) == (policy == "fall_back")
    assert {one.cause for one in fallen if one.context == "diverged"} <= {"template_rewrites"}


async def test_a_template_without_a_plain_opening_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse a user's message alone, or without a generation prompt."""

    async def refused(_: Tails) -> TokenIds:
        raise EngineRefused("not without a system message", status=400)

    monkeypatch.setattr(Tails, "opening", refused)
    talk = Talk(Template(last="newline"), not_as_rendered="stitch", history=_start(system=True))
    completions = await talk.run([ROUND, ROUND, Turn(text="ok")])
    assert len(completions) == 3
    assert any(one.certificate.as_rendered is False for one in completions)
