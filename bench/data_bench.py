"""How fast `gangline data` writes token rows, and whether its memory grows with the number of sessions.

Real result files of sessions with one call of 2,000 tokens, four sessions of a task, through the command itself. Half
of the sessions are accepted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.completion import Certificate, Completion, CompletionTree
from gangline.domain.contracts import Reward
from gangline.domain.conversation import Message, Text
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import encode_msgpack, logprobs, token_ids
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from gangline.rows.rewards import apply_reward
from gangline.store.sql.tasks import TaskStore

NUM_PROMPT, NUM_SAMPLED = 1_200, 800
SAMPLES, REPOSITORIES = 4, 7
FEW, MANY = 1_000, 50_000
NUM_SPEED = 4_000


WORDS = " ".join(f"word{number}" for number in range(500))


def session() -> SessionResult:
    """Ids and texts of a task's session; numbers take their place later."""
    completion = Completion(
        completion_id="c1-000001",
        session_id="s",
        attempt=1,
        status="complete",
        parent_id=None,
        branch_key="key",
        dialect="openai_chat",
        model="model",
        prompt_shared=0,
        prompt_suffix_ids=token_ids(range(NUM_PROMPT)),
        sampled_ids=token_ids(range(NUM_SAMPLED)),
        logprobs=logprobs(-0.001 * number for number in range(NUM_SAMPLED)),
        messages_shared=0,
        new_messages=(Message("system", (Text("You are an agent."),)), Message("user", (Text(WORDS),))),
        response=Message("assistant", (Text(WORDS),)),
        certificate=Certificate(prompt_source="engine", context="first", logprobs="raw", finish_reason="stop"),
        started_at=0.0,
        finished_at=1.0,
    )
    return SessionResult(
        session_id="s", task_id="t", node_id="n", attempt=1, fence=1, outcome="completed", completions=(completion,)
    )


def numbered(made: SessionResult, task_id: str, sample: int) -> SessionResult:
    session_id, reward = f"{task_id}.{sample}", float(sample % 2)
    (call,) = made.completions
    said = Message("assistant", (Text(f"{session_id} {WORDS}"),))
    call = msgspec.structs.replace(call, session_id=session_id, response=said)
    built = PrefixMergingBuilder().build(CompletionTree([call]), session_id=session_id, task_id=task_id)
    return msgspec.structs.replace(
        made,
        session_id=session_id,
        task_id=task_id,
        completions=(call,),
        reward=reward,
        trajectory=apply_reward(built, Reward(reward=reward)),
    )


def requests(num_tasks: int) -> Iterator[TaskRequest]:
    for number in range(num_tasks):
        metadata = {"instance_id": f"i{number}", "repo": f"repo{number % REPOSITORIES}"}
        body = {"task_id": f"t{number:06d}", "instruction": "do it", "agent": {"harness": "shell"}}
        yield TaskRequest.model_validate({**body, "num_samples": SAMPLES, "metadata": metadata})


def write_data(data: Path, num_sessions: int) -> None:
    """As a server leaves it, less the syncing."""
    made = session()
    tasks = list(requests(num_sessions // SAMPLES))
    for task in tasks:
        assert task.task_id is not None
        for sample in range(SAMPLES):
            folder = data / "server" / "results" / task.task_id / f"{task.task_id}.{sample}"
            folder.mkdir(parents=True)
            (folder / "attempt-1.msgpack").write_bytes(encode_msgpack(numbered(made, task.task_id, sample)))
    with TaskStore(data / "server" / "gangline.db") as store:
        store.submit(tasks)


def run_data(data: Path, out: Path) -> tuple[float, float, int]:
    """Processor seconds, peak resident MB and rows of the command."""
    command = (sys.executable, "-m", "gangline", "data", "--kind", "tokens", "--out", out, "--data", data, "--json")
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        document: dict[str, Any] = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    num_rows = sum(file["num_rows"] for file in document["dataset"]["files"])
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, num_rows


def measured(num_sessions: int) -> tuple[float, float]:
    """Rows per processor second and peak resident MB."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_data(data, num_sessions)
        seconds, megabytes, num_rows = run_data(data, data / "out")
    assert num_rows == num_sessions // 2
    return num_rows / seconds, megabytes


def run() -> dict[str, dict[str, Any]]:
    speed, _ = measured(NUM_SPEED)
    few, many = measured(FEW)[1], measured(MANY)[1]
    return {
        "data.rows_per_s": {
            "value": round(speed, 1),
            "unit": "rows/s",
            "note": f"token rows of {NUM_PROMPT + NUM_SAMPLED:,} tokens, out of twice as many sessions on the "
            "disk, by processor seconds of the command, its start included",
        },
        "data.rss_mb": {
            "value": round(many, 1),
            "unit": "MB",
            "note": f"peak of the process over {MANY:,} sessions; {few:.1f} MB over {FEW:,}",
        },
        "data.rss_mb_of_1000": {"value": round(few, 1), "unit": "MB", "note": f"the same over {FEW:,} sessions"},
    }
