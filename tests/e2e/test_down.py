"""`gangline down` ends the service of a data folder, whatever it is doing, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal

from support.service.cli_process import Start, gangline, processes_with, wait_for


def test_it_waits_until_all_processes_have_ended_and_then_there_is_nothing_to_stop(start: Start) -> None:
    up, other = start(), start()
    up.ready()
    other.ready()
    done = gangline("down", "--data", up.data, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pid"] == up.process.pid
    assert processes_with(str(up.data)) == {}
    code, said = up.outcome()
    assert code == 0
    assert [name for name in ("engine", "server", "node") if f"The {name} is ready after" not in said] == []
    again = gangline("down", "--data", up.data, "--json")
    assert again.returncode == 3
    assert json.loads(again.stdout)["error"]["code"] == "server_unavailable"
    assert other.process.poll() is None


def test_a_service_that_is_not_ready_yet_can_be_stopped(start: Start) -> None:
    up = start()
    wait_for((up.data / "logs" / "engine.log").exists)
    assert gangline("down", "--data", up.data).returncode == 0
    assert processes_with(str(up.data)) == {}


def test_now_does_not_wait_for_a_node_that_hangs(start: Start) -> None:
    up = start()
    up.ready()
    os.kill(up.running()["pids"]["node"], signal.SIGSTOP)
    late = gangline("down", "--data", up.data, "--timeout", "0")
    assert late.returncode == 1
    assert "gangline down --now" in late.stderr
    assert gangline("down", "--data", up.data, "--now").returncode == 0
    assert processes_with(str(up.data)) == {}


def test_a_service_that_was_killed_is_not_running(start: Start) -> None:
    up = start()
    up.ready()
    up.process.kill()
    up.process.wait()
    assert gangline("down", "--data", up.data).returncode == 3
