"""What a client does to its conversation, as the records of its session tell it, with an engine behind the proxy."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.domain.completion import Completion, Lineage
from gangline.domain.conversation import message_text
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from support.node.proxy import Proxied, proxied

COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}}
SHELL: Any = {"type": "function", "function": {"name": "shell", "parameters": COMMAND}}
SCRIPT = {
    "rules": [{"turn": 0, "tool_calls": [{"run": "ls"}]}, {"turn": 1, "text": "There is a file, and it is empty."}],
    "default": {"text": "As you like."},
}


def _system(now: str) -> dict[str, Any]:
    return {"role": "system", "content": f"You are an agent. Current time: {now}.\nBe brief."}


async def _say(running: Proxied, messages: list[Any], **fields: Any) -> list[Any]:
    """The history after the reply and what a client answers to it."""
    fields = {"model": "m", "messages": messages, "tools": [SHELL]} | fields
    async with running.client() as client:
        reply = await client.chat.completions.create(**fields)
    message = reply.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "out"} for call in message.tool_calls or []]
    return [*messages, message.model_dump(exclude_none=True), *(results or [{"role": "user", "content": "And now?"}])]


def _last(running: Proxied) -> Completion:
    return running.journal.completions[-1]


@pytest.mark.parametrize("tier", ["auto", "observe"])
async def test_the_time_in_a_system_message_breaks_no_context(tier: Any) -> None:
    async with proxied({"default": {"text": "As you like."}}, tier=tier) as running:
        history = await _say(running, [_system("10:00:01"), {"role": "user", "content": "What is here?"}])
        for now in ("10:00:09", "10:00:17"):
            history = await _say(running, [_system(now), *history[1:]])
        first, second, third = running.journal.completions
        assert [one.certificate.context for one in (first, second, third)] == ["first", "exact", "exact"]
        assert [one.lineage.relation for one in (first, second, third)] == ["root", "continuation", "continuation"]
        told = [one.metadata.get("volatile_system_text") for one in (first, second, third)]
        assert told == [None, {"0": ["Current time: 10:00:09."]}, {"0": ["Current time: 10:00:17."]}]
        sent = running.session.tree.messages(third)[0]
        assert "10:00:01" in message_text(sent)
        (trace,) = PrefixMergingBuilder().build(running.session.tree, session_id="s1", task_id="t").traces
        assert len(trace.spans) == 3


async def test_without_rules_the_time_makes_every_call_a_changed_one() -> None:
    async with proxied(SCRIPT, volatile_system_text=()) as running:
        history = await _say(running, [_system("10:00:01"), {"role": "user", "content": "What is here?"}])
        await _say(running, [_system("10:00:09"), *history[1:]])
        completion = _last(running)
        assert (completion.parent_id, completion.certificate.context) == (None, "first")
        assert completion.lineage == Lineage(
            relation="changed", origin_id="c1-000001", cause="system_changed", first_change=0
        )


async def test_an_edited_result_is_stitched_to_what_stands_before_it_and_told() -> None:
    async with proxied(SCRIPT) as running:
        history = await _say(running, [{"role": "user", "content": "What is here?"}])
        history = await _say(running, history)
        history[2] = history[2] | {"content": "(cleared)"}
        await _say(running, history)
        completion = _last(running)
        assert (completion.parent_id, completion.certificate.prompt_source) == ("c1-000001", "stitched")
        assert completion.certificate.context == "exact"
        assert completion.lineage == Lineage(
            relation="changed", origin_id="c1-000002", cause="history_edited", first_change=2
        )


async def test_a_node_that_restarts_tells_lineage_on_as_before() -> None:
    async with proxied(SCRIPT) as running:
        history = await _say(running, [{"role": "user", "content": "What is here?"}])
        history = await _say(running, history)
        kept = running.journal.completions
    async with proxied(SCRIPT, completions=kept) as running:
        await _say(running, history[:3])
        assert _last(running).lineage == Lineage(relation="sibling", origin_id="c1-000002")
        await _say(running, history, tools=[])
        assert _last(running).lineage == Lineage(relation="changed", origin_id="c1-000003", cause="tools_changed")


async def test_tools_are_stored_once_a_branch_and_hold_for_its_calls() -> None:
    async with proxied(SCRIPT) as running:
        history = await _say(running, [{"role": "user", "content": "What is here?"}])
        await _say(running, history)
        await _say(running, history, tools=[SHELL, SHELL | {"function": {"name": "look"}}])
        assert [len(one.tools) for one in running.journal.completions] == [1, 0, 2]
        tree = running.session.tree
        assert [[tool.name for tool in tree.tools(one)] for one in tree] == [["shell"], ["shell"], ["shell", "look"]]
        builder = PrefixMergingBuilder()
        traces = builder.build(tree, session_id="s1", task_id="t").traces
        assert [[tool.name for tool in trace.tools] for trace in traces] == [["shell"], ["shell", "look"]]
