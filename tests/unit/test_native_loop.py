"""The loop of the agent in the node: what it takes for an answer, what it reports, and when it gives up."""

from __future__ import annotations

import pytest

from gangline.agents.harnesses.native.adapter import NativeHarness
from gangline.agents.harnesses.native.config import NativeConfig
from gangline.agents.harnesses.native.model import CalledTool, ModelReply
from gangline.domain.errors import ActionServerFailed, InvalidRequest, NotFound, RuntimeFailed, UnknownPlugin
from gangline.settings import plugins
from support.node.native_agents import EchoTool, FailingTool, SayTool, called, conversed, said

CUT = said("I was about to", cut_off=True)
UNREAD = said('<tool_call>{"name": "echo", "argum</tool_call>', unread=True)
ACTS = said("", called("a1"))


async def test_a_reply_without_calls_is_the_answer() -> None:
    ended = await conversed([ACTS, said("42")])
    assert (ended.answer, ended.reports) == ("42", [])
    assert ended.last[1:] == [
        ACTS.message,
        {"role": "tool", "tool_call_id": "a1", "content": '{"text": "x"}'},
    ]


async def test_arguments_reach_the_tool_as_the_model_wrote_them() -> None:
    echo = EchoTool()
    wrote = {"text": "straße", "unknown": [1, None, {"a": 1.5}], "times": "3"}
    await conversed([said("", called("a1", "echo", wrote)), said("42")], [echo])
    assert echo.given == [wrote]
    assert (echo.num_opened, echo.num_closed) == (1, 1)


async def test_a_reply_that_was_cut_off_is_no_answer() -> None:
    ended = await conversed([CUT, said("42")])
    assert ended.answer == "42"
    assert ended.last[1] == CUT.message
    (report,) = ended.reports
    assert "cut off" in report
    assert "be brief" in report


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (said("", called("a1"), cut_off=True), "The tool calls in it were done."),
        (said("", called("a1"), called("a2", "echo", '{"tex'), cut_off=True), "could not be read and was not done"),
        (said("<tool_call>{", cut_off=True, unread=True), "could not be read and was not done"),
        (said("Hm", cut_off=True), "nothing was done"),
    ],
)
async def test_a_cut_says_what_became_of_the_calls(reply: ModelReply, told: str) -> None:
    ended = await conversed([reply, said("42")])
    (report,) = ended.reports
    assert told in report
    assert len(ended.results) == len(reply.calls)


async def test_a_call_that_the_engine_could_not_read_is_reported() -> None:
    ended = await conversed([UNREAD, said("42")])
    assert ended.answer == "42"
    assert ended.last[1] == UNREAD.message
    assert "could not be read" in ended.reports[0]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "echo", "arguments": {"text": "x"}}',
        'I look first.\n\n```json\n{"name": "echo", "parameters": {"text": "x"}}\n```',
        '[{"name": "echo", "arguments": {"text": "x"}}]',
        '{"type": "function", "function": {"name": "echo", "arguments": "{}"}}',
        '{"name": "echo", "arguments": {"text": "brok',
    ],
)
async def test_a_call_without_its_tags_is_reported_and_no_answer(text: str) -> None:
    echo = EchoTool()
    ended = await conversed([said(text), said("42")], [echo])
    assert (ended.answer, echo.given) == ("42", [])
    (report,) = ended.reports
    assert "a tool call that could not be read" in report
    given_up = await conversed([said(text)] * 4)
    assert given_up.answer is None


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "fly", "arguments": {}}',
        '{"name": "echo", "age": 7}',
        'Nobody needs {"name": "echo", "arguments": {}} for that.',
    ],
)
async def test_other_json_is_an_answer(text: str) -> None:
    assert (await conversed([said(text)])).answer == text


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (called("a1", "echo", '{"text": '), "its arguments are not JSON"),
        (called("a1", "echo", "[1]"), "its arguments are not a JSON object"),
        (called("a1", "echo", "\ud800"), "its arguments are not JSON"),
        (called("a1", "echo", "[" * 100_000), "its arguments are not JSON"),
        (called("a1", "echo", ""), "it lacks text. The arguments of echo: text (required), times."),
        (called("a1", "echo", {"times": 3}), "it lacks text. The arguments of echo: text (required), times."),
        (called("a1", "fly"), "there is no tool 'fly'; there are: echo, fail"),
        (called("", "echo"), "it has no id"),
    ],
)
async def test_a_call_that_cannot_be_done_as_written_is_answered(call: CalledTool, told: str) -> None:
    ended = await conversed([said("", call), said("42")], [FailingTool()])
    assert (ended.answer, ended.reports) == ("42", [])
    assert ended.results[0].startswith("error: this call was not done: " + told)


async def test_an_id_that_was_used_before_is_refused() -> None:
    echo = EchoTool()
    ended = await conversed([ACTS, said("", called("a1"), called("b1")), said("42")], [echo])
    assert "was used by an earlier call" in ended.results[1]
    assert [message.get("tool_call_id") for message in ended.last] == [None, None, "a1", None, "a1", "b1"]
    assert len(echo.given) == 2


@pytest.mark.parametrize(
    "error", [None, NotFound("no such file"), ActionServerFailed("it is gone"), InvalidRequest("a NUL")]
)
async def test_the_errors_of_a_tool_are_results(error: Exception | None) -> None:
    ended = await conversed([said("", called("a1", "fail")), said("42")], [FailingTool(error)])
    assert ended.answer == "42"
    assert ended.results[0].startswith("error: ")


async def test_a_runtime_that_is_gone_is_not_the_models_doing() -> None:
    fails = FailingTool(RuntimeFailed("the sandbox is gone"))
    with pytest.raises(RuntimeFailed):
        await conversed([said("", called("a1", "fail"))], [fails])
    assert fails.num_closed == 1


async def test_calls_side_by_side_are_done_in_order_and_none_after_a_submission() -> None:
    echo = EchoTool()
    first = said("", called("a1", "echo", {"text": "1"}), called("a2", "echo", {"text": "2"}))
    last = said("", called("b1"), called("b2", "submit", {"text": "42"}), called("b3"))
    ended = await conversed([first, last], [echo, SayTool()], finish="submit")
    assert ended.answer == "42"
    assert [given["text"] for given in echo.given] == ["1", "2", "x"]


async def test_an_empty_submission_stands_for_the_text_beside_it() -> None:
    last = said("It is done.", called("b1", "submit", {"text": ""}))
    assert (await conversed([last], [SayTool()], finish="submit")).answer == "It is done."


async def test_only_a_submission_ends_a_session_that_submits() -> None:
    replies = [said("42"), ACTS, said("42?"), said("", called("b1", "submit", {"text": "43"}))]
    ended = await conversed(replies, [SayTool()], finish="submit", max_reminders=1)
    assert ended.answer == "43"
    assert ["call submit" in report for report in ended.reports] == [True, True]


async def test_after_too_many_reminders_the_reply_is_the_answer() -> None:
    replies = [said("41"), said("42"), said("43")]
    ended = await conversed(replies, [SayTool()], finish="submit", max_reminders=2)
    assert (ended.answer, ended.error, len(ended.reports)) == ("43", None, 2)


@pytest.mark.parametrize("last", [CUT, UNREAD, said("", called("a9", "fly"))], ids=["cut off", "unread", "unreadable"])
async def test_a_reply_that_cannot_be_an_answer_never_becomes_one(last: ModelReply) -> None:
    replies = [said("", called("a1", "fly")), UNREAD, last, said("too late")]
    ended = await conversed(replies, max_reminders=2)
    assert ended.answer is None
    assert "did nothing for 3 turns in a row" in (ended.error or "")


async def test_a_turn_that_acts_begins_the_count_anew() -> None:
    replies = [CUT, said("", called("a1"), called("a2", "fly")), UNREAD, said("42")]
    assert (await conversed(replies, max_reminders=1)).answer == "42"


@pytest.mark.parametrize(
    ("settings", "kind", "told"),
    [
        ({"tools": ["shel"]}, UnknownPlugin, "unknown tool 'shel'. Did you mean 'shell'?"),
        ({"tools": [{"name": "python", "settings": {"no": 1}}]}, InvalidRequest, "tool 'python': no: "),
        ({"tools": ["shell", "shell"]}, InvalidRequest, "'shell' is there twice"),
        ({"tools": ["submit"]}, InvalidRequest, "finish: submit"),
        ({"finish": "later"}, InvalidRequest, "finish: "),
        ({"max_reminders": -1}, InvalidRequest, "max_reminders: "),
    ],
)
def test_wrong_settings_are_refused_on_submission(
    settings: dict[str, object], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told.replace("?", r"\?")):
        plugins.make_harness("native", settings)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["shell", "editor"]),
        ({"tools": []}, []),
        ({"tools": ["python", {"name": "shell"}], "finish": "submit"}, ["python", "shell", "submit"]),
        ({"tools": ["submit", "shell"], "finish": "submit"}, ["submit", "shell"]),
    ],
)
def test_the_tools_of_a_session_follow_from_its_settings(settings: dict[str, object], names: list[str]) -> None:
    harness = plugins.make_harness("native", settings)
    assert isinstance(harness, NativeHarness)
    assert [spec.name for spec in harness.config.tool_specs] == names


def test_the_first_message_says_how_to_end_unless_a_task_has_its_own() -> None:
    configs = [NativeConfig(), NativeConfig(finish="submit"), NativeConfig(system_prompt="")]
    prompts = [config.first_message for config in configs]
    assert "answer without calling a tool" in prompts[0]
    assert "call the tool `submit`" in prompts[1]
    assert prompts[2] == ""
