"""The agent in the node at work: its sessions' ends, their evidence, and its way through the proxy."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.search_source import SearchSource
from gangline.domain.session import Lease, SessionResult
from gangline.node.sessions.attempt import Attempt
from gangline.rows.audit import audit
from support.node.attempt import lease_of, node_parts
from support.requirements import need_module
from support.service.cli_process import processes_with

FIRST = {"turn": 0, "pattern": "^say hi$"}
"""Not what the engine is asked when it joins."""
SLEEP = FIRST | {"tool_calls": [{"run": "touch began; sleep 600"}]}
BROKEN = '<tool_call>\n{"name": "shell", "arguments": {"command": "touch never"\n</tool_call>'


def native(**task: Any) -> Lease:
    return lease_of(agent={"harness": "native", **task.pop("agent", {})}, **task)


async def lived(folder: Path, lease: Lease, *rules: dict[str, Any], **script: Any) -> SessionResult:
    script = {"rules": [*rules, {"pattern": ".", "text": "done"}], **script}
    async with node_parts(folder, script=script) as parts, asyncio.timeout(60):
        result = await Attempt(lease, parts).live()
        assert list(parts.runtimes_folder.iterdir()) == []
    assert processes_with(str(folder)) == {}
    return result


def told(result: SessionResult, role: str) -> list[str]:
    """Texts of one role after the model's first reply."""
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    return [
        "".join(getattr(piece, "text", "") for part in message.parts for piece in getattr(part, "content", (part,)))
        for message in trace.response_messages
        if message.role == role
    ]


def assert_one_exact_trace(result: SessionResult, num_turns: int) -> None:
    """Prefix merging has made one trace of all turns, and every sampled token of it is trained."""
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    contexts = [certificate.context for certificate in trace.certificates]
    assert contexts == ["first", *["exact"] * (num_turns - 1)]
    assert int(trace.loss_mask.sum()) == sum(len(completion.sampled_ids) for completion in result.completions)
    assert audit(result.trajectory, result.completions).ok


async def test_its_last_answer_is_what_it_said(tmp_path: Path) -> None:
    result = await lived(tmp_path, native())
    assert (result.outcome, result.artifacts["harness.stdout"]) == ("completed", b"done")


async def test_turns_with_tools_and_reports_are_one_trace(tmp_path: Path) -> None:
    """Calls side by side, a reply that is cut off, and a call that nobody can read."""
    result = await lived(
        tmp_path,
        native(),
        FIRST | {"text": "First I look.", "tool_calls": [{"run": "echo $HOME | wc -l"}, {"run": "x=7"}]},
        {"turn": 1, "text": "Then I", "finish": "length"},
        {"turn": 2, "text": f"Now {BROKEN}"},
        {"turn": 3, "text": "Hm", "tool_calls": [{"name": "shell", "arguments": {"cmd": "ls"}}]},
        {"turn": 4, "tool_calls": [{"run": "echo x is $x; ls"}]},
    )
    assert (result.outcome, result.artifacts["harness.stdout"]) == ("completed", b"done")
    assert told(result, "tool")[0].startswith("1\n[")
    assert "there is no argument 'cmd'" in told(result, "tool")[2]
    assert told(result, "tool")[3].startswith("x is 7\n["), "the shell lasts, and what was broken was not done"
    reports = told(result, "user")
    assert "cut off" in reports[0]
    assert "could not be read" in reports[1]
    assert [completion.certificate.parse for completion in result.completions] == [
        "ok",
        "ok",
        "failed",
        "ok",
        "ok",
        "ok",
    ]
    assert_one_exact_trace(result, num_turns=6)


async def test_what_it_submits_is_its_answer_and_what_is_graded(tmp_path: Path) -> None:
    checks = {"source": "last_message", "checks": [{"kind": "equals", "value": "42"}]}
    lease = native(agent={"settings": {"finish": "submit"}}, evaluator={"strategy": "test_on_output", "config": checks})
    submits = [{"run": "true"}, {"name": "submit", "arguments": {"answer": "42"}}, {"run": "false"}]
    result = await lived(
        tmp_path, lease, FIRST | {"text": "41?"}, {"turn": 1, "text": "I think it is 41.", "tool_calls": submits}
    )
    assert (result.outcome, result.reward) == ("completed", 1.0), result.failure
    assert result.artifacts["harness.stdout"] == b"42"
    assert "call submit" in told(result, "user")[0]


async def test_a_model_that_only_writes_broken_calls_fails(tmp_path: Path) -> None:
    lease = native(agent={"settings": {"max_reminders": 1}})
    result = await lived(tmp_path, lease, {"pattern": ".", "text": BROKEN})
    assert (result.outcome, len(result.completions)) == ("agent_error", 2)
    assert result.failure is not None
    assert "did nothing for 2 turns" in result.failure.message
    assert result.artifacts["harness.stdout"] == b""


async def test_a_reply_may_take_what_is_left_of_the_context_where_max_tokens_is_more(tmp_path: Path) -> None:
    """Engines refuse such a call. The limit is left out from then on: the conversation only grows."""
    lease = native(agent={"settings": {"max_tokens": 20_000}})
    result = await lived(tmp_path, lease, FIRST | {"tool_calls": [{"run": "echo here"}]}, context_length=16_000)
    assert (result.outcome, result.artifacts["harness.stdout"]) == ("completed", b"done"), result.failure
    assert [one.certificate.sampling.max_tokens for one in result.completions] == [None, None]
    small = native(agent={"settings": {"max_tokens": 100}})
    result = await lived(tmp_path / "small", small, context_length=16_000)
    assert [one.certificate.sampling.max_tokens for one in result.completions] == [100]


async def test_a_full_context_ends_it_by_its_limit_of_tokens(tmp_path: Path) -> None:
    again = {"tool_calls": [{"run": "seq 2000"}]}
    result = await lived(tmp_path, native(), again, context_length=16_000)
    assert result.outcome == "token_limit"
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code) == ("harness", "context_length_exceeded")
    assert "16000" in result.failure.message
    assert result.completions


@pytest.mark.parametrize("rule", [SLEEP, FIRST | {"faults": {"hang": True}}], ids=["in a command", "in a call"])
async def test_runs_budget_ends_it_wherever_it_is(tmp_path: Path, rule: dict[str, Any]) -> None:
    result = await lived(tmp_path, native(timeout_seconds=1.5), rule)
    assert result.outcome == "agent_timeout"
    assert result.harness_exit is not None
    assert result.harness_exit.timed_out


@pytest.mark.parametrize(
    ("agent", "outcome", "num_turns"),
    [({"max_turns": 2}, "turn_limit", 2), ({"max_repeated_actions": 3}, "agent_loop", 3)],
)
async def test_the_limits_of_every_harness_end_it(
    tmp_path: Path, agent: dict[str, Any], outcome: str, num_turns: int
) -> None:
    again = {"tool_calls": [{"name": "think", "arguments": {"thought": "Hm."}}]}
    result = await lived(tmp_path, native(agent={"settings": {"tools": ["think"]}, **agent}), again)
    assert (result.outcome, len(result.completions)) == (outcome, num_turns)


async def test_an_engine_that_never_recovers_is_our_fault_not_the_agents(tmp_path: Path) -> None:
    result = await lived(tmp_path, native(), FIRST | {"faults": {"status": 500, "times": None}})
    assert result.outcome == "infra_error"
    assert result.failure is not None
    assert result.failure.boundary == "engine"


async def test_a_call_that_is_refused_is_told_with_what_was_said(tmp_path: Path) -> None:
    result = await lived(tmp_path, native(), FIRST | {"faults": {"status": 400, "times": None}})
    assert result.outcome == "agent_error"
    assert result.failure is not None
    assert "refused with 400" in result.failure.message
    assert "scripted fault" in result.failure.message


async def test_an_action_server_that_the_agent_kills_is_replaced(tmp_path: Path) -> None:
    kill = "kill -9 $PPID"
    result = await lived(
        tmp_path, native(), FIRST | {"tool_calls": [{"run": kill}]}, {"turn": 1, "tool_calls": [{"run": "echo back"}]}
    )
    assert result.outcome == "completed", result.failure
    first, second = told(result, "tool")
    assert "the sandbox's action server" in first
    assert second.startswith("back\n")


async def test_without_python_in_the_sandbox_other_tools_work(tmp_path: Path) -> None:
    """PATH has no program at all: the model reads why, and thinks on."""
    lease = native(
        runtime={"backend": "process", "env": {"PATH": "/nowhere/bin"}},
        agent={"settings": {"tools": ["shell", "think"]}},
    )
    thinks = {"name": "think", "arguments": {"thought": "Hm."}}
    result = await lived(tmp_path, lease, FIRST | {"tool_calls": [{"run": "ls"}, thinks]})
    first, second = told(result, "tool")
    assert "needs python3 (3.8 or newer)" in first
    assert second == "ok"


async def test_a_cancelled_session_leaves_nothing_of_it(tmp_path: Path) -> None:
    script = {"rules": [SLEEP]}
    async with node_parts(tmp_path, script=script) as parts, asyncio.timeout(60):
        living = asyncio.create_task(Attempt(native(), parts).live())
        while not list(tmp_path.rglob("began")):
            await asyncio.sleep(0.01)
        living.cancel()
        with pytest.raises(asyncio.CancelledError):
            await living
        assert list(parts.runtimes_folder.iterdir()) == []
    assert processes_with(str(tmp_path)) == {}


async def test_a_session_searches_where_its_operator_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: the node's setting, the task's source, the model's calls, and a source that nobody has named."""
    monkeypatch.setenv("GANGLINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "whales.txt").write_text("Whales eat krill.")
    tools = [{"name": name, "settings": {"source": "papers"}} for name in ("web_search", "fetch_page")]
    rules = [
        FIRST | {"tool_calls": [{"name": "web_search", "arguments": {"query": "whales"}}]},
        {"turn": 1, "tool_calls": [{"name": "fetch_page", "arguments": {"address": "whales.txt"}}]},
        {"pattern": ".", "text": "krill"},
    ]
    source = SearchSource(kind="local", path=str(tmp_path / "whales.txt"))
    async with node_parts(tmp_path, script={"rules": rules}) as parts:
        parts = msgspec.structs.replace(parts, search_sources={"papers": source})
        result = await Attempt(native(agent={"settings": {"tools": tools}}), parts).live()
        assert (result.outcome, result.artifacts["harness.stdout"]) == ("completed", b"krill"), result.failure
        assert told(result, "tool")[1].endswith("Whales eat krill.")
        lease = native(session_id="another", agent={"settings": {"tools": tools[:1]}})
        parts = msgspec.structs.replace(parts, search_sources={})
        result = await Attempt(lease, parts).live()
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.code, result.failure.retryable) == ("tool_unavailable", False)
    assert "no search source 'papers'" in result.failure.message


async def test_the_tools_of_a_tasks_mcp_server_are_the_agents(tmp_path: Path) -> None:
    need_module("mcp", "pip install 'gangline[mcp]'")
    code = "from mcp.server import MCPServer as M; s = M('n'); s.tool(name='add')(lambda n=0: str(n + 1)); s.run()"
    agent = {"mcp_servers": {"sums": {"command": [sys.executable, "-c", code]}}}
    rule = FIRST | {"tool_calls": [{"name": "sums__add", "arguments": {"n": 41}}]}
    result = await lived(tmp_path, native(agent=agent), rule)
    assert (result.outcome, told(result, "tool")) == ("completed", ["42"]), result.failure
