"""What a person sees of a session: tables, tokens, a picture."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType

from gangline.cli.results.picture import draw_trajectory
from gangline.cli.results.session_view import session_view, task_view, tokens_view, trace_view
from gangline.cli.results.token_runs import elided, runs_of
from gangline.domain.completion import Lineage
from gangline.domain.conversation import Message, ToolCall, ToolResult
from gangline.domain.conversation import Text as Words
from gangline.domain.errors import InvalidRequest
from gangline.domain.tokens import token_ids
from gangline.domain.trajectory import Trace
from gangline.domain.usage import SessionUsage, Usage, unmeasured
from gangline.server.web.tokens import tokenizer_of
from support.strategies import session_result


def printed(*views: RenderableType) -> str:
    out = io.StringIO()
    Console(width=160, file=out).print(*views)
    return out.getvalue()


def traces(**how: str) -> tuple[Trace, ...]:
    trajectory = session_result(**how).trajectory
    assert trajectory is not None
    return trajectory.traces


def test_a_session_shows_outcome_reward_and_time_in_each_stage() -> None:
    text = printed(session_view(session_result()))
    assert "session-1  completed  reward 0.5" in text
    assert "init 0.25 s, run 2.50 s, postrun 0.50 s" in text


def test_a_session_shows_the_resources_that_are_known() -> None:
    agent = Usage(disk_bytes=None, cpu_s=1.5, peak_memory_bytes=64 << 20, proxy_sent_bytes=2048, proxy_received_bytes=9)
    usage = SessionUsage(agent=agent, grading=unmeasured("it is gone"))
    text = printed(session_view(msgspec.structs.replace(session_result(), usage=usage)))
    assert "agent used: 1.5 s of processor time, 64 MiB of memory at most, model calls 2 KiB out and 9 bytes in" in text
    assert "grading used: nothing that is known" in text
    assert "used" not in printed(session_view(session_result()))


def test_a_trace_shows_how_each_turn_came_by_its_context() -> None:
    text = printed(trace_view(traces()[0], 0))
    assert "main, a new conversation" in text
    assert "4 prompt ids, 13 response ids, 8 trainable, reward 0.5" in text
    assert [line.split("  ")[1:] for line in text.splitlines() if line.startswith("turn")] == [
        ["c0000", "first, +4 ids, 3 sampled, mean log-prob -0.75, version 0, tool_calls"],
        ["c0001", "exact_stitched, +2 ids, 2 sampled, mean log-prob -1.50, version 0, stop"],
        ["c0003", "exact_stitched, +3 ids, 3 sampled, mean log-prob -3.75, version 0, stop"],
    ]


def test_tool_calls_and_their_results_are_shown_after_the_turn_that_made_them_within_80_columns() -> None:
    trace = traces()[0]
    call = ToolCall("call-1", "read_file", '{"path": "a.txt"}')
    result = ToolResult("call-1", (Words("\x1b[31mline one\n" + "x" * 1000 + " the end"),), is_error=True)
    replies = [message for message in trace.response_messages if message.role == "assistant"]
    said = (Message("assistant", (call,)), Message("tool", (result,)), *replies[1:])
    trace = msgspec.structs.replace(trace, response_messages=said)
    out = io.StringIO()
    Console(width=80, file=out).print(trace_view(trace, 0))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in out.getvalue()
    first, second = (next(at for at, line in enumerate(lines) if line.startswith(f"turn {turn}")) for turn in (0, 1))
    between = " ".join(" ".join(lines[first:second]).split())
    assert 'call read_file({"path": "a.txt"})' in between
    assert "result ?[31mline one" in between
    assert "more characters" in between
    assert between.endswith("the end")
    assert "more characters" not in printed(trace_view(trace, 0, full=True))


def _beginning(lineage: Lineage) -> str:
    return printed(trace_view(msgspec.structs.replace(traces()[0], lineage=lineage), 0)).splitlines()[0].strip()


def test_a_trace_says_which_call_it_came_out_of() -> None:
    edited = Lineage(relation="changed", origin_id="c0003", cause="history_edited", first_change=4)
    assert _beginning(edited).endswith("main, would continue from c0003, but history_edited at message 4")
    spawned = Lineage(relation="spawned", origin_id="c0003", reason="its prompt is an argument of `task`")
    assert _beginning(spawned).endswith("main, spawned by a tool call of c0003")
    assert _beginning(Lineage(reason="one question alone")).endswith("a new conversation (one question alone)")


def test_a_turn_says_what_it_is_to_the_call_before_and_its_role_where_it_has_another() -> None:
    trace = traces()[0]
    spans = (*trace.spans[:2], msgspec.structs.replace(trace.spans[2], role="compaction"))
    lineages = {
        "c0000": Lineage(),
        "c0001": Lineage(relation="changed", origin_id="c9", cause="tools_changed"),
        "c0003": Lineage(relation="continuation", origin_id="c0001"),
    }
    text = printed(trace_view(msgspec.structs.replace(trace, spans=spans), 0, lineages))
    assert [line.split("  ")[2].split(", +")[0] for line in text.splitlines() if line.startswith("turn")] == [
        "root, first",
        "changed of c9 (tools_changed), exact_stitched",
        "continuation, compaction, exact_stitched",
    ]


def test_a_split_says_where_and_why() -> None:
    assert "split from session-1.t0 at id 14: bpe_merge" in printed(trace_view(traces()[2], 2))


def test_an_aborted_call_says_why_it_is_not_trained_on() -> None:
    assert "not trainable: aborted: the call ended before its reply did" in printed(trace_view(traces()[3], 3))


def test_a_splice_is_told() -> None:
    text = printed(trace_view(traces(on_divergence="splice")[0], 0))
    assert "spliced at response id 13 before c0004: bpe_merge" in text


def test_tokens_are_told_apart_by_kind_and_turn() -> None:
    view = tokens_view(traces()[0], lambda _: None)
    assert view.plain.split() == [
        "1",
        "4",
        "5",
        "6",
        "┃10",
        "11",
        "2",
        "7",
        "1",
        "┃12",
        "2",
        "7",
        "8",
        "1",
        "┃14",
        "15",
        "2",
    ]
    styles = {view.plain[span.start : span.end].strip(): span.style for span in view.spans}
    assert styles["10"] != styles["11"], "their log-probs differ"
    assert styles["5"] == styles["8"], "both are context"


def test_tokens_are_shown_as_text_where_there_is_a_tokenizer() -> None:
    texts = {10: "a", 11: "\n", 2: "<end>"}
    assert "┃a↵\n<end>" in tokens_view(traces()[0], lambda token_id: texts.get(token_id, "·")).plain


def test_a_long_prompt_is_shortened_in_its_middle() -> None:
    trace = msgspec.structs.replace(traces()[0], prompt_ids=token_ids(range(1000)))
    shown = tokens_view(trace, lambda _: None).plain
    assert "47  … 872 ids … 920" in shown
    prompt = next(runs_of(trace))
    assert elided(prompt, head=3, tail=2) == (3, 998)
    assert elided(prompt, head=500, tail=499) == (1000, 1000)


def test_a_task_shows_a_line_for_each_session() -> None:
    failed = session_result(session_id="session-2", trajectory=None, completions=(), outcome="infra_error", reward=None)
    text = printed(task_view([session_result(), failed]))
    assert [line.split()[:3] for line in text.splitlines()[1:3]] == [
        ["session-1", "completed", "0.5"],
        ["session-2", "infra_error", "–"],
    ]


def test_a_picture_is_drawn_of_every_kind_of_turn(tmp_path: Path) -> None:
    session = session_result(on_divergence="splice")
    texts = {tokenizer_of(call): {10: "日$x$".encode(), 11: b"\xe6"} for call in session.completions}
    path = draw_trajectory(session, tmp_path / "deep" / "a.png", texts)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_session_without_traces_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no trace to draw"):
        draw_trajectory(session_result(trajectory=None), tmp_path / "a.png", {})
