import json
from pathlib import Path
from typing import Any

import pytest

from gangline.agents.harnesses.installation import program_of
from gangline.agents.harnesses.pi import PiConfig, PiHarness
from gangline.agents.harnesses.shared.environment import provider_environment
from gangline.agents.harnesses.shell import ShellConfig, ShellHarness
from gangline.domain.contracts import HarnessContext
from gangline.domain.errors import InvalidRequest
from gangline.domain.sandbox import ExecResult
from gangline.domain.task import AgentSpec, TaskRequest
from gangline.settings import plugins
from support.node.folder_runtime import FolderRuntime


def a_context(runtime: FolderRuntime, **changes: Any) -> HarnessContext:
    fields: dict[str, Any] = {
        "session_id": "s1",
        "task_id": "t1",
        "instruction": "do it",
        "model": "org/model:1",
        "base_url": "http://127.0.0.1:8642/s/s1",
        "api_key": "key-1",
        "runtime": runtime,
        "env": {},
    }
    return HarnessContext(**fields | changes)


@pytest.fixture
def runtime(tmp_path: Path) -> FolderRuntime:
    return FolderRuntime(tmp_path / "r1")


def test_every_common_sdk_is_pointed_at_the_proxy(runtime: FolderRuntime) -> None:
    env = provider_environment(a_context(runtime, max_turns=3))
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:8642/s/s1/v1"
    assert env["ANTHROPIC_BASE_URL"] == env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:8642/s/s1"
    assert {env["OPENAI_API_KEY"], env["ANTHROPIC_API_KEY"], env["GEMINI_API_KEY"]} == {"key-1"}
    assert (env["GANGLINE_INSTRUCTION"], env["GANGLINE_MODEL"], env["GANGLINE_MAX_TURNS"]) == (
        "do it",
        "org/model:1",
        "3",
    )


def test_the_tasks_own_variables_win_but_not_over_ganglines(runtime: FolderRuntime) -> None:
    env = provider_environment(a_context(runtime, env={"OPENAI_MODEL": "gpt", "GANGLINE_MODEL": "other", "MINE": "1"}))
    assert (env["OPENAI_MODEL"], env["GANGLINE_MODEL"], env["MINE"]) == ("gpt", "org/model:1", "1")


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("shell", {}, "command"),
        ("shell", {"command": ""}, "command"),
        ("shell", {"command": []}, "command"),
        ("shell", {"command": "echo '{instruction}'"}, "single quotes"),
        ("shell", {"command": "x", "files": {"../x": ""}}, "inside the working folder"),
        ("shell", {"command": "x", "file_templates": {"/etc/x": ""}}, "inside the working folder"),
        ("shell", {"command": "x", "colour": 1}, "colour"),
        ("pi", {"api": "telnet"}, "api"),
        ("pi", {"max_tokens": 0}, "max_tokens"),
        ("pi", {"modell": "x"}, "modell"),
    ],
)
def test_wrong_settings_are_refused_when_the_task_is_checked(name: str, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        plugins.make_harness(name, settings)


async def test_shell_writes_files_as_they_are_and_fills_templates(runtime: FolderRuntime) -> None:
    config = ShellConfig(command="x", files={"a/b.py": "{model}"}, file_templates={"c.toml": 'url="{base_url}/v1" {x}'})
    await ShellHarness(config).prepare(a_context(runtime))
    assert runtime.file("a/b.py").read_text() == "{model}"
    assert runtime.file("c.toml").read_text() == 'url="http://127.0.0.1:8642/s/s1/v1" {x}'


async def test_shell_fills_a_list_in_place_and_stdin_too(runtime: FolderRuntime) -> None:
    config = ShellConfig(command=("agent", "--task={instruction}", "'{model}'"), stdin="{session_id}\n")
    launch = await ShellHarness(config).prepare(a_context(runtime))
    assert launch.command == ["agent", "--task=do it", "'org/model:1'"]
    assert launch.stdin == b"s1\n"


@pytest.mark.parametrize(
    ("result", "ok", "reason"),
    [
        (ExecResult(exit_code=0), True, ""),
        (ExecResult(exit_code=7), True, ""),
        (ExecResult(exit_code=1, stderr=b"a\nno such thing\n"), False, "exited with 1: no such thing"),
        (ExecResult(exit_code=None, signal=9), False, "killed by SIGKILL"),
        (ExecResult(exit_code=None, timed_out=True), False, "killed when its time was up"),
    ],
)
def test_shell_is_judged_by_its_exit_codes(result: ExecResult, ok: bool, reason: str) -> None:
    verdict = ShellHarness(ShellConfig(command="x", ok_exit_codes=(0, 7))).judge(result)
    assert (verdict.ok, verdict.reason) == (ok, reason)


def events(*items: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def answered(stop: str, **more: Any) -> dict[str, Any]:
    return {"type": "message_end", "message": {"role": "assistant", "stopReason": stop, **more}}


START, END = {"type": "agent_start"}, {"type": "agent_end"}
ASKED = {"type": "message_end", "message": {"role": "user"}}
FAILED = answered("error", errorMessage="400 too long")


@pytest.mark.parametrize(
    ("stdout", "reason"),
    [
        (events(START, ASKED, answered("toolUse"), answered("stop"), END), ""),
        (events(START, answered("length"), END), ""),
        (events(START, FAILED, END, {"type": "auto_retry_start"}, START, answered("stop"), END), ""),
        (events(START, ASKED, FAILED, END), "400 too long"),
        (events(START, answered("stop"), END, START, FAILED, END), "400 too long"),
        (events(START, answered("aborted"), END), "no message"),
        (events(START, ASKED, END), "without an answer"),
        (b"", "without an answer"),
        (b"not json\n[1]\n", "without an answer"),
        (events(START, answered("toolUse")), "before the end"),
        (events(START, FAILED, END, START, answered("toolUse")), "before the end"),
    ],
)
def test_pi_is_judged_by_its_events(stdout: bytes, reason: str) -> None:
    verdict = PiHarness(PiConfig()).judge(ExecResult(exit_code=0, stdout=stdout))
    assert verdict.ok is (reason == "")
    assert reason in verdict.reason


def test_pi_is_not_blamed_for_events_that_did_not_fit_the_output() -> None:
    cut = ExecResult(exit_code=0, truncated=True, stdout=events(START, answered("toolUse")) + b'{"type":"message_e')
    assert PiHarness(PiConfig()).judge(cut).ok


def test_pi_fails_when_its_process_did_whatever_its_events_say() -> None:
    done = events(START, answered("stop"), END)
    assert not PiHarness(PiConfig()).judge(ExecResult(exit_code=1, stdout=done)).ok
    assert not PiHarness(PiConfig()).judge(ExecResult(exit_code=None, timed_out=True, stdout=done)).ok


MCP, SKILL = {"docs": {"command": ["docs-server"]}}, {"sled": {"SKILL.md": "How to steer."}}


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ({"mcp_servers": MCP}, r"shell.* no way .*`agent\.mcp_servers`"),
        ({"skills": SKILL}, r"shell.* no way .*`agent\.skills`"),
    ],
)
def test_what_a_harness_cannot_give_its_program_is_refused_at_submit(agent: dict[str, Any], told: str) -> None:
    task = {"instruction": "x", "agent": {"harness": "shell", "settings": {"command": "x"}, **agent}}
    with pytest.raises(InvalidRequest, match=told):
        plugins.check_task(TaskRequest.model_validate(task))


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ({"mcp_servers": {"a": {}}}, "either command or url"),
        ({"mcp_servers": {"a": {"command": ["x"], "url": "http://x"}}}, "either command or url"),
        ({"mcp_servers": {"a": {"url": "http://x", "env": {"A": "1"}}}}, "env is of a command"),
        ({"mcp_servers": {"a.b": {"command": ["x"]}}}, "pattern"),
        ({"skills": {"a": {"README.md": "x"}}}, "has no SKILL.md"),
        ({"skills": {"a": {"SKILL.md": "x", "../b": "y"}}}, "inside the skill's folder"),
        ({"skills": {"../a": {"SKILL.md": "x"}}}, "pattern"),
    ],
)
def test_wrong_servers_and_skills_are_refused(agent: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AgentSpec.model_validate({"harness": "shell", **agent})


WITH_VERSIONS = [name for name in plugins.names("harness") if program_of(name) is not None]


@pytest.mark.parametrize("harness", WITH_VERSIONS)
@pytest.mark.parametrize("empty", ["", " ", "\n", None])
def test_an_empty_version_is_no_choice_of_a_version(harness: str, empty: str | None) -> None:
    """A template leaves it empty where any installed version will do."""
    config = plugins.load("harness", harness).Config
    assert config.model_validate({"version": empty}).version is None
    assert config.model_validate({"version": " 1.2 "}).version == "1.2"
    assert config.model_validate({}).version is not None
