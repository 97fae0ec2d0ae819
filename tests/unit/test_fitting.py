"""Messages of real clients, brought to real templates."""

from __future__ import annotations

import pytest

from gangline.domain.conversation import Message, Role, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineRefused
from gangline.models.engines.templates.fitting import fit
from gangline.models.engines.templates.probe import probe_template
from support.engines.templates import MISTRAL, TemplateEngine
from support.engines.tokenizers import template_text

TOOL = ToolDefinition(name="look", description="Look.", parameters={"type": "object", "properties": {}})
TEMPLATES = ("qwen3", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "qwen3_vl", "glm4moe", "nemotron_3_nano", "gptoss")
WITH_TOOLS = (*TEMPLATES, "llama3_1", "gemma4", "mistral")


def say(role: Role, text: str) -> Message:
    return Message(role, (Text(text),))


def call(*ids: str, text: str = "", thought: str = "") -> Message:
    said = (*((Thinking(thought),) if thought else ()), *((Text(text),) if text else ()))
    return Message("assistant", (*said, *(ToolCall(one, "look", "{}") for one in ids)))


def result(call_id: str, text: str) -> Message:
    return Message("tool", (ToolResult(call_id, (Text(text),)),))


ONE, TWO = "call_0123456789abcdef0000", "call_0123456789abcdef0001"
PLAIN: dict[str, tuple[Message, ...]] = {
    "codex": (say("developer", "alpha"), say("developer", "bravo"), say("user", "charlie"), say("user", "delta")),
    "claude code": (say("system", "alpha"), say("user", "bravo"), say("system", "charlie")),
    "a developer message alone": (say("developer", "alpha"),),
    "a greeting first": (say("assistant", "alpha"), say("user", "bravo")),
    "two replies": (say("user", "alpha"), say("assistant", "bravo"), say("assistant", "charlie"), say("user", "delta")),
    "late system before a user": (
        say("user", "alpha"),
        say("assistant", "bravo"),
        say("system", "charlie"),
        say("user", "delta"),
    ),
}
WITH_CALLS: dict[str, tuple[Message, ...]] = {
    "the node's ids": (say("user", "alpha"), call(ONE), result(ONE, "bravo")),
    "a reminder after results": (say("user", "alpha"), call(ONE), result(ONE, "bravo"), say("system", "charlie")),
    "text alongside results": (
        say("user", "alpha"),
        call(ONE),
        Message("user", (ToolResult(ONE, (Text("bravo"),)), Text("charlie"))),
    ),
    "an interrupted call": (say("user", "alpha"), call(ONE), say("user", "bravo")),
    "parallel calls": (say("user", "alpha"), call(ONE, TWO), result(ONE, "bravo"), result(TWO, "charlie")),
    "one of two results": (say("user", "alpha"), call(ONE, TWO), result(ONE, "bravo")),
    "a result of a call that was cut away": (say("user", "alpha"), result(ONE, "bravo")),
    "thinking, text and a call": (
        say("user", "alpha"),
        call(ONE, text="xray", thought="yankee"),
        result(ONE, "bravo"),
    ),
}


def template(name: str) -> TemplateEngine:
    return TemplateEngine(MISTRAL if name == "mistral" else template_text(name))


def asked_words(messages: tuple[Message, ...]) -> list[str]:
    """Texts that are not a reply's: templates may leave those out alongside calls."""
    pieces = [
        piece
        for message in messages
        if message.role != "assistant"
        for part in message.parts
        for piece in (part.content if isinstance(part, ToolResult) else (part,))
    ]
    return [piece.text for piece in pieces if isinstance(piece, Text)]


async def served(name: str, messages: tuple[Message, ...], *tools: ToolDefinition) -> str:
    engine = template(name)
    fitted, _ = fit(messages, await probe_template(engine))
    return engine.prompt(fitted, tools)


@pytest.mark.parametrize("name", [*WITH_TOOLS, "gemma", "deepseekv3"])
async def test_every_form_of_conversation_is_served_with_all_its_texts(name: str) -> None:
    for form, messages in PLAIN.items():
        prompt = await served(name, messages)
        words = [word for word in asked_words(messages) if name != "mistral" or word != "alpha"]
        places = [prompt.find(word) for word in words]  # Nemo writes the system text in the last user message
        assert -1 not in places and places == sorted(places), form  # noqa: PT018


@pytest.mark.parametrize("name", WITH_TOOLS)
async def test_every_form_of_calls_is_served_with_all_its_texts(name: str) -> None:
    for form, messages in WITH_CALLS.items():
        prompt = await served(name, messages, TOOL)
        places = [prompt.find(word) for word in asked_words(messages)]
        assert -1 not in places and places == sorted(places), form  # noqa: PT018


async def test_without_fitting_the_first_calls_of_codex_and_claude_code_are_refused() -> None:
    for form in ("codex", "claude code"):
        with pytest.raises(EngineRefused, match="System message must be at the beginning"):
            template("qwen3_5_nothink").prompt(PLAIN[form])


async def test_changes_are_named() -> None:
    facts = await probe_template(template("qwen3_5_nothink"))
    fitted, changes = fit(PLAIN["codex"], facts)
    assert changes == {"joined_system": 2}
    assert fitted == (say("developer", "alpha\n\nbravo"), say("user", "charlie"), say("user", "delta"))
    fitted, changes = fit(PLAIN["claude code"], facts)
    assert changes == {"late_system_in_user": 1}
    assert fitted == (say("system", "alpha"), say("user", "bravo\n\ncharlie"))


async def test_a_late_system_text_stands_before_the_user_message_that_follows_it() -> None:
    facts = await probe_template(template("qwen3_6"))
    fitted, _ = fit(PLAIN["late system before a user"], facts)
    assert fitted[-1] == say("user", "charlie\n\ndelta")


async def test_the_engines_id_goes_up_where_the_template_prints_ids() -> None:
    engine = template("mistral")
    facts = await probe_template(engine)
    messages = WITH_CALLS["the node's ids"]
    fitted, changes = fit(messages, facts, {ONE: "abcDEF123"})
    assert engine.prompt(fitted).count("abcDEF123") == 2
    assert changes == {}
    assert fit(messages, await probe_template(template("qwen3")), {ONE: "abcDEF123"})[0] is messages
