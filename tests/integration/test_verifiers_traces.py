"""Traces for verifiers: the package's own loader reads them, and each of its branches is one row of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gangline.domain.conversation import Image, Message, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import Failure
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import encode_json
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from gangline.rows.conversations.verifiers_traces import FILE_NAME, episode_of, write_episodes
from gangline.rows.shared_prefixes import share_prefixes
from support.node.environments import directly, need_python
from support.strategies import Sample, completion_trees, session_result

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TASK = TaskRequest.model_validate({"instruction": "Go.", "agent": {"harness": "codex"}, "metadata": {"difficulty": 3}})
READ = """
from pathlib import Path
from verifiers.v1 import WireTrace
from verifiers.v1.utils.trace_store import read_episodes
result = []
for episode in read_episodes(Path(given["folder"]), WireTrace):
    (trace,) = episode.traces
    result.append({
        "task": [trace.task.key, trace.task.data.prompt, trace.task.data.model_extra],
        "reward": trace.reward,
        "ok": trace.ok,
        "errors": [error.type for error in trace.errors],
        "metrics": trace.metrics,
        "turns": trace.num_turns,
        "agent": trace.agent.name,
        "output": trace.num_output_tokens,
        "branches": [
            {
                "ids": branch.token_ids,
                "mask": branch.sampled_mask,
                "logprobs": branch.logprobs,
                "messages": [message.model_dump(exclude_none=True) for message in branch.messages],
                "tools": [tool.name for tool in branch.tools],
            }
            for branch in trace.branches
        ],
    })
"""


def rows_of(result: SessionResult) -> list[dict[str, Any]]:
    assert result.trajectory is not None
    return [
        {
            "ids": [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
            "mask": [False] * len(row.prompt_ids) + np.asarray(row.loss_mask, dtype=bool).tolist(),
            "logprobs": [0.0] * len(row.prompt_ids)
            + np.where(np.asarray(row.loss_mask, dtype=bool), row.response_logprobs, 0.0).tolist(),
        }
        for row in result.trajectory.traces
    ]


def branches_of(episode: dict[str, Any]) -> list[dict[str, Any]]:
    """What verifiers' `Trace.branches` makes of the nodes."""
    nodes = episode["traces"][0]["nodes"]
    parents = {node["parent"] for node in nodes}
    found: list[dict[str, Any]] = []
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path: list[Any] = []
        at: int | None = leaf
        while at is not None:
            path.insert(0, nodes[at])
            at = nodes[at]["parent"]
        found.append(
            {
                "ids": [one for node in path for one in node.get("token_ids", [])],
                "mask": [one for node in path for one in node.get("mask", [])],
                "num_logprobs": sum(len(node.get("logprobs", [])) for node in path),
            }
        )
    return found


@few
@given(sample=completion_trees().filter(lambda sample: len(sample.tree) > 0))
def test_each_branch_is_one_row(sample: Sample) -> None:
    built = PrefixMergingBuilder().build(sample.tree, session_id="session-1", task_id="task-1")
    result = session_result(trajectory=built, completions=tuple(sample.tree))
    episode = episode_of(result)
    assert (episode is None) == (not built.traces)
    if episode is None:
        return
    branches, rows = branches_of(json.loads(encode_json(episode))), rows_of(result)
    assert [(one["ids"], one["mask"]) for one in branches] == [(row["ids"], row["mask"]) for row in rows]
    assert [one["num_logprobs"] for one in branches] == [sum(row["mask"]) for row in rows]


@pytest.fixture(scope="module")
def python() -> str:
    return need_python("GANGLINE_VERIFIERS", "verifiers", "verifiers")


def read(python: str, folder: Path, *results: SessionResult) -> list[dict[str, Any]]:
    num = write_episodes(results, folder / FILE_NAME, request_of=lambda _: TASK)
    assert num == len(results)
    return directly(python, READ, folder=str(folder))


def test_verifiers_reads_the_rows_of_sessions(python: str, tmp_path: Path) -> None:
    plain = session_result(reward_details={"tests": 3, "output": "fine"})
    assert plain.trajectory is not None
    tree = msgspec.structs.replace(plain.trajectory, traces=tuple(share_prefixes(plain.trajectory.traces)))
    failed = session_result(
        outcome="infra_error",
        reward=None,
        failure=Failure(code="engine_failed", boundary="engine", message="gone", retryable=True),
    )
    found = read(python, tmp_path, plain, session_result(trajectory=tree), failed)
    for one in found:
        own = [{name: branch[name] for name in ("ids", "mask")} for branch in one["branches"]]
        assert own == [{name: row[name] for name in ("ids", "mask")} for row in rows_of(plain)]
        for branch, row in zip(one["branches"], rows_of(plain), strict=True):
            assert branch["logprobs"] == pytest.approx(row["logprobs"])
    assert [(one["reward"], one["ok"], one["errors"]) for one in found] == [
        (0.5, True, []),
        (0.5, True, []),
        (0.0, False, ["engine_failed"]),
    ]
    assert found[0]["metrics"] == {"tests": 3.0}
    assert found[0]["task"] == ["task-1", "Go.", {"metadata": {"difficulty": 3}}]
    assert (found[0]["agent"], found[0]["output"] > 0) == ("codex", True)


def test_verifiers_reads_every_kind_of_message(python: str, tmp_path: Path) -> None:
    talk = (
        Message("developer", (Text("Be brief."),)),
        Message("user", (Text("What is this?"), Image("data:image/png;base64,aGk="))),
        Message(
            "assistant", (Thinking("hm"), ToolCall("call-1", "look", "{}"), ToolCall("call-2", "look", "not json"))
        ),
        Message("tool", (ToolResult("call-1", (Text("a door"),)), ToolResult("call-2", (Text("no"),), is_error=True))),
    )
    sample = Sample()
    completion = sample.add(prompt=[1, 4], sampled=[10, 2], messages=talk)
    look = ToolDefinition("look", "Look around.", {"type": "object"})
    built = PrefixMergingBuilder().build(sample.tree, session_id="session-1", task_id="task-1")
    traces = tuple(msgspec.structs.replace(row, tools=(look,)) for row in built.traces)
    trajectory = msgspec.structs.replace(built, traces=traces)
    (found,) = read(python, tmp_path, session_result(trajectory=trajectory, completions=(completion,)))
    (branch,) = found["branches"]
    assert [message["role"] for message in branch["messages"]] == [
        *("system", "user", "assistant", "tool", "tool", "assistant")
    ]
    assert [call["id"] for call in branch["messages"][2]["tool_calls"]] == ["call-1", "call-2"]
    assert (branch["tools"], found["turns"]) == (["look"], 1)
