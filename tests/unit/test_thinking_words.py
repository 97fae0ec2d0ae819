"""What clients say of thinking, in each dialect, and what of it a template is told: a grid of words and templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.conversation import Message, ModelCall, Text, ThinkingWish
from gangline.domain.errors import InvalidRequest
from gangline.domain.node_views import TemplateFacts
from gangline.domain.placement import Allowed, Needs, Offer, needs_of
from gangline.domain.task import CaptureSpec, TaskRequest
from gangline.models.engines.templates.fitting import in_template_words, unmet_wishes, with_task_arguments
from gangline.node.capture.placing import branch_key
from gangline.settings.node import NodeSettings
from gangline.wire.dialects.anthropic.dialect import AnthropicDialect
from gangline.wire.dialects.chat.dialect import ChatDialect
from gangline.wire.dialects.contract import RawRequest
from gangline.wire.dialects.google.dialect import GoogleDialect
from gangline.wire.dialects.responses.dialect import ResponsesDialect

USER = {"role": "user", "content": "x"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [USER]},
    "responses": {"model": "m", "input": "x"},
    "anthropic": {"model": "m", "max_tokens": 9, "messages": [USER]},
    "google": {"contents": [{"role": "user", "parts": [{"text": "x"}]}]},
}
DIALECTS = {
    "chat": ChatDialect(),
    "responses": ResponsesDialect(),
    "anthropic": AnthropicDialect(),
    "google": GoogleDialect(),
}


def call_of(dialect: str, **fields: Any) -> ModelCall:
    body = json.dumps(BODIES[dialect] | fields).encode()
    return DIALECTS[dialect].parse_call(RawRequest(body=body, params={"model": "m"}))


def google(**config: Any) -> dict[str, Any]:
    return {"generationConfig": {"thinkingConfig": config}}


NOTHING = ThinkingWish()
ON, OFF = ThinkingWish(is_on=True), ThinkingWish(is_on=False)
WORDS: list[tuple[str, dict[str, Any], ThinkingWish]] = [
    ("chat", {}, NOTHING),
    ("chat", {"enable_thinking": True}, ON),
    ("chat", {"enable_thinking": False}, OFF),
    ("chat", {"enable_thinking": None}, NOTHING),
    ("chat", {"thinking": {"type": "enabled"}}, ON),
    ("chat", {"thinking": {"type": "disabled"}}, OFF),
    ("chat", {"thinking": {"type": "auto"}}, NOTHING),
    ("chat", {"thinking": {}}, NOTHING),
    ("chat", {"thinking": False}, OFF),
    ("chat", {"reasoning_effort": "none"}, OFF),
    ("chat", {"reasoning_effort": "low"}, ThinkingWish(is_on=True, effort="low")),
    ("chat", {"reasoning_effort": "HIGH"}, ThinkingWish(is_on=True, effort="high")),
    ("chat", {"reasoning_effort": "default"}, NOTHING),
    ("chat", {"reasoning_effort": None}, NOTHING),
    ("chat", {"reasoning": {"effort": "minimal"}}, ThinkingWish(is_on=True, effort="minimal")),
    ("chat", {"reasoning": {"enabled": False}}, OFF),
    ("chat", {"reasoning": {"max_tokens": 100}}, NOTHING),
    ("chat", {"enable_thinking": False, "reasoning_effort": "high"}, OFF),
    ("responses", {}, NOTHING),
    ("responses", {"reasoning": None}, NOTHING),
    ("responses", {"reasoning": {"summary": "auto"}}, NOTHING),
    ("responses", {"reasoning": {"effort": None}}, NOTHING),
    ("responses", {"reasoning": {"effort": "none"}}, OFF),
    ("responses", {"reasoning": {"effort": "xhigh", "summary": "auto"}}, ThinkingWish(is_on=True, effort="xhigh")),
    ("anthropic", {}, NOTHING),
    ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, ON),
    ("anthropic", {"thinking": {"type": "adaptive"}}, ON),
    ("anthropic", {"thinking": {"type": "between_tools"}}, ON),
    ("anthropic", {"thinking": {"type": "disabled"}}, OFF),
    ("anthropic", {"output_config": {"effort": "max"}}, ThinkingWish(effort="max")),
    ("google", {}, NOTHING),
    ("google", google(includeThoughts=True), NOTHING),
    ("google", google(thinkingBudget=0), OFF),
    ("google", google(thinkingBudget=-1), ON),
    ("google", google(thinkingBudget=512), ON),
    ("google", google(thinkingLevel="THINKING_LEVEL_UNSPECIFIED"), NOTHING),
    ("google", google(thinkingLevel="LOW"), ThinkingWish(is_on=True, effort="low")),
    ("google", google(thinking_level="minimal"), ThinkingWish(is_on=True, effort="minimal")),
    ("google", google(thinkingBudget=0, thinkingLevel="HIGH"), OFF),
]


@pytest.mark.parametrize(("dialect", "said", "wish"), WORDS, ids=lambda value: str(value)[:60])
def test_each_dialects_words_are_one_wish(dialect: str, said: dict[str, Any], wish: ThinkingWish) -> None:
    call = call_of(dialect, **said)
    assert call.thinking == wish
    assert call.template_kwargs == {}
    assert not {"reasoning.effort", "reasoning_effort", "output_config.effort", "thinking"} & set(call.dropped)


QWEN = TemplateFacts(thinking_on={"enable_thinking": True}, thinking_off={"enable_thinking": False}, efforts={})
GRANITE = TemplateFacts(thinking_on={"thinking": True}, thinking_off={"thinking": False}, efforts={})
GPT_OSS = TemplateFacts(thinking_on={}, thinking_off={}, efforts={"reasoning_effort": ("low", "medium", "high")})
HY3 = TemplateFacts(thinking_on={}, thinking_off={}, efforts={"reasoning_effort": ("low", "high")})
PLAIN = TemplateFacts(thinking_on={}, thinking_off={}, efforts={})
UNKNOWN = TemplateFacts()
CAN_NOT = "thinking {} (the template cannot switch it)"
NO_EFFORT = "effort {} (the template does not take it)"

TOLD: list[tuple[TemplateFacts, ThinkingWish, dict[str, Any], list[str]]] = [
    *((facts, NOTHING, {}, list[str]()) for facts in (QWEN, GRANITE, GPT_OSS, HY3, PLAIN, UNKNOWN)),
    (QWEN, ON, {"enable_thinking": True}, []),
    (QWEN, OFF, {"enable_thinking": False}, []),
    (QWEN, ThinkingWish(is_on=True, effort="low"), {"enable_thinking": True}, [NO_EFFORT.format("low")]),
    (GRANITE, ON, {"thinking": True}, []),
    (GRANITE, OFF, {"thinking": False}, []),
    (GPT_OSS, ON, {}, [CAN_NOT.format("on")]),
    (GPT_OSS, OFF, {}, [CAN_NOT.format("off")]),
    (GPT_OSS, ThinkingWish(effort="medium"), {"reasoning_effort": "medium"}, []),
    (GPT_OSS, ThinkingWish(effort="minimal"), {"reasoning_effort": "low"}, []),
    (GPT_OSS, ThinkingWish(effort="xhigh"), {"reasoning_effort": "high"}, []),
    (GPT_OSS, ThinkingWish(effort="ultra"), {}, [NO_EFFORT.format("ultra")]),
    (HY3, ThinkingWish(effort="medium"), {"reasoning_effort": "high"}, []),  # its template refuses `medium`
    (PLAIN, OFF, {}, [CAN_NOT.format("off")]),
    (UNKNOWN, OFF, {"enable_thinking": False}, []),
    (UNKNOWN, ON, {}, [CAN_NOT.format("on")]),
    (UNKNOWN, ThinkingWish(effort="low"), {}, [NO_EFFORT.format("low")]),
]


@pytest.mark.parametrize(("facts", "wish", "arguments", "dropped"), TOLD)
def test_a_template_is_told_what_it_has_words_for(
    facts: TemplateFacts, wish: ThinkingWish, arguments: dict[str, Any], dropped: list[str]
) -> None:
    call = ModelCall(dialect="d", model="m", messages=(Message("user", (Text("x"),)),), thinking=wish)
    told = in_template_words(call, facts)
    assert (told.template_kwargs, unmet_wishes(told)) == (arguments, dropped)


def test_a_clients_own_arguments_stand_before_its_wish() -> None:
    call = call_of("chat", chat_template_kwargs={"enable_thinking": False}, reasoning_effort="high")
    assert in_template_words(call, QWEN).template_kwargs == {"enable_thinking": False}
    other = call_of("chat", chat_template_kwargs={"date_string": "1 Jan"}, reasoning_effort="high")
    assert in_template_words(other, QWEN).template_kwargs == {"date_string": "1 Jan", "enable_thinking": True}


def test_a_tasks_arguments_replace_the_clients_and_the_rest_stays() -> None:
    call = call_of("chat", chat_template_kwargs={"enable_thinking": True, "a": 1}, reasoning_effort="high")
    told = with_task_arguments(call, {"enable_thinking": False})
    assert told.template_kwargs == {"enable_thinking": False, "a": 1}
    assert told.template_wished == {"enable_thinking": True, "thinking_wish": {"is_on": True, "effort": "high"}}
    assert in_template_words(told, GPT_OSS).template_kwargs["reasoning_effort"] == "high"
    assert with_task_arguments(call, {}) is call
    agreed = with_task_arguments(call_of("chat", chat_template_kwargs={"enable_thinking": False}), told.template_kwargs)
    assert agreed.template_wished == {}


def test_other_words_are_another_branch_and_no_words_the_one_that_it_was() -> None:
    plain = branch_key(call_of("chat"))
    keys = {branch_key(call_of("chat", **said)) for dialect, said, _ in WORDS if dialect == "chat"}
    assert plain in keys
    assert len(keys) == 6  # nothing, on, off, and the efforts low, high and minimal
    assert branch_key(with_task_arguments(call_of("chat"), {"enable_thinking": False})) != plain


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "low", "thinking": True, "thinking_budget": 512},
        {"low_effort": True, "x": 0.5, "names": ["a", "b"]},
    ],
)
def test_a_task_may_choose_arguments_and_they_stay_as_they_are(arguments: dict[str, Any]) -> None:
    capture = CaptureSpec(template_kwargs=arguments)
    assert capture.template_kwargs == arguments
    assert [type(value) for value in capture.template_kwargs.values()] == list(map(type, arguments.values()))
    again = CaptureSpec.model_validate_json(capture.model_dump_json())
    assert again == capture


NEVER = ["tools", "messages", "documents", "chat_template", "add_generation_prompt", "tokenize", "bos_token", "images"]


@pytest.mark.parametrize("name", [*NEVER, "return_dict", "_private", "a b", "", "x" * 65, "strftime_now"])
def test_what_belongs_to_the_call_is_nobodys_choice(name: str) -> None:
    with pytest.raises(ValidationError, match="template_kwargs"):
        CaptureSpec(template_kwargs={name: True})
    with pytest.raises(ValidationError, match="template_kwargs"):
        NodeSettings(template_kwargs=(name or " , x y",))
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        call_of("chat", chat_template_kwargs={name: True})


@pytest.mark.parametrize("value", [None, {"a": 1}, [1], 2**63, float("nan"), "x" * 5000, "\ud83d"])
def test_a_value_that_no_record_could_hold_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="template_kwargs"):
        CaptureSpec(template_kwargs={"thinking": value})


def test_names_that_the_operator_does_not_allow_are_refused_by_name() -> None:
    task = TaskRequest.model_validate(
        {
            "instruction": "x",
            "agent": {"harness": "shell", "settings": {"command": "true"}},
            "capture": {"template_kwargs": {"date_string": "1 Jan 2026", "enable_thinking": False}},
        }
    )
    assert needs_of(task) == Needs(
        runtimes=("sandbox",), networks=("proxy",), template_kwargs=("date_string", "enable_thinking")
    )
    (lack,) = Offer(runtimes=("sandbox",)).lacks(needs_of(task))
    assert "`date_string`" in lack
    assert "--template-kwargs" in lack
    with pytest.raises(InvalidRequest, match="`date_string` is refused"):
        Allowed().check_template(task.capture.template_kwargs)
    allowed = NodeSettings(template_kwargs=("date_string,enable_thinking",)).allowed()
    allowed.check_template(task.capture.template_kwargs)
    with pytest.raises(InvalidRequest, match="`thinking` is refused"):
        allowed.check_template({"thinking": True})
