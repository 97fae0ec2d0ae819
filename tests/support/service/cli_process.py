"""`gangline` as a process, for tests: run a command, keep an `up` running, see what is left of it."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gangline.cli.main import load
from support.requirements import TOOLS

__all__ = [
    "Start",
    "UpProcess",
    "clean_environment",
    "gangline",
    "gangline_here",
    "processes_with",
    "wait_for",
    "wait_until_gone",
]

COMMAND = (sys.executable, "-m", "gangline")
GIVE_UP_S = 180.0
"""With other work on the machine a command takes many times as long; only what never comes should fail a test."""


def clean_environment(**extra: str) -> dict[str, str]:
    """Ours without the operator's settings, but with the tests' agent programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GANGLINE_")}
    return {**kept, "GANGLINE_TOOLS": str(TOOLS), **extra}


def gangline(
    *arguments: object, stdin: str = "", env: Mapping[str, str] | None = None, timeout_s: float = GIVE_UP_S
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=clean_environment(**(env or {})),
        check=False,
    )


def gangline_here(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The same in this process, for many cases of a command that only reads and prints: each start takes a second."""
    words = [str(one) for one in arguments]
    out, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, clean_environment(**(env or {})), clear=True),
        redirect_stdout(out),
        redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        load(words)()
    return subprocess.CompletedProcess(words, int(ended.value.code or 0), out.getvalue(), errors.getvalue())


def processes_with(mark: str) -> dict[int, str]:
    """pid -> command line of every process with `mark` in its command line or environment, but this one."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in command or mark.encode() in environment:
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def wait_until_gone(pid: int) -> bool:
    """Whether the process has ended, waiting for it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], GIVE_UP_S)[0])
    finally:
        os.close(descriptor)


def wait_for(condition: Callable[[], object], give_up_s: float = GIVE_UP_S) -> None:
    """Look again and again, where nothing tells."""
    deadline = time.monotonic() + give_up_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


class UpProcess:
    """A running `gangline up --json` over a scripted engine with the built-in tokenizer."""

    def __init__(
        self,
        folder: Path,
        *options: object,
        script: dict[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.data = folder / "data"
        script_path = folder / "script.json"
        script_path.write_text(json.dumps(script or {"default": {"text": "as you wish"}}))
        given = {str(option) for option in options}
        engine = () if "--engine" in given else ("--engine", f"scripted:{script_path}", "--tokenizer", "tiny")
        port = () if "--port" in given else ("--port", "0")
        command = [*COMMAND, "up", "--data", str(self.data), "--json", *engine, *port, *map(str, options)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(**(env or {}))
        )

    def ready(self) -> dict[str, Any]:
        """The line that it prints when it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def running(self) -> dict[str, Any]:
        """What it tells other commands."""
        return json.loads((self.data / "up.json").read_text())

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Signal it; exit code and stderr."""
        self.process.send_signal(number)
        return self.outcome()

    def outcome(self) -> tuple[int, str]:
        """Wait for its end; exit code and stderr."""
        _, errors = self.process.communicate(timeout=GIVE_UP_S)
        return self.process.returncode, errors

    def close(self) -> None:
        """For fixtures: whatever happened, nothing stays."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=GIVE_UP_S)


Start = Callable[..., UpProcess]
"""Options and settings of `UpProcess` but its folder -> a service that the fixture ends."""
