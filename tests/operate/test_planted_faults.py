"""Faults planted in a real service: within a minute `gangline status` names each, and an alert of a real Prometheus
with the rules that we ship, which leads to a part of the runbook."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.requirements import need
from support.service.cli_process import Start, UpProcess, clean_environment, gangline, wait_for
from support.service.prometheus import Prometheus, prometheus

MINUTE_S = 60.0
RUNBOOK = Path(__file__).parents[2] / "docs" / "guides" / "runbook.md"

SCRIPT = {"rules": [{"pattern": "slowly", "text": "at last", "delay_s": 8}], "default": {"text": "as you wish"}}
ASKS = """for i in 1 2 3 4 5 6 7 8; do curl -sN \\
  -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\
  -d '{"model": "m", "stream": true, "messages": [{"role": "user", "content": "slowly"}]}' \\
  "$OPENAI_BASE_URL/chat/completions"; done"""
LEAKS = """python3 -c 'import time; held = b"x" * (1500 << 20); time.sleep(600)'"""
FILL_BYTES = 1 << 20


def task(task_id: str, command: str) -> dict[str, Any]:
    agent = {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}
    return {"task_id": task_id, "instruction": "x", "agent": agent}


@contextmanager
def engine(folder: Path) -> Generator[tuple[int, str]]:
    """(pid, URL) of a scripted engine in a process of its own."""
    (folder / "engine.json").write_text(json.dumps(SCRIPT))
    words = ("engine", "--scripted", folder / "engine.json", "--tokenizer", "tiny", "--port", "0", "--json")
    command = [sys.executable, "-m", "gangline", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment()) as process:
        try:
            assert process.stdout is not None
            yield process.pid, json.loads(process.stdout.readline())["engine_url"]
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@contextmanager
def tmpfs(folder: Path, num_bytes: int) -> Generator[None]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path: Path) -> None:
    """Take the whole disk."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * FILL_BYTES)


def watched(up: UpProcess, folder: Path) -> Any:
    running = up.running()
    return prometheus(folder / "prometheus", running["server_url"], running["control_token"])


class Faults:
    """What is to be named: a word of `status` and an alert with a label, for each fault."""

    def __init__(self, up: UpProcess, alerts: Prometheus) -> None:
        self._up = up
        self._alerts = alerts
        self._since = time.monotonic()

    def named(self, wanted: dict[str, tuple[str, str, str]]) -> dict[str, tuple[float, float]]:
        """Fault -> seconds until `status` and until an alert named it.

        wanted: fault -> pattern of `status`, name of the alert, text in its summary.
        """
        in_status, in_alerts = dict[str, float](), dict[str, float]()

        def all_named() -> bool:
            shown = gangline("status", "--data", self._up.data).stdout
            fired = {alert["labels"]["alertname"]: alert["annotations"] for alert in self._alerts.firing()}
            for fault, (pattern, alert, text) in wanted.items():
                if fault not in in_status and re.search(pattern, shown):
                    in_status[fault] = time.monotonic() - self._since
                if fault not in in_alerts and alert in fired and text in fired[alert]["summary"]:
                    in_alerts[fault] = time.monotonic() - self._since
                    anchor = fired[alert]["runbook_url"].partition("#")[2]
                    assert f"\n## {anchor.replace('-', ' ')}\n" in RUNBOOK.read_text().lower()
            is_late = time.monotonic() - self._since > MINUTE_S
            assert not is_late, f"after a minute: status {in_status}, alerts {in_alerts}\n{shown}"
            return in_status.keys() == in_alerts.keys() == wanted.keys()

        wait_for(all_named)
        return {fault: (in_status[fault], in_alerts[fault]) for fault in wanted}


def test_a_slow_and_a_frozen_engine_a_leak_and_an_orphan_are_named_within_a_minute(
    start: Start, tmp_path: Path
) -> None:
    for name in ("slow", "frozen"):
        (tmp_path / name).mkdir()
    with engine(tmp_path / "slow") as (_, slow), engine(tmp_path / "frozen") as (frozen_pid, frozen):
        up = start("--engine", slow, "--engine", frozen)
        assert up.ready()
        with watched(up, tmp_path) as alerts:
            for one in (task("leak", LEAKS), *(task(f"asks-{number}", ASKS) for number in range(4))):
                done = gangline("submit", "-", "--data", up.data, stdin=json.dumps(one))
                assert done.returncode == 0, done.stderr
            (node,) = (up.data / "nodes").iterdir()
            (node / "runtimes" / "old.1.agent").mkdir(parents=True)
            (node / "runtimes" / "old.1.agent" / "file").write_bytes(b"x" * (50 << 20))
            os.kill(frozen_pid, signal.SIGSTOP)
            found = Faults(up, alerts).named(
                {
                    "slow": (rf"{slow} .*(slow: a call has waited \d|\s[789](\.\d)? s)", "GanglineEngineSlow", ""),
                    "frozen": (rf"engine {frozen} (is unhealthy|does not answer)", "GanglineEngineDown", frozen),
                    "leak": (r"leak\.0 .*1\.[45]\d* GiB", "GanglineSandboxLarge", node.name),
                    "orphan": (r"orphaned folders of sandboxes: 1", "GanglineOrphans", node.name),
                }
            )
        print(found)
        told = json.loads(gangline("doctor", "--data", up.data, "--json").stdout)
        assert "old.1.agent" in str(told)


def test_a_full_disk_is_named_within_a_minute(start: Start, tmp_path: Path) -> None:
    need(os.geteuid() == 0, "mounting a small disk needs root")
    with tmpfs(tmp_path / "up0" / "data", 300 << 20):
        up = start()
        assert up.ready()
        with watched(up, tmp_path) as alerts:
            wait_for(lambda: json.loads(gangline("status", "--data", up.data, "--json").stdout)["status"]["nodes"])
            fill(up.data / "fill")
            found = Faults(up, alerts).named({"disk": (r"disk is full|disk low", "GanglineDiskLow", "lack of disk")})
            print(found)
            shown = gangline("status", "--data", up.data).stdout
            assert not re.search(r"\bup\b", shown), shown
        (up.data / "fill").unlink()
        up.close()


@pytest.fixture
def start(tmp_path: Path) -> Generator[Start]:
    started: list[UpProcess] = []

    def go(*options: object, **settings: Any) -> UpProcess:
        started.append(UpProcess(tmp_path / f"up{len(started)}", *options, **settings))
        return started[-1]

    yield go
    for one in started:
        one.close()
