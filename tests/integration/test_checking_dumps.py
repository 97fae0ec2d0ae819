"""Dumps that `check-rows` reads, as their systems write them: our exporters, and the types of OpenEnv and verifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from gangline.domain.conversation import Message, Text
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.rows.atif.export import write_atif
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from gangline.rows.conversations.verifiers_traces import FILE_NAME, write_episodes
from gangline.rows.export import export_rows
from gangline.tasks.check_rows.check import Report, check_records
from gangline.tasks.check_rows.dump import read_records
from support.node.environments import directly, need_python
from support.strategies import Sample, session_result

TASK = TaskRequest.model_validate({"instruction": "Go.", "agent": {"harness": "codex"}})
WRITTEN_BY_VERIFIERS = """
from pathlib import Path
from verifiers.v1 import WireTrace
from verifiers.v1.utils.trace_store import read_episodes
episodes = read_episodes(Path(given["folder"]), WireTrace)
result = [trace.model_dump(mode="json") for episode in episodes for trace in episode.traces]
"""
WRITTEN_BY_OPENENV = """
from openenv.core.harness.training import TrainingTrace
result = TrainingTrace.from_entries(given["entries"]).model_dump(mode="json")
"""


def three_turns() -> SessionResult:
    """Each call's prompt continues the one before."""
    sample, talk, prompt = Sample(), [Message("user", (Text("Go."),))], [1, 4, 5]
    parent_id = None
    for sampled in ([10, 11, 2], [12, 2], [13, 14, 15, 2]):
        call = sample.add(prompt=prompt, sampled=sampled, messages=tuple(talk), parent_id=parent_id)
        parent_id, prompt = call.completion_id, [*prompt, *sampled, 6, 7]
        talk += [call.response, Message("user", (Text("Go on."),))]
    built = PrefixMergingBuilder().build(sample.tree, session_id="session-1", task_id="task-1")
    assert len(built.traces) == 1
    return session_result(trajectory=built, completions=tuple(sample.tree))


def clean(report: Report, form: str, num_trained: int = 9) -> None:
    assert (report.ok, report.counts, list(report.forms)) == (True, {}, [form])
    assert report.num_trained == num_trained


@pytest.mark.parametrize("format", ["jsonl", "msgpack", "parquet"])
def test_our_export_is_clean_in_every_format(tmp_path: Path, format: Literal["jsonl", "msgpack", "parquet"]) -> None:
    path = export_rows([three_turns()], tmp_path, name="rows", format=format)
    clean(check_records(read_records(path)), "gangline")


def test_our_atif_documents_are_clean(tmp_path: Path) -> None:
    assert write_atif([three_turns()], tmp_path, agent_of=lambda _: "codex") == 1
    (path,) = tmp_path.glob("*.json")
    clean(check_records(read_records(path)), "atif")


def test_traces_that_verifiers_writes(tmp_path: Path) -> None:
    python = need_python("GANGLINE_VERIFIERS", "verifiers", "verifiers")
    write_episodes([three_turns()], tmp_path / FILE_NAME, request_of=lambda _: TASK)
    (trace,) = directly(python, WRITTEN_BY_VERIFIERS, folder=str(tmp_path))
    clean(check_records([trace]), "verifiers")
    next(one for one in trace["nodes"] if one["sampled"])["sampled"] = False
    assert "context_trained" in check_records([trace]).counts


def test_traces_that_openenv_writes() -> None:
    python = need_python("GANGLINE_OPENENV", "openenv", "openenv")
    trace = directly(python, WRITTEN_BY_OPENENV, entries=[entry(one) for one in calls()])
    clean(check_records([trace]), "openenv")
    spliced = calls()
    spliced[1]["prompt"][4] = 9  # a token that was sampled
    trace = directly(python, WRITTEN_BY_OPENENV, entries=[entry(one) for one in spliced])
    assert check_records([trace]).counts == {"splice": 1}


def calls() -> list[dict[str, Any]]:
    return [
        {"prompt": [1, 4, 5], "sampled": [10, 11, 2]},
        {"prompt": [1, 4, 5, 10, 11, 2, 6], "sampled": [12, 2, 13, 14, 15, 2]},
    ]


def entry(call: dict[str, Any]) -> dict[str, Any]:
    prompt, sampled = call["prompt"], call["sampled"]
    return {
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "per_token_logps": [-0.5 - 0.01 * at for at in range(len(sampled))],
        "loss_mask": [0] * len(prompt) + [1] * len(sampled),
        "metadata": {"node_id": f"node-{len(prompt)}"},
    }
