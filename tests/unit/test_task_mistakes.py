"""Mistakes of a task that no machine could run: refused at submit, with the field, and never the agent's failure."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.domain.mistakes import mistakes
from gangline.domain.task import TaskRequest
from gangline.settings import plugins
from support.task_mistakes import MISTAKES, SHELL, runtime, script, wrote


def told(**fields: Any) -> str:
    """How a task is refused; empty where it is not."""
    body = {"instruction": "Do it.", "agent": SHELL, **fields}
    try:
        plugins.check_task(TaskRequest.model_validate(body))
    except ValidationError as error:
        return "\n".join(mistakes(error, TaskRequest))
    except InvalidRequest as error:
        return error.message
    return ""


def _names() -> list[str]:
    return [f"{number}-{field}" for number, (field, _) in enumerate(MISTAKES)]


@pytest.mark.parametrize(("field", "fields"), MISTAKES, ids=_names())
def test_a_mistake_is_refused_with_its_field(field: str, fields: dict[str, Any]) -> None:
    why = told(**fields)
    assert field in why
    assert len(why) < 3_000


@pytest.mark.parametrize(
    "fields",
    [
        runtime(workdir="/workspace/deep/er", folders=["/logs", "/tests"], prepare=wrote("/logs/a.txt")),
        runtime(workdir="/home/agent/x", prepare=wrote("x/y.txt")),
        runtime(prepare=[*wrote("/tmp/x"), *wrote("/home/agent/.netrc"), *wrote("..x"), *wrote("a..b/c")]),
        runtime(env={"A.B-c@x:y": "new\nline", "EMPTY": "", "PATH": "/opt/x:/usr/bin:/bin/"}),
        runtime(limits={"memory_bytes": 2**63 - 1, "cpus": 0.01, "max_pids": 1, "disk_bytes": None, "max_files": None}),
        runtime(image="/images/debian"),
        runtime(image="debian:12"),
        runtime(backend="docker", image="ghcr.io/a/b@sha256:" + "0" * 64, workdir="/app", prepare=wrote("/etc/x.conf")),
        runtime(backend="process", prepare=wrote("a/b"), workdir="/workspace"),
        script(files={"/tests/test.py": ""}, clear=["/logs"], reward_file="/logs/verifier/reward.txt", collect=["a"]),
        {"timeout_seconds": 86_400, "init_timeout_seconds": 0.001},
    ],
    ids=str,
)
def test_what_may_be_right_is_left_alone(fields: dict[str, Any]) -> None:
    assert told(**fields) == ""
