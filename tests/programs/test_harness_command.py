"""`gangline harness`: what there is, and trying it for real."""

from __future__ import annotations

import json
import os
from pathlib import Path

from support.requirements import need_command, need_tool
from support.service.cli_process import gangline


def test_the_list_tells_programs_and_their_versions(tmp_path: Path) -> None:
    done = gangline("harness", "list", "--json", env={"GANGLINE_TOOLS": str(tmp_path)})
    lines = {line["harness"]: line for line in json.loads(done.stdout)}
    assert lines["codex"] == {
        "harness": "codex",
        "source": "npm",
        "package": "@openai/codex",
        "version": "0.169.0",
        "installed": None,
        "needs_tools": True,
        "takes": ["mcp_servers", "skills"],
    }
    assert [name for name, line in lines.items() if not line["needs_tools"]] == [
        *("aider", "handler", "harbor", "mini_swe_agent", "shell", "terminus"),
    ]
    assert lines["shell"]["package"] is None


def test_a_program_that_does_the_task_passes() -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    need_tool("codex")
    done = gangline("harness", "check", "codex", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)
    assert (report["ok"], report["outcome"], report["problems"]) == (True, "completed", [])
    assert (report["dialects"], report["num_turns"], report["chains"]) == (["openai_responses"], 4, ["main"])
    assert report["contexts"] == {"first": 1, "exact": 3}
    assert 0 < report["model_s"] < report["wall_s"]


def test_qwen_code_passes_with_its_defaults_and_can_search() -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    assert gangline("harness", "install", "qwen_code").returncode == 0
    package = need_tool("qwen").parents[1] / "@qwen-code" / "qwen-code"
    bundled = list(package.glob("vendor/ripgrep/*/rg"))
    assert bundled
    assert all(os.access(program, os.X_OK) for program in bundled)
    done = gangline("harness", "check", "qwen_code", "--json", timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)
    assert (report["ok"], report["chains"]) == (True, ["main"])


def test_a_program_that_is_missing_fails_and_the_line_is_told(tmp_path: Path) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    tools = tmp_path / "tools"
    tools.mkdir()
    done = gangline("harness", "check", "codex", "--data", tmp_path / "data", env={"GANGLINE_TOOLS": str(tools)})
    assert done.returncode == 1
    assert "gangline harness install codex" in " ".join(done.stdout.split())


def test_what_cannot_be_installed_or_tried_is_refused() -> None:
    for arguments, told in (
        (("install", "shell"), "no program of its own"),
        (("install", "pi", "codex", "--version", "1"), "name one harness"),
        (("check", "pi", "codex", "--settings", "{}"), "name it"),
        (("check", "pi", "--settings", "{"), "not JSON"),
        (("check", "pi", "--settings", '{"modell": 1}'), "modell"),
        (("check", "no_such"), "unknown harness"),
    ):
        done = gangline("harness", *arguments)
        assert done.returncode not in (0, 1)
        assert told in done.stderr
