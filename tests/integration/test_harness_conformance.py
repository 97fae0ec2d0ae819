"""Every adapter keeps the contract; what its program left behind was recorded from the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gangline.agents.harnesses.claude_code import ClaudeCodeConfig, ClaudeCodeHarness
from gangline.agents.harnesses.codex import CodexConfig, CodexHarness
from gangline.agents.harnesses.gemini_cli import GeminiCliConfig, GeminiCliHarness
from gangline.agents.harnesses.opencode import OpencodeConfig, OpencodeHarness
from gangline.agents.harnesses.pi import PiHarness
from gangline.agents.harnesses.qwen_code import QwenCodeConfig, QwenCodeHarness
from gangline.agents.harnesses.shell import ShellHarness
from gangline.domain.sandbox import ExecResult
from gangline.testing.harness_conformance import Check, Subject, checks, run_check


def printed(*documents: dict[str, Any], exit_code: int = 0, stderr: str = "") -> ExecResult:
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    return ExecResult(exit_code=exit_code, stdout=lines.encode(), stderr=stderr.encode())


# -- pi 0.73.1 ---------------------------------------------------------------------------------------------------

PI_START, PI_END = {"type": "agent_start"}, {"type": "agent_end"}


def pi_answer(stop: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "done"}]
    return {"type": "message_end", "message": {"role": "assistant", "content": content, "stopReason": stop, **more}}


PI = Subject(
    harness=PiHarness,
    worked=printed(PI_START, pi_answer("toolUse"), pi_answer("stop"), PI_END),
    failed={
        "its API failed": printed(PI_START, pi_answer("error", errorMessage="400 scripted fault"), PI_END),
        "aborted": printed(PI_START, pi_answer("aborted"), PI_END),
        "it died": printed(PI_START, pi_answer("toolUse"), exit_code=1, stderr="heap out of memory"),
    },
)

# -- Claude Code 2.1.329 -----------------------------------------------------------------------------------------

CLAUDE_WORKED = {
    "stop_reason": "end_turn",
    "session_id": "a28808e8-9fee-4399-bf2a-aa78a894b94d",
    "usage": {"input_tokens": 11655, "output_tokens": 2},
    "permission_denials": [],
    "terminal_reason": "completed",
    "is_error": False,
    "num_turns": 1,
    "subtype": "success",
    "api_error_status": None,
    "result": "two",
    "type": "result",
    "duration_ms": 667,
    "result_index": 0,
}
CLAUDE_FAILED = {
    **CLAUDE_WORKED,
    "stop_reason": "stop_sequence",
    "terminal_reason": "api_error",
    "is_error": True,
    "api_error_status": 400,
    "api_error_type": "invalid_request_error",
    "result": "API Error: 400 engine http://127.0.0.1:42751 answered 400: scripted fault: 400",
}
CLAUDE_CODE = Subject(
    harness=ClaudeCodeHarness,
    settings={
        "agents": {"scout": {"description": "looks", "prompt": "Look."}},
        "max_output_tokens": 4096,
        "context_window": 65_536,
    },
    worked=printed(CLAUDE_WORKED),
    failed={
        "its API failed": printed(CLAUDE_FAILED, exit_code=1),
        "its API failed, and the exit code is hidden": printed(CLAUDE_FAILED),
        "it died": ExecResult(exit_code=1, stderr=b"panic"),
        "it said nothing": ExecResult(exit_code=0),
    },
)

# -- Codex 0.169.0 -----------------------------------------------------------------------------------------------

CODEX_STARTED = (
    {"type": "thread.started", "thread_id": "01a1ffd1-dd86-70d3-a016-f4064bff26ea"},
    {"type": "item.completed", "item": {"id": "item_0", "type": "error", "message": "Model metadata not found."}},
    {"type": "turn.started"},
    {"type": "item.completed", "item": {"id": "item_1", "type": "agent_message", "text": "two\n"}},
)
CODEX_ERROR = '{"error":{"message":"engine http://127.0.0.1:38589 answered 400: scripted fault: 400"}}'
CODEX_FAILED = (
    {"type": "error", "message": CODEX_ERROR},
    {"type": "turn.failed", "error": {"message": CODEX_ERROR}},
)
CODEX_COMPLETED = {"type": "turn.completed", "usage": {"input_tokens": 8384, "output_tokens": 2}}
CODEX = Subject(
    harness=CodexHarness,
    settings={"context_window": 32_768, "reasoning_effort": "low"},
    worked=printed(*CODEX_STARTED, {"type": "error", "message": "Reconnecting... 1/5"}, CODEX_COMPLETED),
    failed={
        "its API failed": printed(*CODEX_STARTED, *CODEX_FAILED, exit_code=1),
        "its API failed, and the exit code is hidden": printed(*CODEX_STARTED, *CODEX_FAILED),
        "it died": printed(*CODEX_STARTED, exit_code=101, stderr="thread 'main' panicked"),
        "it stopped within a turn": printed(*CODEX_STARTED),
    },
)

# -- Gemini CLI 0.61.0 -------------------------------------------------------------------------------------------


def document(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


GEMINI_SESSION = {"session_id": "c74d612c-0526-4baa-9f2a-148902dc72e8"}
GEMINI_STATS = {"models": {"m": {"api": {"totalRequests": 4, "totalErrors": 1}}}}
GEMINI_ERROR = {"type": "Error", "message": '{"error":{"code":400,"message":"scripted failure"}}', "code": 400}
GEMINI_EMPTY = {"type": "INVALID_STREAM", "message": "The model returned an empty response with no text or thoughts."}
GEMINI_WARNING = b"YOLO mode is enabled. All tool calls will be automatically approved.\n"
GEMINI_CLI = Subject(
    harness=GeminiCliHarness,
    settings={"system_prompt": "You are brief.", "loop_detection": True},
    worked=ExecResult(
        exit_code=0,
        stdout=document({**GEMINI_SESSION, "response": "done", "stats": GEMINI_STATS}),
        stderr=GEMINI_WARNING,
    ),
    failed={
        "its API failed": ExecResult(
            exit_code=144, stderr=GEMINI_WARNING + document({**GEMINI_SESSION, "error": GEMINI_ERROR})
        ),
        "it could not use the answers": ExecResult(
            exit_code=0,
            stdout=document({**GEMINI_SESSION, "response": "", "stats": GEMINI_STATS, "error": GEMINI_EMPTY}),
        ),
        "it died": ExecResult(exit_code=None, signal=9),
        "it said nothing": ExecResult(exit_code=0, stderr=GEMINI_WARNING),
    },
)

# -- Qwen Code 0.24.4 --------------------------------------------------------------------------------------------

QWEN_STARTED = {"type": "system", "subtype": "init", "model": "m", "permission_mode": "yolo"}
QWEN_WORKED = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 4, "result": "done"}
QWEN_FAILED = {
    "type": "result",
    "subtype": "error_during_execution",
    "is_error": True,
    "num_turns": 1,
    "error": {"message": "[API Error: 400 scripted failure]"},
}
QWEN_CODE = Subject(
    harness=QwenCodeHarness,
    settings={"system_prompt": "You are brief.", "append_system_prompt": "-- And kind."},
    worked=printed(QWEN_STARTED, QWEN_WORKED),
    failed={
        "its API failed": printed(QWEN_STARTED, QWEN_FAILED, exit_code=1),
        "its API failed, and the exit code is hidden": printed(QWEN_STARTED, QWEN_FAILED),
        "cancelled": printed(QWEN_STARTED, exit_code=130, stderr="Operation cancelled."),
        "it stopped early": printed(QWEN_STARTED),
    },
)

# -- opencode 1.18.33 --------------------------------------------------------------------------------------------

OPENCODE_STEP = {"type": "step_finish", "part": {"type": "step-finish", "reason": "tool-calls"}}
OPENCODE_END = {"type": "step_finish", "part": {"type": "step-finish", "reason": "stop"}}
OPENCODE_FAILED = {
    "type": "error",
    "error": {"name": "APIError", "data": {"message": "scripted failure", "statusCode": 400, "isRetryable": False}},
}
OPENCODE = Subject(
    harness=OpencodeHarness,
    settings={"system_prompt": "You are brief.", "title_call": False},
    worked=printed(OPENCODE_STEP, OPENCODE_END),
    failed={
        "its API failed": printed(OPENCODE_FAILED, exit_code=1),
        "its API failed later, and the exit code is hidden": printed(OPENCODE_STEP, OPENCODE_FAILED),
        "it died": printed(OPENCODE_STEP, exit_code=134, stderr="out of memory"),
        "it said nothing": ExecResult(exit_code=0),
    },
)

# -- any command -------------------------------------------------------------------------------------------------

SHELL = Subject(
    harness=ShellHarness,
    settings={"command": ["agent", "--model", "{model}"], "stdin": "{instruction}"},
    commands=("agent",),
    worked=ExecResult(exit_code=0, stdout=b"done\n"),
    failed={"it failed": ExecResult(exit_code=1, stderr=b"no such thing\n")},
)
SHELL_ARGUMENT = Subject(
    harness=ShellHarness,
    settings={"command": "exec agent {instruction}"},
    commands=("agent",),
    worked=SHELL.worked,
    failed=SHELL.failed,
)

SUBJECTS = {
    "claude_code": CLAUDE_CODE,
    "codex": CODEX,
    "gemini_cli": GEMINI_CLI,
    "opencode": OPENCODE,
    "pi": PI,
    "qwen_code": QWEN_CODE,
    "shell": SHELL,
    "shell-argument": SHELL_ARGUMENT,
}


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SUBJECTS)
async def test_harness(name: str, check: Check, tmp_path: Path) -> None:
    await run_check(check, SUBJECTS[name], tmp_path)


def test_reasons_are_the_programs_own_words() -> None:
    for harness, subject in (
        (ClaudeCodeHarness(ClaudeCodeConfig()), CLAUDE_CODE),
        (CodexHarness(CodexConfig()), CODEX),
        (GeminiCliHarness(GeminiCliConfig()), GEMINI_CLI),
        (QwenCodeHarness(QwenCodeConfig()), QWEN_CODE),
        (OpencodeHarness(OpencodeConfig()), OPENCODE),
    ):
        assert "scripted fa" in harness.judge(subject.failed["its API failed"]).reason
