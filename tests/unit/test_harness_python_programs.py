"""Adapters of programs from PyPI: what they write and start, and how they read what the programs left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from gangline.agents.harnesses import installation
from gangline.agents.harnesses.installation import find_program
from gangline.domain.contracts import Harness, HarnessContext, Launch
from gangline.domain.errors import HarnessError, InvalidRequest
from gangline.domain.sandbox import ExecResult
from gangline.settings import plugins
from support.node.folder_runtime import FolderRuntime

NASTY = '-- it\'s "$(touch pwned)" {{task}} \\ \x07\x85\x00 straße 🛷 \u2028\ufeff\n!ls\n'

# Stands for the Python of a program: tells the version that it is asked for, or shows what it was given.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then echo {version}; exit {code}; fi
echo "$@"; cat
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A machine with all the programs."""
    for name in ("mini_swe_agent", "aider", "openhands", "terminus"):
        wanted = find_program(name)
        program(tmp_path / "bin", f"{wanted.command}-python", PYTHON.format(version=wanted.version, code=0))
    program(tmp_path / "bin", "tmux", "#!/bin/sh\n")
    return tmp_path / "bin"


@pytest.fixture
def runtime(tmp_path: Path, bin_folder: Path) -> FolderRuntime:
    return FolderRuntime(tmp_path / "r1", path=f"{bin_folder}:{os.defpath}")


async def prepared(runtime: FolderRuntime, name: str, instruction: str = "do it", **settings: Any) -> Launch:
    context = HarnessContext(
        session_id="s1",
        task_id="t1",
        instruction=instruction,
        model="org/model:1",
        base_url="http://127.0.0.1:8642/s/s1",
        api_key="key-1",
        runtime=runtime,
        env={"MINE": "1"},
    )
    launch = await plugins.make_harness(name, settings).prepare(context)
    assert isinstance(launch, Launch)
    return launch


def in_home(runtime: FolderRuntime, path: str) -> str:
    return Path(runtime.home, path).read_text()


@pytest.mark.parametrize("name", ["mini_swe_agent", "aider", "openhands", "terminus"])
async def test_each_is_pointed_at_the_proxy_and_writes_its_key_nowhere(runtime: FolderRuntime, name: str) -> None:
    launch = await prepared(runtime, name)
    assert launch.env["OPENAI_API_BASE"] == "http://127.0.0.1:8642/s/s1/v1"
    assert (launch.env["OPENAI_API_KEY"], launch.env["MINE"]) == ("key-1", "1")
    assert launch.env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert "key-1" not in " ".join(launch.command)
    assert b"key-1" not in (launch.stdin or b"")
    assert not [path for path in Path(runtime.home).rglob("*") if path.is_file() and b"key-1" in path.read_bytes()]
    assert not list(Path(runtime.workdir).iterdir())


@pytest.mark.parametrize("name", ["mini_swe_agent", "aider", "openhands", "terminus"])
@pytest.mark.parametrize("found", [None, "0.0.1", "broken"])
async def test_a_program_that_is_not_as_wanted_is_named_with_its_line(
    tmp_path: Path, bin_folder: Path, name: str, found: str | None
) -> None:
    wanted = find_program(name)
    python = bin_folder / f"{wanted.command}-python"
    if found is None:
        python.unlink()
    else:
        python.write_text(PYTHON.format(version=found, code=1 if found == "broken" else 0))
    told = {None: "is not installed", "0.0.1": "0.0.1 is installed", "broken": r"does not start \(it needs Python 3"}
    with pytest.raises(HarnessError, match=rf"{told[found]}.* gangline harness install {name}"):
        await prepared(FolderRuntime(tmp_path / "r2", path=f"{bin_folder}:{os.defpath}"), name)


@pytest.mark.parametrize(
    "broken", ["#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2; exit 127\n", "#!/nowhere\n"]
)
def test_a_python_that_does_not_start_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """As pyenv's shims do of versions that are installed and not chosen."""
    program(tmp_path / "bin", "python3.12", broken)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.defpath}")
    monkeypatch.setattr("sys.version_info", (3, 11, 7))
    with pytest.raises(HarnessError, match=r"needs Python 3\.12 or later, and none in PATH starts"):
        installation.python_for(find_program("openhands"))
    program(tmp_path / "bin", "python3.13", "#!/bin/sh\n")
    assert installation.python_for(find_program("openhands")) == str(tmp_path / "bin" / "python3.13")


async def test_a_command_that_pip_installed_in_an_image_is_found_by_its_first_line(
    runtime: FolderRuntime, bin_folder: Path
) -> None:
    (bin_folder / "mini-python").rename(bin_folder / "python-of-the-image")
    program(bin_folder, "mini", f"#!{bin_folder}/python-of-the-image\n")
    await prepared(runtime, "mini_swe_agent")


async def test_any_instruction_arrives_whole_at_mini_swe_agent(runtime: FolderRuntime) -> None:
    launch = await prepared(runtime, "mini_swe_agent", NASTY)
    folder = ".config/mini-swe-agent"
    assert yaml.safe_load(in_home(runtime, f"{folder}/task.yaml")) == {"run": {"task": NASTY}}
    files = [f"{runtime.home}/{folder}/{name}.yaml" for name in ("gangline", "overrides", "task")]
    specs = [after for option, after in zip(launch.command, launch.command[1:], strict=False) if option == "-c"]
    assert specs[1:] == ["mini.yaml", *files]


async def test_mini_swe_agents_own_configuration_can_be_changed(runtime: FolderRuntime) -> None:
    settings = {"overrides": {"agent": {"system_template": "x"}}, "max_tokens": 7, "command_timeout_s": 9}
    await prepared(runtime, "mini_swe_agent", **settings)
    folder = ".config/mini-swe-agent"
    ours = json.loads(in_home(runtime, f"{folder}/gangline.yaml"))
    assert (ours["model"], ours["environment"]) == ({"model_kwargs": {"max_tokens": 7}}, {"timeout": 9})
    assert json.loads(in_home(runtime, f"{folder}/overrides.yaml")) == {"agent": {"system_template": "x"}}


@pytest.mark.parametrize("end", ["Submitted", "LimitsExceeded", ""])
async def test_how_mini_swe_agent_ended_is_read_from_its_trajectory(runtime: FolderRuntime, end: str) -> None:
    launch = await prepared(runtime, "mini_swe_agent")
    trajectory = {"info": {"exit_status": end, "submission": ""}, "messages": [{"extra": {"exit_status": "mine"}}]}
    saved = Path(runtime.home, "saved")
    saved.write_text(json.dumps(trajectory, indent=2))
    script = launch.command[2]
    result = await runtime.exec(["sh", "-c", script, "sh", str(saved), "sh", "-c", "echo hello"])
    assert (result.exit_code, result.stdout) == (0, b"hello\n")
    verdict = plugins.make_harness("mini_swe_agent", {}).judge(result)
    assert verdict.ok is (end == "Submitted")
    assert end in verdict.reason or verdict.ok


def events(*items: tuple[str, dict[str, Any]]) -> bytes:
    lines = [json.dumps({"event": name, "properties": properties}) for name, properties in items]
    return ("a warning\n" + "\n".join(lines)).encode()


ASKED, ANSWERED = ("message_send_starting", {}), ("message_send", {"prompt_tokens": 1})
DONE = ("exit", {"reason": "Completed --message-file"})


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (events(("launched", {}), ASKED, ANSWERED, ASKED, ANSWERED, DONE), ""),
        (events(ASKED, ANSWERED, ASKED, ("message_send_exception", {"exception": "ouch"}), DONE), "failed: ouch"),
        (events(ASKED, DONE), "last model call failed"),
        (events(ASKED, ANSWERED), "before the end"),
        (events(("launched", {}), DONE), "without asking"),
        (b"", "without asking"),
    ],
)
def test_aider_is_judged_by_its_events(stderr: bytes, reason: str) -> None:
    harness = plugins.make_harness("aider", {})
    verdict = harness.judge(ExecResult(exit_code=0, stderr=stderr))
    assert verdict.ok is (reason == "")
    assert reason in verdict.reason
    assert not harness.judge(ExecResult(exit_code=1, stderr=events(ASKED, ANSWERED, DONE))).ok
    assert not harness.judge(ExecResult(exit_code=None, timed_out=True, stderr=events(ASKED, ANSWERED, DONE))).ok


@pytest.mark.parametrize(("instruction", "message"), [("/run rm x", "\n/run rm x"), ("!ls", "\n!ls"), (NASTY, NASTY)])
async def test_no_instruction_is_a_command_to_aider_itself(
    runtime: FolderRuntime, instruction: str, message: str
) -> None:
    launch = await prepared(runtime, "aider", instruction, files=("a.py",), git=False, test_command="make")
    assert Path(runtime.home, ".aider/message.txt").read_bytes().decode() == message
    assert list(launch.command[-2:]) == ["--", "a.py"]
    assert {"--no-git", "--auto-test", "--no-analytics"} <= set(launch.command)
    assert json.loads(in_home(runtime, ".aider/models.json"))["openai/org/model:1"]["max_input_tokens"] == 32_768


@pytest.mark.parametrize("name", ["openhands", "terminus"])
async def test_a_runner_gets_its_order_on_stdin(runtime: FolderRuntime, name: str) -> None:
    launch = await prepared(runtime, name, NASTY)
    result = await runtime.exec(launch.command, env=launch.env, stdin=launch.stdin)
    script, _, order = result.stdout.decode().partition("\n")
    assert Path(script).read_text().startswith("# pyright")
    fields = json.loads(order)
    assert fields["instruction"] == NASTY
    assert "http://127.0.0.1:8642/s/s1/v1" in str(fields)


def end(**fields: Any) -> bytes:
    return b"noise\n" + json.dumps({"type": "gangline.end", **fields}).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "result", "reason"),
    [
        ("openhands", ExecResult(exit_code=0, stdout=end(status="finished", error="")), ""),
        ("openhands", ExecResult(exit_code=0, stdout=end(status="stuck", error="")), "ended as stuck"),
        ("openhands", ExecResult(exit_code=0, stdout=end(status="error", error="LLM: 400")), "LLM: 400"),
        ("openhands", ExecResult(exit_code=1, stderr=b"no module"), "no module"),
        ("openhands", ExecResult(exit_code=0, stdout=b"hello"), "exited with 0"),
        ("openhands", ExecResult(exit_code=None, timed_out=True), "time was up"),
        ("terminus", ExecResult(exit_code=0, stdout=end(error="")), ""),
        ("terminus", ExecResult(exit_code=0, stdout=end(error="RuntimeError: tmux")), "RuntimeError: tmux"),
        ("terminus", ExecResult(exit_code=0, stdout=b'"gangline.end"'), "exited with 0"),
        ("terminus", ExecResult(exit_code=None, signal=9), "SIGKILL"),
    ],
)
def test_a_runners_last_line_is_its_evidence(name: str, result: ExecResult, reason: str) -> None:
    harness: Harness = plugins.make_harness(name, {})
    verdict = harness.judge(result)
    assert verdict.ok is (reason == "")
    assert reason in verdict.reason


async def test_terminus_needs_a_terminal(tmp_path: Path, bin_folder: Path) -> None:
    (bin_folder / "tmux").unlink()
    for name in ("sh", "cat", "sed"):
        (bin_folder / name).symlink_to(f"/bin/{name}")
    with pytest.raises(HarnessError, match="tmux"):
        await prepared(FolderRuntime(tmp_path / "r2", path=str(bin_folder)), "terminus")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("aider", {"map_tokens": -1}),
        ("mini_swe_agent", {"max_tokens": 0}),
        ("native", {"max_output_bytes": 0}),
        ("openhands", {"model": "gpt"}),
        ("terminus", {"parser": "yaml"}),
    ],
)
def test_wrong_settings_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(settings))):
        plugins.make_harness(name, settings)
