"""A user without a checkout: a fresh environment, the wheel, and rows of an own agent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gangline import __version__
from release.installed import Installed
from support.requirements import need_command

AGENT = """
import json, os, urllib.request
call = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "any", "messages": [{"role": "user", "content": "Say hello."}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(call))["choices"][0]["message"]["content"])
"""
TASK = {
    "task_id": "greeting",
    "instruction": "Say hello.",
    "num_samples": 2,
    "runtime": {"prepare": [{"type": "write", "path": "agent.py", "content": AGENT}]},
    "agent": {"harness": "shell", "settings": {"command": "python3 agent.py"}},
    "evaluator": {"strategy": "test_on_output", "config": {"checks": [{"kind": "contains", "value": "hello"}]}},
}


@contextmanager
def running(process: subprocess.Popen[str]) -> Generator[str]:
    """The first line that it prints; it is ended with the block."""
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.communicate(timeout=60)[1][-4000:]
        yield line
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"default": {"text": "hello there"}}))
    return path


def rows_of_a_task(installed: Installed, data: Path) -> list[dict[str, object]]:
    """Rows of sessions in the default runtime, the sandbox."""
    need_command("bwrap", "apt-get install bubblewrap")
    task = data.with_suffix(".task.json")
    task.write_text(json.dumps(TASK))
    installed.run("submit", task, "--wait", "--data", data)
    installed.run("export", "greeting", "--format", "jsonl", "--data", data, "--out", data / "rows")
    (file,) = (data / "rows").glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_scripted_engine_needs_the_extra_tokenizer_alone(
    with_tokenizer: Installed, script: Path, tmp_path: Path
) -> None:
    assert "torch" not in with_tokenizer.modules()
    engine = ("--engine", f"scripted:{script}", "--tokenizer", "tiny")
    data = tmp_path / "data"
    with running(with_tokenizer.start("up", "--data", data, "--port", 0, "--json", *engine)):
        rows = rows_of_a_task(with_tokenizer, data)
    assert [row["reward"] for row in rows] == [1.0, 1.0]


def test_the_core_works_with_an_engine_elsewhere(
    core: Installed, with_tokenizer: Installed, script: Path, tmp_path: Path
) -> None:
    assert not {"tokenizers", "transformers", "torch"} & core.modules()
    data = tmp_path / "data"
    engine = with_tokenizer.start("engine", "--scripted", script, "--tokenizer", "tiny", "--port", 0, "--json")
    with (
        running(engine) as line,
        running(core.start("up", "--data", data, "--port", 0, "--json", "--engine", json.loads(line)["engine_url"])),
    ):
        rows = rows_of_a_task(core, data)
    assert [row["reward"] for row in rows] == [1.0, 1.0]


def test_the_core_without_its_wings_gives_rows(
    core_alone: Installed, with_tokenizer: Installed, script: Path, tmp_path: Path
) -> None:
    package = next(core_alone.folder.glob("lib/*/site-packages/gangline"))
    assert not {path.name for path in package.iterdir()} & {"interop", "serving", "tasks", "testing", "train"}
    shown = core_alone.run("--help")
    assert "submit" in shown
    assert "train" not in shown
    data = tmp_path / "data"
    engine = with_tokenizer.start("engine", "--scripted", script, "--tokenizer", "tiny", "--port", 0, "--json")
    with (
        running(engine) as line,
        running(
            core_alone.start("up", "--data", data, "--port", 0, "--json", "--engine", json.loads(line)["engine_url"])
        ),
    ):
        rows = rows_of_a_task(core_alone, data)
    assert [row["reward"] for row in rows] == [1.0, 1.0]


def test_the_core_names_the_wheel_where_an_extra_is_missing(core: Installed, wheel: Path, script: Path) -> None:
    process = core.start("up", "--engine", f"scripted:{script}", "--tokenizer", "tiny", "--port", 0)
    output, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"uv pip install --python {core.folder}/bin/python 'gangline[tokenizer] @ file://{wheel}'" in output + errors


def test_the_command_knows_its_version(core: Installed) -> None:
    assert core.run("--version") == f"gangline {__version__}\n"
