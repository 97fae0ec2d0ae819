"""Forks of sessions of agent programs, as their makers ship them: each reaches the turn that it was forked at, with its
parent's ids.

The first turn, the middle one and the last are forked; with `GANGLINE_FORK_EVERY_TURN=1` all of them.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import pytest

from gangline.domain.errors import Failure
from gangline.domain.session import SessionResult
from gangline.rows.forks.calls import REPLAYED, recorded_calls
from gangline.wire.client.server import ServerClient
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
EVERY_TURN = bool(os.environ.get("GANGLINE_FORK_EVERY_TURN"))
SESSION_S = 400  # ten copies of a program at once, alongside other tests
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


@pytest.mark.timeout(6 * SESSION_S)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.harness) for case in CASES])
async def test_a_fork_of_a_program_reaches_each_turn_with_its_parents_ids(service: UpProcess, case: Case) -> None:
    need_tool(case.command)
    running = service.running()
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        # Programs race: one asks before its tools are all there, another loses what its shell printed last, as its
        # parent may have. And whoever adds a user to the machine meanwhile takes the name of the sandbox's own from
        # it. Then the fork says so, and a fork of another session reaches the turn.
        parent = await finished_session(client, case, "parent-0")
        missed = await missed_turns(client, parent, forked_turns(parent))
        print(f"{case.harness}: of turns {forked_turns(parent)} not reached: {missed}")
        for attempt in range(1, 3):
            assert all(isinstance(why, Failure) and why.code == "fork_diverged" for why in missed.values()), missed
            if missed:
                parent = await finished_session(client, case, f"parent-{attempt}")
                missed = await missed_turns(client, parent, missed)
        assert not missed


async def finished_session(client: ServerClient, case: Case, name: str) -> SessionResult:
    """A session of the program, run to its end."""
    task = {
        "task_id": f"{name}-{case.harness}",
        "instruction": "TASK-FORK: write hello.txt.",
        "timeout_seconds": SESSION_S,
        "agent": {"harness": case.harness},
    }
    await client.submit(task)
    await client.wait(task["task_id"], timeout_s=SESSION_S)
    (session,) = await client.result(task["task_id"])
    assert session.outcome == "completed", session.failure
    assert len(recorded_calls(session.completions)) >= len(STEPS)
    return session


def forked_turns(parent: SessionResult) -> list[int]:
    """The turns that forks of this session are made behind."""
    num_turns = len(recorded_calls(parent.completions))
    return list(range(1, num_turns + 1)) if EVERY_TURN else [1, num_turns // 2, num_turns]


async def missed_turns(client: ServerClient, parent: SessionResult, turns: Iterable[int]) -> dict[int, Failure | str]:
    """Fork behind each of the turns; those that were not reached, and why."""
    forks = {turn: await client.fork(parent.session_id, turn) for turn in turns}
    missed: dict[int, Failure | str] = {}
    for turn, fork in forks.items():
        await client.wait(fork.task_id, timeout_s=SESSION_S)
        (result,) = await client.result(fork.task_id)
        if result.outcome != "completed" or not repeats(result, parent, turn):
            missed[turn] = result.failure or result.outcome
    return missed


def repeats(result: SessionResult, parent: SessionResult, turn: int) -> bool:
    """Whether the fork has the parent's ids up to that turn."""
    given = {one.metadata[REPLAYED]: one for one in result.completions if REPLAYED in one.metadata}
    wanted = [choice for call in recorded_calls(parent.completions)[:turn] for choice in call.choices]
    return len(given) == len(wanted) and all(
        one.sampled_ids.tolist() == given[one.completion_id].sampled_ids.tolist()
        and one.prompt_suffix_ids.tolist() == given[one.completion_id].prompt_suffix_ids.tolist()
        for one in wanted
    )
