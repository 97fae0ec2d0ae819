"""The adapters of the programs from PyPI keep the contract; what the programs left was recorded from the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gangline.agents.harnesses.aider import AiderHarness
from gangline.agents.harnesses.mini_swe_agent import MiniSweAgentHarness
from gangline.agents.harnesses.openhands.adapter import OpenHandsHarness
from gangline.agents.harnesses.terminus.adapter import TerminusHarness
from gangline.domain.sandbox import ExecResult
from gangline.testing.harness_conformance import Check, Subject, checks, run_check


def told(**end: Any) -> ExecResult:
    """What a runner says last."""
    return ExecResult(exit_code=0, stdout=json.dumps({"type": "gangline.end", **end}).encode() + b"\n")


# -- mini-swe-agent 2.4.6 ----------------------------------------------------------------------------------------

MINI_SWE_AGENT = Subject(
    harness=MiniSweAgentHarness,
    worked=ExecResult(exit_code=0, stdout=b"Exit:\n", stderr=b"mini-swe-agent ended: Submitted\n"),
    failed={
        "its API failed": ExecResult(
            exit_code=1,
            stderr=b"BadRequestError: litellm.BadRequestError: OpenAIException - engine answered 400: scripted fault\n"
            b"mini-swe-agent ended: BadRequestError\n",
        ),
        "it came to its limit": ExecResult(exit_code=0, stderr=b"mini-swe-agent ended: LimitsExceeded\n"),
        "it died": ExecResult(exit_code=1, stderr=b"ModuleNotFoundError: No module named 'mcp'\n"),
    },
)

# -- aider 0.86.2 ------------------------------------------------------------------------------------------------


def aider_events(*names: str) -> bytes:
    events = [{"event": name, "properties": {}} for name in ("launched", "repo", *names)]
    events.append({"event": "exit", "properties": {"reason": "Completed --message-file"}})
    return "".join(json.dumps(event) + "\n" for event in events).encode()


AIDER = Subject(
    harness=AiderHarness,
    worked=ExecResult(exit_code=0, stderr=aider_events("message_send_starting", "message_send")),
    failed={
        "its API failed": ExecResult(
            exit_code=0,
            stdout=b"litellm.BadRequestError: OpenAIException - engine answered 400: scripted fault: 400\n",
            stderr=aider_events("message_send_starting"),
        ),
        "it died": ExecResult(exit_code=1, stderr=b"Traceback\nValueError\n"),
    },
)

# -- the runners of OpenHands 1.58.0 and terminus-2 of Harbor 0.24.0 ---------------------------------------------

OPENHANDS = Subject(
    harness=OpenHandsHarness,
    worked=told(status="finished", error=""),
    failed={
        "its API failed": told(status="error", error="LLMBadRequestError: litellm.BadRequestError: 400"),
        "it went in circles": told(status="stuck", error=""),
        "it died": ExecResult(exit_code=1, stderr=b"ImportError\n"),
    },
)
TERMINUS = Subject(
    harness=TerminusHarness,
    commands=("tmux",),
    worked=told(error=""),
    failed={
        "its API failed": told(error="BadRequestError: litellm.BadRequestError: 400"),
        "it died": ExecResult(exit_code=1, stderr=b"ImportError\n"),
    },
)


SUBJECTS = (AIDER, MINI_SWE_AGENT, OPENHANDS, TERMINUS)


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.harness.name)
async def test_harness(subject: Subject, check: Check, tmp_path: Path) -> None:
    await run_check(check, subject, tmp_path)
