"""Token capture of NeMo Gym over our proxy. Its own package judges, in its own Python."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import gangline
from gangline.serving.scripted.server import scripted_server
from support.node.environments import python_with
from support.node.node import TOKEN, running_node

JUDGE = Path(__file__).with_name("nemo_gym_judge.py")
SCRIPT: dict[str, Any] = {
    "rules": [
        {"pattern": "wait", "text": "never", "faults": {"hang": True}},
        {"pattern": "And tomorrow", "text": "It rains."},
        {"pattern": "look it up", "text": "Let me see.", "tool_calls": [{"name": "look", "arguments": {"at": "sky"}}]},
    ]
}

CHECKS = [
    *("put_then_freeze_visibility", "idempotent_reput", "conflicting_reput", "freeze_idempotency"),
    *("post_freeze_write_safety", "conditional_retirement", "lineage_visibility"),
    *("fresh_client_lineage_visibility", "begin_call_custody"),
]


@pytest.fixture(scope="module")
def python() -> str:
    return python_with("GANGLINE_NEMO_GYM", "nemo-gym", "nemo_gym", "msgspec", "aiohttp", "numpy")


async def judged(python: str, folder: Path, case: str, text: str) -> Any:
    """The judge's answer over a node whose engine says `text`."""
    script = {**SCRIPT, "default": {"text": text}}
    async with scripted_server(script) as engine, running_node(folder, engine) as node:
        judge = await asyncio.create_subprocess_exec(
            *(f"{python}/bin/python", str(JUDGE), case, node.url, TOKEN),
            env={"PYTHONPATH": str(Path(gangline.__file__).parents[1]), "HOME": str(folder)},
            stdout=asyncio.subprocess.PIPE,
            stderr=sys.stderr,
        )
        told, _ = await judge.communicate()
        assert judge.returncode == 0
        return json.loads(told.splitlines()[-1])


@pytest.mark.timeout(600)
async def test_all_conformance_checks_pass_but_the_one_of_a_capture_that_may_lose_calls(
    tmp_path: Path, python: str
) -> None:
    short = await judged(python, tmp_path / "a", "conformance", "a")
    long = await judged(python, tmp_path / "b", "conformance", "It is sunny.")
    passed = {name for answers in (short, long) for name, error in answers.items() if error is None}
    assert passed == set(CHECKS), (short, long)
    assert "was finalized" in short["mark_incomplete_durability"]


async def test_its_builder_makes_one_contiguous_response_of_a_session(tmp_path: Path, python: str) -> None:
    built = await judged(python, tmp_path, "builder", "It is sunny.")
    assert built["error"] is None
    assert built["mask"] is False
    assert built["num_calls"] == 3
    assert built["parents"] == ["root", "resolved", "resolved"]
    assert built["kinds"] == ["message", "message", "function_call", "message"]
    assert built["sampled"] == built["recorded"]


async def test_its_builder_masks_a_session_whose_client_rewrote_a_reply_or_left(tmp_path: Path, python: str) -> None:
    built = await judged(python, tmp_path, "masked", "It is sunny.")
    assert built == {"rewritten": True, "cut off": True, "not there": True}
