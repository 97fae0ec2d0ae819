"""A template's facts in words: every fact is said, and what a template lacks comes with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.domain.node_views import TemplateFacts
from gangline.domain.task import TaskRequest
from gangline.domain.template_findings import features, lacks, lacks_of_tasks

SAID_ELSEWHERE = {"tokenizer_digest", "template_digest", "thinking_off", "keeps_thinking_with", "refuses_tools"}
VALUES: dict[str, list[Any]] = {
    "call_ids": ["nine"],
    "thinking_on": [{"enable_thinking": True}, {}],
    "efforts": [{"reasoning_effort": ("low",)}],
    "refuses": ["No."],
    "refuses_some_tools": ["No."],
}


@pytest.mark.parametrize("name", [name for name in TemplateFacts.__struct_fields__ if name not in SAID_ELSEWHERE])
def test_every_fact_is_said(name: str) -> None:
    plain = features(TemplateFacts())
    assert any(features(TemplateFacts(**{name: value})) != plain for value in VALUES.get(name, [True, False]))


LACKS: list[tuple[dict[str, Any], str]] = [
    ({"refuses": "no template"}, "cannot be served"),
    ({"refuses_tools": "Conversation roles must alternate"}, "refuses a plain conversation with a tool call"),
    ({"refuses_some_tools": "no description"}, "refuses tools that clients offer"),
    ({"renders_tools": False}, "does not render tools"),
    ({"renders_tools": True, "reads_tools": False}, "`parsers`"),
    ({"keeps_thinking": False}, "each user's turn begins a new row"),
    ({"keeps_thinking": False, "keeps_thinking_with": {"preserve_thinking": True}}, '{"preserve_thinking": true}'),
]


@pytest.mark.parametrize(("facts", "words"), LACKS)
def test_what_a_template_lacks_is_said_with_what_to_do(facts: dict[str, Any], words: str) -> None:
    (lack,) = lacks(TemplateFacts(**facts))
    assert words in lack


def test_a_template_that_lacks_nothing_or_is_unknown_says_nothing() -> None:
    assert lacks(TemplateFacts()) == []
    assert lacks(TemplateFacts(keeps_thinking=False, renders_current_thinking=False)) == []
    assert lacks(TemplateFacts(renders_tools=True, reads_tools=True, keeps_thinking=True)) == []


def task_of(**arguments: Any) -> TaskRequest:
    agent = {"harness": "shell", "settings": {"command": "true"}}
    body = {"instruction": "x", "agent": agent, "capture": {"template_kwargs": arguments}}
    return TaskRequest.model_validate(body)


def test_an_argument_that_no_template_takes_is_said_once() -> None:
    takes_thinking = TemplateFacts(thinking_on={"thinking": True}, efforts={})
    (line,) = lacks_of_tasks([takes_thinking], [task_of(enable_thinking=False), task_of(enable_thinking=True)])
    assert "enable_thinking changes nothing" in line
    assert "it takes thinking" in line
    assert lacks_of_tasks([takes_thinking], [task_of(thinking=False)]) == []
    assert lacks_of_tasks([takes_thinking], [task_of(preserve_thinking=True)]) == []
    assert lacks_of_tasks([TemplateFacts()], [task_of(enable_thinking=False)]) == []
