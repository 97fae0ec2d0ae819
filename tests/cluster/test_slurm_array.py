"""deploy/slurm: nodes as a job array whose throttle follows the sessions, over a real controller and a real service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

from cluster.conftest import Service
from support.service.cli_process import UpProcess, wait_for, wait_until_gone

SLURM = Path(__file__).parents[2] / "deploy" / "slurm"


@pytest.fixture
def array(slurm: Mapping[str, str], tmp_path: Path) -> Generator[str]:
    """Its id. It waits: the controller has no machine."""
    command = ["sbatch", "--parsable", f"--chdir={tmp_path}", str(SLURM / "nodes.sbatch")]
    done = subprocess.run(command, capture_output=True, text=True, env=slurm, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    yield done.stdout.strip()
    subprocess.run(["scancel", done.stdout.strip()], env=slurm, timeout=60, check=True)


@pytest.fixture
def service(array: str, tmp_path: Path) -> Generator[Service]:
    """Two nodes of the array, for two sessions each."""
    options = ("--nodes", 2, "--run-slots", 2, "--ready-slots", 0)
    up = UpProcess(tmp_path, *options, env={"GANGLINE_NODE__NODE_ID": f"slurm-{array}-1"})
    yield Service(up)
    up.close()


def test_the_array_follows_the_sessions_and_nodes_that_are_not_needed_drain(
    slurm: Mapping[str, str], array: str, service: Service, tmp_path: Path
) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    reached = {"GANGLINE_SERVER": service.ready["server_url"], "GANGLINE_TOKEN": service.ready["control_token"]}

    def follow(*bounds: object) -> str:
        command = [sys.executable, SLURM / "follow.py", array, "--slots", "2", *map(str, bounds)]
        environment = {**slurm, **reached, "PATH": path}
        return subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=120
        ).stdout

    def job(field: str) -> str:
        asked = ["scontrol", "show", "job", array]
        shown = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True, env=slurm, timeout=60).stdout
        found = re.search(rf"{field}=(\S+)", shown)
        assert found, shown
        return found[1]

    assert job("ArrayTaskThrottle") == "4"
    gate = tmp_path / "gate"
    service.submit(f"until [ -e {gate} ]; do sleep 0.2; done", 7)
    assert follow("--most", 3) == "7 sessions: 3 nodes wanted, 2 there, 0 draining\n"
    assert job("ArrayTaskThrottle") == "3"
    assert follow("--most", 9).startswith("7 sessions: 4 nodes")
    assert job("ArrayTaskThrottle") == "4"

    gate.touch()
    service.wait_for_end()
    assert follow() == "0 sessions: 1 nodes wanted, 2 there, 1 draining\n"
    assert job("ArrayTaskThrottle") == "2"
    service.wait_for_nodes(1)
    assert follow("--least", 0) == "0 sessions: 0 nodes wanted, 1 there, 1 draining\n"
    assert job("Reason").startswith("JobHeld")
    follow("--least", 1)
    assert not job("Reason").startswith("JobHeld")


def test_a_node_drains_when_slurm_tells_that_its_time_is_nearly_up(service: Service, tmp_path: Path) -> None:
    assert "#SBATCH --signal=USR1@" in (SLURM / "nodes.sbatch").read_text()
    gate = tmp_path / "gate"
    service.submit(f"until [ -e {gate} ]; do sleep 0.2; done", 4)
    wait_for(lambda: [one["stage"] for one in service.sessions()].count("run") == 4)
    (signalled, *_) = service.nodes()
    pid = service.process_of(signalled)
    assert pid is not None
    os.kill(pid, signal.SIGUSR1)
    wait_for(lambda: service.nodes()[signalled]["draining"])
    assert [one["stage"] for one in service.sessions()].count("run") == 4
    gate.touch()
    assert wait_until_gone(pid)
    assert {(one["outcome"], one["attempt"]) for one in service.wait_for_end()} == {("completed", 1)}
