"""Data folders with sessions as agents leave them: a task of a repository each, tool calls, rewards, duplicates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.completion import CompletionTree
from gangline.domain.contracts import Reward
from gangline.domain.conversation import Message, ToolCall, ToolDefinition
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from gangline.rows.rewards import apply_reward
from gangline.store.results.files import ResultStore
from gangline.store.sql.tasks import TaskStore
from support.engines.conversations import Talk, arguments, result, said, system, user
from support.service.running import request

TOOLS = (ToolDefinition("run", "Run it.", {"type": "object", "properties": {"command": {"type": "string"}}}),)


def work(talk: Talk, num_turns: int, *opening: Message, ending: str = "Done.", word: str = "step") -> list[Message]:
    """A conversation of tool calls and a last answer; the whole history."""
    history = list(opening)
    for turn in range(num_turns):
        call = ToolCall(f"call_{len(talk.tree)}", "run", arguments(command=f"{word} {turn}"))
        response = said(f"{word} {turn} of it.", call, thinking=f"Think of {turn}.")
        talk.turn(history, response, tools=TOOLS)
        history += [response, result(call.call_id, f"output {turn}")]
    if ending:
        talk.turn(history, said(ending), tools=TOOLS)
        history.append(said(ending))
    return history


def session(
    task_id: str,
    number: int,
    reward: float | None,
    *,
    instruction: str = "Fix it.",
    num_turns: int = 2,
    word: str | None = None,
    **changes: Any,
) -> SessionResult:
    """word: of its commands. Sessions of one task with the same word say the same."""
    talk = Talk()
    work(talk, num_turns, system("You are an agent."), user(instruction), word=word or f"{task_id} {number}")
    return session_of(talk.tree, task_id, number, reward, **changes)


def session_of(tree: CompletionTree, task_id: str, number: int, reward: float | None, **changes: Any) -> SessionResult:
    session_id = f"{task_id}.{number}"
    own = tuple(msgspec.structs.replace(one, session_id=session_id) for one in tree)
    trajectory = PrefixMergingBuilder().build(CompletionTree(own), session_id=session_id, task_id=task_id)
    if reward is not None:
        trajectory = apply_reward(trajectory, Reward(reward=reward))
    made = SessionResult(
        session_id=session_id,
        task_id=task_id,
        node_id="node-1",
        attempt=1,
        fence=1,
        outcome="completed",
        reward=reward,
        trajectory=trajectory,
        completions=own,
    )
    return msgspec.structs.replace(made, **changes)


def task(task_id: str, **metadata: Any) -> TaskRequest:
    return request(task_id, instruction=f"Solve {task_id}.", num_samples=4, metadata=metadata)


def write_data(data: Path, tasks: Iterable[TaskRequest], sessions: Iterable[SessionResult]) -> None:
    """As a server leaves it."""
    results = ResultStore(data / "server" / "results")
    results.prepare()
    for one in sessions:
        results.save(one)
    with TaskStore(data / "server" / "gangline.db") as store:
        store.submit(list(tasks))
