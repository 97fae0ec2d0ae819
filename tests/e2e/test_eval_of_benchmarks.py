"""`gangline eval NAME`: a benchmark of the catalogue from a copy in its published form, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.test_eval import without_times
from support.requirements import need_command, need_module
from support.service.cli_process import COMMAND, UpProcess, clean_environment, gangline, wait_for
from support.service.published import TEXT, parquet

NUM_TASKS, NUM_SOLVED = 6, 4
SCRIPT = {
    "rules": [
        {"where": "any", "pattern": rf"{number} sleds with 3 dogs", "text": f"\\boxed{{{3 * number}}}"}
        for number in range(1, NUM_SOLVED + 1)
    ],
    "default": {"text": r"I do not know: \boxed{1}"},
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    need_module("math_verify", "pip install 'gangline[math]'")
    service = UpProcess(tmp_path_factory.mktemp("up"), script=SCRIPT)
    try:
        assert "server_url" in service.ready()
        yield service
    finally:
        service.close()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What `hf download` leaves of GSM8K, as short as can be."""
    rows = [
        {
            "question": f"{number} sleds with 3 dogs?",
            "answer": f"{number}*3=<<{number}*3={3 * number}>>\n#### {3 * number}",
        }
        for number in range(1, NUM_TASKS + 1)
    ]
    parquet(tmp_path / "gsm8k" / "main" / "test-00000-of-00001.parquet", {"question": TEXT, "answer": TEXT}, *rows)
    return tmp_path / "gsm8k"


def arguments(up: UpProcess, copy: Path, *more: object) -> list[str]:
    return [str(one) for one in ("eval", "gsm8k", "--from", copy, "--data", up.data, "--json", *more)]


def evaluated(up: UpProcess, copy: Path, *more: object) -> dict[str, Any]:
    done = gangline(*arguments(up, copy, *more))
    assert done.returncode == 0, done.stderr
    assert "holds 6 tasks, and gsm8k has 1,319" in done.stderr or "--limit" in more
    return json.loads(done.stdout)


def test_killed_and_resumed_it_reports_as_if_undisturbed(up: UpProcess, copy: Path) -> None:
    whole = evaluated(up, copy, "--name", "whole")
    assert whole["whole"]["reward"]["mean"] == pytest.approx(NUM_SOLVED / NUM_TASKS)
    assert whole["whole"]["num_counted"] == NUM_TASKS

    kept = up.data / "evals" / "gsm8k" / "sessions.jsonl"
    running = subprocess.Popen(
        [*COMMAND, *arguments(up, copy, "--in-flight", 1)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
    )
    wait_for(lambda: kept.exists() and len(kept.read_bytes().splitlines()) >= 2)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    assert len(kept.read_bytes().splitlines()) < NUM_TASKS
    assert without_times(evaluated(up, copy)) == without_times(whole)


def test_a_part_is_another_evaluation_and_each_session_knows_its_benchmark(up: UpProcess, copy: Path) -> None:
    part = evaluated(up, copy, "--limit", 2, "--by", "benchmark.name")
    assert (part["name"], part["whole"]["num_counted"]) == ("gsm8k-first-2", 2)
    assert [one["name"] for one in part["by"]["benchmark.name"]] == ["gsm8k"]


def test_another_agent_program_does_not_get_the_presets_settings(up: UpProcess, copy: Path) -> None:
    done = gangline(*arguments(up, copy, "--harness", "shell"))
    assert done.returncode == 2
    assert "system_prompt" not in done.stderr
    assert "command" in done.stderr
