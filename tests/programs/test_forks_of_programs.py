"""Forks of sessions of agent programs, as their makers ship them: each reaches the turn that it was forked at, with its
parent's ids."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import pytest

from gangline.client.server import ServerClient
from gangline.domain.session import SessionResult
from gangline.forks.calls import REPLAYED, recorded_calls
from support.engines.tokenizers import qwen3_folder
from support.requirements import need_command, need_tool
from support.service.cli_process import UpProcess


class Case(NamedTuple):
    harness: str
    command: str


CASES = [
    Case("claude_code", "claude"),
    Case("codex", "codex"),
    Case("gemini_cli", "gemini"),
    Case("qwen_code", "qwen"),
    Case("opencode", "opencode"),
    Case("pi", "pi"),
]
STEPS: list[dict[str, Any]] = [
    {"text": "I look around first.", "tool_calls": [{"run": "pwd; id -un; echo $HOME; ls"}]},
    {"tool_calls": [{"write": {"path": "/workspace/hello.txt", "content": "hello, sled\n"}}]},
    {"tool_calls": [{"read": "/workspace/hello.txt"}]},
    {"text": "Both at once.", "tool_calls": [{"run": "echo a > a"}, {"run": "echo b > b"}]},
    {"tool_calls": [{"run": "ls -l; cat a b"}]},
    {"tool_calls": [{"run": "sort hello.txt | wc"}]},
    {"tool_calls": [{"run": "mkdir deep; mv a deep; ls -R"}]},
    {"tool_calls": [{"run": "git init -q . && git status --short"}]},
    {"tool_calls": [{"run": "false"}]},
    {"text": "hello.txt is written."},
]
SCRIPT: dict[str, Any] = {
    "context_length": 200_000,
    "rules": [{"turn": turn, "pattern": "TASK-FORK", "where": "any", **reply} for turn, reply in enumerate(STEPS)],
    "default": {"text": "A title"},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    up = UpProcess(tmp_path_factory.mktemp("up"), "--tokenizer", qwen3_folder(), script=SCRIPT)
    try:
        assert up.ready(), "the service did not start"
        yield up
    finally:
        up.close()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.harness) for case in CASES])
async def test_a_fork_of_a_program_reaches_each_turn_with_its_parents_ids(service: UpProcess, case: Case) -> None:
    need_tool(case.command)
    running = service.running()
    task = {
        "task_id": f"parent-{case.harness}",
        "instruction": "TASK-FORK: write hello.txt.",
        "timeout_seconds": 120,
        "agent": {"harness": case.harness},
    }
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        await client.submit(task)
        await client.wait(task["task_id"], timeout_s=180)
        (parent,) = await client.result(task["task_id"])
        assert parent.outcome == "completed", parent.failure
        num_turns = len(recorded_calls(parent.completions))
        assert num_turns >= len(STEPS)
        forks = [await client.fork(parent.session_id, turn) for turn in range(1, num_turns + 1)]
        missed: dict[int, object] = {}
        for turn, fork in enumerate(forks, start=1):
            await client.wait(fork.task_id, timeout_s=300)
            (result,) = await client.result(fork.task_id)
            if result.outcome != "completed" or not repeats(result, parent, turn):
                missed[turn] = result.failure
    print(f"{case.harness}: {num_turns - len(missed)} of {num_turns} turns reached")
    assert not missed


def repeats(result: SessionResult, parent: SessionResult, turn: int) -> bool:
    """Whether the fork has the parent's ids up to that turn."""
    given = {one.metadata[REPLAYED]: one for one in result.completions if REPLAYED in one.metadata}
    wanted = [choice for call in recorded_calls(parent.completions)[:turn] for choice in call.choices]
    return len(given) == len(wanted) and all(
        one.sampled_ids.tolist() == given[one.completion_id].sampled_ids.tolist()
        and one.prompt_suffix_ids.tolist() == given[one.completion_id].prompt_suffix_ids.tolist()
        for one in wanted
    )
