"""An agent's run as a response: whatever was recorded, the caller has nothing to carry out, and no token is moved."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.conversation import Image, Message, Text, Thinking, ToolCall, ToolResult
from gangline.domain.errors import HarnessError, InvalidRequest
from gangline.domain.task import TaskRequest
from gangline.interop.agent_api.app import read_task, response_of
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.shared_prefixes import with_whole_prompts
from gangline.tasks.check_rows.call_forms import nemo_gym_entries
from support.strategies import completion_trees, session_result

TEMPLATE: dict[str, Any] = {
    "instruction": "Be exact.",
    "capture": {"token_texts": True, "sampling": {"top_k": {"override": 5}, "temperature": {"override": 1.0}}},
    "num_samples": 8,
}


PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def body(**fields: Any) -> bytes:
    return json.dumps({"input": "Do it.", **fields}).encode()


def test_a_request_is_the_templates_task_with_its_own_words_and_sampling() -> None:
    said = [{"role": "developer", "content": "Think."}, {"role": "user", "content": [{"type": "text", "text": "Go."}]}]
    asked = body(input=said, instructions="Be kind.", temperature=0, max_output_tokens=9, seed=3, tools=[])
    task = read_task(asked, TEMPLATE)
    assert task["instruction"] == "Be exact.\n\nBe kind.\n\nThink.\n\nGo."
    assert task["num_samples"] == 1
    rules = {"top_k": 5, "temperature": 0, "max_tokens": 9}
    assert task["capture"] == {
        "token_texts": True,
        "seed": 3,
        "sampling": {name: {"override": value} for name, value in rules.items()},
    }
    assert TEMPLATE["capture"]["sampling"]["temperature"] == {"override": 1.0}
    TaskRequest.model_validate({**task, "agent": {"harness": "native"}})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (b"{", "JSON"),
        (b'{"model": "m"}', "input"),
        (b"\xff", "JSON"),
        (body(stream=True), "stream: an agent's run is answered whole"),
        (body(background=True), "background"),
        (body(stop="x"), "stop: "),
        (body(tools=[{"type": "web_search"}]), "tools"),
        (body(tools=[{"type": "function", "name": "f", "parameters": {}}]), "tools: the agent has its own tools"),
        (body(text={"format": {"type": "json_object"}}), "text: "),
        (body(reasoning={"effort": "high"}), "reasoning.effort: nothing of an agent"),
        (body(wibble=1), "wibble: nothing of an agent"),
        (body(temperature="hot"), "temperature"),
        (body(input=[{"role": "assistant", "content": "I did."}]), "input: .*not with an assistant's words"),
        (body(input=[{"role": "user", "content": [PICTURE]}]), "input: .*text alone"),
        (body(input=[{"role": "user", "content": 3}]), r"input\[0\]"),
        (body(input=[{"role": "user", "content": ""}]), "there is no text"),
    ],
)
def test_what_no_agent_can_be_told_is_refused(asked: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_task(asked, TEMPLATE)


def test_values_that_mean_nothing_change_nothing() -> None:
    plain = read_task(body(), TEMPLATE)
    more = body(
        text={"format": {"type": "text"}}, tools=[], stream=False, parallel_tool_calls=True, tool_choice="auto",
        store=True, model="m", metadata={"a": "b"}, user="me", truncation="auto", include=[], background=False,
    )  # fmt: skip
    assert read_task(more, TEMPLATE) == plain


IMAGE = Image("data:image/png;base64,AA==")
texts = st.builds(Text, st.text(max_size=3))
calls = st.builds(ToolCall, st.sampled_from(["a", "b", "c"]), st.just("look"), st.just("{}"))
results = st.builds(ToolResult, st.sampled_from(["a", "b", "c"]), st.tuples(texts | st.just(IMAGE)))
replies = st.builds(
    Message, st.just("assistant"), st.lists(texts | st.builds(Thinking, st.text()) | calls, max_size=4).map(tuple)
)
between = st.builds(Message, st.just("tool"), st.lists(results, min_size=1, max_size=3).map(tuple))
between |= st.builds(Message, st.just("user"), st.lists(texts | st.just(IMAGE), min_size=1, max_size=2).map(tuple))


def assert_nothing_is_to_be_done(items: list[dict[str, Any]]) -> None:
    asked = {item["call_id"] for item in items if item["type"] == "function_call"}
    assert asked <= {item["call_id"] for item in items if item["type"] == "function_call_output"}
    assert (items[-1]["type"], items[-1]["role"]) == ("message", "assistant")
    ids = [item["id"] for item in items if "id" in item]
    assert len(set(ids)) == len(ids)


@given(st.lists(replies | between, max_size=8))
def test_whatever_an_agent_said_the_caller_has_nothing_to_carry_out(said: list[Message]) -> None:
    result = session_result()
    assert result.trajectory is not None
    traces = [msgspec.structs.replace(one, response_messages=tuple(said)) for one in result.trajectory.traces]
    told = response_of(
        msgspec.structs.replace(result, trajectory=msgspec.structs.replace(result.trajectory, traces=tuple(traces))),
        0.0,
    )
    assert_nothing_is_to_be_done(told["output"])
    if any(IMAGE in (*part.content,) for one in said for part in one.parts if isinstance(part, ToolResult)):
        assert told["metadata"]["replies_with_tokens"] == "0"


@given(completion_trees(), st.sampled_from(["split", "splice"]))
def test_the_caller_has_nothing_to_carry_out_and_every_token_is_where_it_was(sample: Any, on_divergence: str) -> None:
    builder = PrefixMergingBuilder(PrefixMergingConfig.model_validate({"on_divergence": on_divergence}))
    built = builder.build(sample.tree, session_id="session-1", task_id="task-1")
    result = msgspec.structs.replace(session_result(), trajectory=built)
    if not built.traces:
        with pytest.raises(HarnessError):
            response_of(result, 0.0)
        return
    told = response_of(result, 0.0)
    assert_nothing_is_to_be_done(told["output"])
    assert result.trajectory is not None
    streams = [
        one.prompt_ids.tolist() + one.response_ids.tolist() for one in with_whole_prompts(result.trajectory.traces)
    ]
    for item in told["output"]:
        if "generation_token_ids" in item:
            ids = item["prompt_token_ids"] + item["generation_token_ids"]
            assert any(stream[: len(ids)] == ids for stream in streams)
            assert len(item["generation_log_probs"]) == len(item["generation_token_ids"])
    json.dumps(told)


@pytest.mark.parametrize("changed", [{"trajectory": None}, {"outcome": "cancelled"}, {"outcome": "infra_error"}])
def test_without_a_run_there_is_no_answer(changed: dict[str, Any]) -> None:
    with pytest.raises(HarnessError, match="no run to answer with"):
        response_of(session_result(**changed), 0.0)


def test_a_run_that_only_its_grader_failed_is_answered() -> None:
    told = response_of(session_result(outcome="infra_error", run_outcome="completed", reward=None), 0.0)
    assert (told["status"], told["metadata"]["outcome"]) == ("completed", "completed")
    assert "reward" not in told["metadata"]


def test_tokens_that_are_left_out_can_be_counted() -> None:
    """The sample's last turn is in its own trace, and so are the sub-agent's."""
    told = response_of(session_result(), 0.0)
    record = {"responses_create_params": {"input": "x"}, "response": told, "reward": 1.0}
    found = [one for sample in nemo_gym_entries(record, 1) for one in sample.findings]
    assert [one.kind for one in found] == ["tokens_dropped"]
