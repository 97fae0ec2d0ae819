"""Whether an evaluation that was killed reports the same as one that was left alone, at the size of a published number.

100 tasks x 4 samples through a real service: once undisturbed, once with `kill -9` of the command at a quarter and at
half of its sessions, and of the command and its whole service at three quarters. Which sessions pass depends on their
names, so both runs must find the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

NUM_TASKS, NUM_SAMPLES, NUM_REPOSITORIES = 100, 4, 7
COMMAND = (sys.executable, "-m", "gangline")
KILLED_AT = ((0.25, False), (0.5, False), (0.75, True))
"""Share of the sessions, and whether the service is killed too."""
AGENT = """
import hashlib, json, os, urllib.request
url = os.environ["OPENAI_BASE_URL"]
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)).read()
session = url.split("/s/")[1].split("/")[0]
print("right" if hashlib.sha256(session.encode()).digest()[0] < 100 else "wrong")
"""


def write_tasks(path: Path) -> None:
    checks = [{"kind": "contains", "value": "right"}]
    tasks = (
        {
            "task_id": f"task-{number:03d}",
            "instruction": "do it",
            "runtime": {"backend": "process"},
            "agent": {"harness": "shell", "settings": {"command": ["python3", "-c", AGENT]}},
            "evaluator": {"strategy": "test_on_output", "config": {"source": "stdout", "checks": checks}},
            "metadata": {"repo": f"repo{number % NUM_REPOSITORIES}"},
        }
        for number in range(NUM_TASKS)
    )
    path.write_text("".join(json.dumps(one) + "\n" for one in tasks))


@contextlib.contextmanager
def service(folder: Path) -> Generator[subprocess.Popen[str]]:
    """A service with a scripted engine; killed with all of its processes at the end, if it still runs."""
    script = folder / "script.json"
    script.write_text(json.dumps({"default": {"text": "hello"}}))
    engine = ("--engine", f"scripted:{script}", "--tokenizer", "tiny", "--port", "0")
    process = subprocess.Popen(
        [*COMMAND, "up", "--data", str(folder / "data"), "--json", *engine],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the service did not start"
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def start_eval(folder: Path) -> subprocess.Popen[str]:
    options = ("--name", "bench", "--samples", NUM_SAMPLES, "--by", "repo", "--data", folder / "data", "--json")
    command = [*COMMAND, "eval", folder / "tasks.jsonl", *options]
    return subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def report_of(running: subprocess.Popen[str]) -> dict[str, Any]:
    """Without its seconds."""
    told, _ = running.communicate()
    assert running.returncode == 0
    report: dict[str, Any] = json.loads(told)
    slices = [report["whole"], *(one for mine in report["by"].values() for one in mine)]
    for one in slices:
        del one["seconds"]
    return report


def num_recorded(folder: Path) -> int:
    path = folder / "data" / "evals" / "bench" / "sessions.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def undisturbed(folder: Path) -> tuple[dict[str, Any], float]:
    """The report, and seconds."""
    with service(folder):
        began = time.monotonic()
        return report_of(start_eval(folder)), time.monotonic() - began


def killed(folder: Path) -> dict[str, Any]:
    todo = list(KILLED_AT)
    while todo:
        with service(folder) as serving:
            kills_service = False
            while todo and not kills_service:
                share, kills_service = todo.pop(0)
                running = start_eval(folder)
                while num_recorded(folder) < share * NUM_TASKS * NUM_SAMPLES:
                    assert running.poll() is None, "it ended before it could be killed"
                    time.sleep(0.02)
                os.killpg(running.pid, signal.SIGKILL)
                running.communicate()
            if kills_service:
                os.killpg(serving.pid, signal.SIGKILL)
    with service(folder):
        return report_of(start_eval(folder))


def run() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        folders = [Path(one), Path(other)]
        for folder in folders:
            write_tasks(folder / "tasks.jsonl")
        whole, seconds = undisturbed(folders[0])
        resumed = killed(folders[1])
    differing = [key for key in whole if whole[key] != resumed[key]]
    assert whole["whole"]["num_counted"] == NUM_TASKS * NUM_SAMPLES
    passed = whole["whole"]["pass_at"]
    return {
        "eval.differences_after_kills": {
            "value": len(differing),
            "unit": "fields",
            "note": f"of the report of {NUM_TASKS} tasks x {NUM_SAMPLES} samples, killed three times (once with its "
            f"service) and resumed, against an undisturbed one; pass@1 {passed['1']['mean']:.4f}, pass@{NUM_SAMPLES} "
            f"{passed[str(NUM_SAMPLES)]['mean']:.4f} in both",
        },
        "eval.sessions_per_s": {
            "value": round(NUM_TASKS * NUM_SAMPLES / seconds, 1),
            "unit": "sessions/s",
            "note": f"the undisturbed one; a Python agent with one model call in each; load {os.getloadavg()[0]:.1f}",
        },
    }
