"""`gangline up --parent PID`: whoever started the service may be killed, and nothing of it stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.service.cli_process import COMMAND, clean_environment, gangline, wait_for, wait_until_gone

PARENT = """
import os, subprocess, sys
arguments = [*sys.argv[1:], "--parent", str(os.getpid())]
process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
print(process.stdout.readline(), end="", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("through", [(), ("sh", "-c", '"$@"; exit $?', "sh")], ids=["itself", "a shell"])
def test_a_parent_that_is_killed_takes_the_service_along(tmp_path: Path, through: tuple[str, ...]) -> None:
    (tmp_path / "script.json").write_text('{"default": {"text": "yes"}}')
    data = tmp_path / "data"
    up = [*COMMAND, "up", "--json", "--port", "0", "--data", str(data)]
    up += ["--engine", f"scripted:{tmp_path / 'script.json'}", "--tokenizer", "tiny"]
    command = [sys.executable, "-c", PARENT, *through, *up]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
    ) as parent:
        assert parent.stdout is not None
        assert "server_url" in parent.stdout.readline()
        told = json.loads((data / "up.json").read_text())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        for pid in (told["pid"], *told["pids"].values()):
            assert wait_until_gone(pid)
    wait_for(lambda: not (data / "up.json").exists())


def test_a_parent_that_is_gone_already_ends_it_at_once(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = gangline(
        "up", "--data", tmp_path / "data", "--parent", gone.pid, "--port", 0, "--engine", "http://127.0.0.1:9"
    )
    assert done.returncode == 0
    assert not (tmp_path / "data" / "up.json").exists()
