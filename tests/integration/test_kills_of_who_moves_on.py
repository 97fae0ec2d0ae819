"""Processes that fork and end, over and over, faster than all processes of a busy machine can be listed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gangline.sandbox.shared.leftovers import LABEL, kill_labelled

_HOPPER = """
import fcntl, os, sys, time
lock = open(sys.argv[2], "w"); os.set_inheritable(lock.fileno(), True); fcntl.flock(lock, fcntl.LOCK_EX)
if os.fork(): time.sleep(1000)
print("hops", flush=True)
end = time.monotonic() + 90  # if nothing ends it
while time.monotonic() < end:
    if os.fork(): os._exit(0)
    os.setsid(); time.sleep(float(sys.argv[1]))
"""
_SUPERVISOR = """
import subprocess, sys
from gangline.sandbox.commands.helpers.namespaces import become_subreaper
from gangline.sandbox.commands.helpers.supervisor import kill_tree
become_subreaper()
hopper = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
hopper.stdout.readline()
print(kill_tree())
"""


@pytest.fixture(scope="module", autouse=True)
def many_processes() -> Generator[None]:
    """Listing them takes longer than a hop."""
    with ExitStack() as stack:
        for _ in range(200):
            stack.callback(stack.enter_context(subprocess.Popen(["sleep", "1000"])).kill)
        yield


def _is_free(lock: Path) -> bool:
    return subprocess.run(["flock", "--nonblock", lock, "true"], check=False).returncode == 0


@pytest.mark.parametrize("pause_s", ["0", "0.0003", "0.001"])
def test_a_supervisor_ends_one(tmp_path: Path, pause_s: str) -> None:
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", _SUPERVISOR, _HOPPER, pause_s, str(lock)]
    assert subprocess.run(command, check=True, capture_output=True, timeout=60).stdout == b"killed\n"
    assert _is_free(lock)


@pytest.mark.parametrize("pause_s", ["0", "0.0003", "0.001"])
def test_one_with_a_label_ends(tmp_path: Path, pause_s: str) -> None:
    lock, label = tmp_path / "lock", f"{tmp_path.name}/r/process"
    command = [sys.executable, "-c", _HOPPER, pause_s, str(lock)]
    with subprocess.Popen(command, env={LABEL: label}, stdout=subprocess.PIPE) as hopper:
        assert hopper.stdout is not None
        assert hopper.stdout.readline() == b"hops\n"
        time.sleep(0.1)
        assert kill_labelled(label.__eq__) == {label}
    assert _is_free(lock)
