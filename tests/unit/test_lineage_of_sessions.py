"""What each call of a session was for, on sessions shaped as real harnesses shape theirs."""

from __future__ import annotations

import pytest

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, Text, ToolCall, ToolDefinition
from gangline.rows.audit import audit
from gangline.rows.lineage import CallRole, assign_roles
from gangline.settings.plugins import make_builder
from support.engines.conversations import Talk, arguments, result, said, system, user

SYSTEM = system("You are an agent. It is 2026-11-21 10:00.")
TOOLS = (ToolDefinition("run"), ToolDefinition("task"))
ASK = user("Fix the failing test in the parser module.")
SUMMARY = "So far: the parser drops the last token; parser.py line 40 was changed; one test still fails."
PROMPT = "Find every caller of parse_line and list the files they are in."
ANSWER = "parse_line is called in reader.py, in main.py and nowhere else."


def _call(name: str, number: int, **values: str) -> ToolCall:
    return ToolCall(f"call_{name}{number}", name, arguments(**values))


def _work(talk: Talk, num_turns: int, *opening: Message, tools: tuple[ToolDefinition, ...] = TOOLS) -> list[Message]:
    """A conversation of tool calls; its history so far."""
    history = list(opening)
    for turn in range(num_turns):
        response = said(f"Step {turn} of it.", _call("run", len(talk.tree), command=f"step {turn}"))
        talk.turn(history, response, tools=tools)
        history += [response, result(response.parts[1].call_id, f"output {turn}")]  # pyright: ignore
    return history


def _roles(tree: CompletionTree) -> list[str]:
    return [one.role for one in assign_roles(tree).values()]


def _of(talk: Talk, completion: Completion) -> CallRole:
    return assign_roles(talk.tree)[completion.completion_id]


def test_a_title_is_a_side_call_although_it_comes_first_and_is_long() -> None:
    talk = Talk()
    title = talk.answer(talk.ask(system("You write titles."), user("Title for: fix the test")), *[said("Parser")] * 5)
    _work(talk, 2, SYSTEM, ASK)
    assert _roles(talk.tree) == ["side"] * 5 + ["main"] * 2
    assert _of(talk, title[0]).lineage.reason == "one question alone"


def test_a_classifier_over_the_whole_history_is_a_detour() -> None:
    talk = Talk()
    history = _work(talk, 2, SYSTEM, ASK)
    verdict = talk.turn([system("Who speaks next?"), *history[1:], user("Answer in JSON.")], said('{"next": "model"}'))
    talk.turn([*history, user("Go on.")], said("Done."), tools=TOOLS)
    assert _roles(talk.tree) == ["main", "main", "side", "main"]
    assert _of(talk, verdict).lineage.origin_id == "c1-000002"
    assert "went on without it" in _of(talk, verdict).lineage.reason


def test_a_conversation_that_goes_on_with_other_tools_stays_the_main_one() -> None:
    talk = Talk()
    history = _work(talk, 2, SYSTEM, ASK)
    changed = _work(talk, 2, *history, user("Leave plan mode."), tools=TOOLS[:1])
    talk.turn([system("Be brief."), *changed[1:], user("Go on.")], said("ok", _call("run", 9, command="x")))
    assert [one.lineage.cause for one in talk.tree] == [None, None, "tools_changed", None, "tools_changed"]
    assert _roles(talk.tree) == ["main"] * 5


def test_an_edited_history_stays_with_its_conversation() -> None:
    talk = Talk()
    history = _work(talk, 3, SYSTEM, ASK)
    talk.turn([SYSTEM, user("Fix it."), *history[2:]], said("Done."), tools=TOOLS)
    assert _roles(talk.tree) == ["main"] * 4


@pytest.mark.parametrize("in_the_conversation", [True, False], ids=["asked in the conversation", "asked aside"])
def test_a_summary_that_a_new_conversation_begins_with_is_a_compaction(in_the_conversation: bool) -> None:
    talk = Talk()
    history = _work(talk, 3, SYSTEM, ASK)
    if in_the_conversation:
        summary = talk.turn([*history, user("Summarise.")], said(SUMMARY), tools=TOOLS)
    else:
        summary = talk.turn([system("You summarise."), *history[1:], user("Summarise.")], said(SUMMARY))
    later = system("You are an agent. It is 2026-11-21 10:31.")
    _work(talk, 2, later, ASK, user(f"The conversation so far:\n\n{SUMMARY}\nGo on."))
    assert _roles(talk.tree) == ["main", "main", "main", "compaction", "main", "main"]
    root = list(talk.tree)[4]
    assert (_of(talk, root).lineage.relation, _of(talk, root).lineage.origin_id) == (
        "compacted",
        summary.completion_id,
    )


def test_a_summary_that_was_cut_out_of_a_longer_reply_is_a_compaction_too() -> None:
    talk = Talk()
    history = _work(talk, 2, SYSTEM, ASK)
    lines = [
        f"{number}. In file number {number} a function was renamed and its callers were changed." for number in range(4)
    ]
    analysis = "<analysis>I should go through the conversation in order, and list every file.</analysis>\n"
    talk.turn([*history, user("Summarise.")], said(analysis + "\n".join(lines)), tools=TOOLS)
    _work(talk, 1, SYSTEM, user("This session continues from an earlier one.\n\n" + "\n  ".join(lines)))
    assert _roles(talk.tree) == ["main", "main", "compaction", "main"]


def test_an_agent_that_writes_its_history_into_each_request_is_main_throughout() -> None:
    talk, told = Talk(), "Task: fix the failing test."
    for step in range(5):
        reply = f"Step {step}: I looked at file number {step} and changed what was wrong in it."
        talk.turn((SYSTEM, user(told)), said(reply))
        told += f"\n{reply}\nOutput: ok"
    assert _roles(talk.tree) == ["main"] * 5


def test_an_agent_that_overwrites_its_memory_is_main_throughout() -> None:
    talk, memory = Talk(), "nothing yet, for the reading has only just begun"
    for chunk in range(4):
        request = user(f"Your memory: {memory}\nThe next part: {chunk}")
        memory = f"Part {chunk} was read, and it says nothing of the question so far."
        talk.turn((SYSTEM, request), said(memory))
    assert _roles(talk.tree) == ["main"] * 4


def test_a_plan_that_another_conversation_carries_out_is_no_compaction() -> None:
    talk = Talk()
    talk.turn((SYSTEM, user("Make a plan.")), said(SUMMARY), tools=TOOLS)
    _work(talk, 2, SYSTEM, user(f"Carry this out: {SUMMARY}"))
    assert _roles(talk.tree) == ["main"] * 3


def test_a_reviewer_that_is_shown_an_answer_is_no_successor_of_it() -> None:
    talk = Talk()
    history = _work(talk, 3, SYSTEM, ASK)
    talk.turn(history, said(SUMMARY), tools=TOOLS)
    _work(talk, 2, system("You review."), user(f"Is this right? {SUMMARY}"), tools=TOOLS[:1])
    assert _roles(talk.tree) == ["main"] * 4 + ["sub_agent"] * 2


def test_sub_agents_are_told_by_the_tool_call_that_carries_their_prompt() -> None:
    talk = Talk()
    spawn = said("", _call("task", 1, prompt=PROMPT, kind="search"), _call("task", 2, prompt=PROMPT.upper()))
    first = talk.turn((SYSTEM, ASK), spawn, tools=TOOLS)
    sub = _work(talk, 3, system("You search."), user(f"<task>\n{PROMPT}\n</task>"), tools=TOOLS[:1])
    talk.turn(sub, said(ANSWER), tools=TOOLS[:1])
    reminded = Message("user", (Text("<reminder>" + "Rules of the house. " * 50 + "</reminder>"), Text(PROMPT.upper())))
    other = talk.turn((system("You search."), reminded), said("Nothing."), tools=TOOLS[:1])
    talk.turn((SYSTEM, ASK, spawn, result("call_task1", ANSWER)), said("Done."), tools=TOOLS)
    assert _roles(talk.tree) == ["main", *["sub_agent"] * 5, "main"]
    lineage = _of(talk, other).lineage
    assert (lineage.relation, lineage.origin_id) == ("spawned", first.completion_id)
    assert lineage.reason == "its prompt is an argument of `task`"


def test_a_sub_agent_with_a_prompt_of_its_own_making_is_told_by_its_answer() -> None:
    talk = Talk()
    spawn = said("", _call("task", 1, files="*.py"))
    talk.turn((SYSTEM, ASK), spawn, tools=TOOLS)
    sub = _work(talk, 2, SYSTEM, user("Long instructions that the harness wrote."))
    talk.turn(sub, said(ANSWER), tools=TOOLS)
    talk.turn((SYSTEM, ASK, spawn, result("call_task1", f"Agent: {ANSWER}")), said("Done."), tools=TOOLS)
    assert _roles(talk.tree) == ["main", *["sub_agent"] * 3, "main"]


def test_an_agent_that_the_client_names_is_a_sub_agent_although_nothing_else_tells() -> None:
    talk = Talk()
    _work(talk, 1, SYSTEM, ASK)
    named = talk.turn((SYSTEM, user("Look into it.")), said("Nothing there."), tools=TOOLS, agent_id="a1")
    _work(talk, 1, SYSTEM, user("The next task."))
    assert _roles(talk.tree) == ["main", "sub_agent", "main"]
    assert _of(talk, named).lineage.reason == "the client calls it agent a1"


def test_a_page_that_a_tool_had_summarised_is_a_side_call() -> None:
    talk = Talk()
    fetch = said("", _call("fetch", 1, url="https://example.org/"))
    talk.turn((SYSTEM, ASK), fetch, tools=TOOLS)
    page = talk.turn((user("Summarise this page: ..."),), said(ANSWER))
    talk.turn((SYSTEM, ASK, fetch, result("call_fetch1", ANSWER)), said("Done."), tools=TOOLS)
    assert _roles(talk.tree) == ["main", "side", "main"]
    assert _of(talk, page).lineage.reason == "its answer is a tool's result in c1-000003"


def test_a_command_inside_a_classifiers_prompt_spawns_nothing() -> None:
    talk = Talk()
    command = "grep -rn parse_line src tests"
    response = said("", _call("run", 1, command=command))
    talk.turn((SYSTEM, ASK), response, tools=TOOLS)
    rules = "Say which files this command reads, one a line, or nothing where it reads none. The command: "
    talk.turn((user(rules + command),), said("src"))
    talk.turn((SYSTEM, ASK, response, result("call_run1", "")), said("Done."), tools=TOOLS)
    assert _roles(talk.tree) == ["main", "side", "main"]


def test_siblings_branches_and_fresh_starts_of_the_same_agent_are_main() -> None:
    talk = Talk()
    history = _work(talk, 2, SYSTEM, ASK)
    _work(talk, 1, *history[:4], user("Another way."))
    talk.turn((SYSTEM, ASK), said("Again."), tools=TOOLS)
    _work(talk, 2, SYSTEM, user("The next task."))
    assert [one.lineage.relation for one in talk.tree][2:4] == ["branch", "sibling"]
    assert _roles(talk.tree) == ["main"] * 6


def test_turns_of_other_roles_are_masked_and_say_so_and_nothing_is_lost() -> None:
    talk = Talk()
    talk.turn((system("You write titles."), user("Title for: fix the test")), said("Parser"))
    history = _work(talk, 2, SYSTEM, ASK)
    talk.turn([*history, user("Summarise.")], said(SUMMARY), tools=TOOLS)
    _work(talk, 1, SYSTEM, ASK, user(SUMMARY))
    for name in ("per_request", "prefix_merging", "message_prefix", "tree"):
        builder = make_builder(name, {"roles": ["main"]})
        trajectory = builder.build(talk.tree, session_id="s", task_id="t")
        masks = {
            span.completion_id: (span.role, int(trace.loss_mask[span.start : span.end].sum()))
            for trace in trajectory.traces
            for span in trace.spans
        }
        assert list(masks.values()) == [("side", 0), ("main", 1), ("main", 1), ("compaction", 0), ("main", 1)]
        side = trajectory.traces[0]
        assert side.untrainable == "role side: the builder trains on main only"
        if name != "tree":
            assert audit(trajectory, talk.tree).violations == ()
