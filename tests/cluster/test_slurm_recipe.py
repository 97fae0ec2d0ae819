"""The job of docs/guides/cluster.md, by Ray's own launcher as it stands there, on a Slurm that is played."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from support.requirements import need_module
from support.service.cli_process import clean_environment, gangline, processes_with, wait_for
from support.store.postgres import Cluster

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "cluster.md"
SLURM = {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}


@pytest.fixture
def job(tmp_path: Path, engine_url: str, postgres: Cluster) -> Generator[subprocess.Popen[str]]:
    need_module("ray", "pip install 'gangline[cluster]'")
    found = re.search(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    text = found.group(1).replace("http://engine:8000", engine_url).replace("--port 8700", "--port 0")
    (tmp_path / "job.sh").write_text(re.sub(r"postgresql://\S+", postgres.new_database(), text))
    for name, body in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": tmp_path.name,
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_JOB_NODELIST": "machine1",
    }
    with (tmp_path / "out").open("w") as out:
        running = subprocess.Popen(
            ["bash", tmp_path / "job.sh"],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean_environment(**variables),
            start_new_session=True,
        )
        yield running
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    for pid in processes_with(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


def test_the_job_runs_sessions_and_leaves_nothing(job: subprocess.Popen[str], tmp_path: Path) -> None:
    data = tmp_path / "gangline"
    wait_for(lambda: (data / "up.json").exists() or job.poll() is not None)
    assert job.poll() is None, (tmp_path / "out").read_text()
    what = ("--instruction", "x", "--command", "true", "--allow-no-model-call", "--runtime", "process")
    done = gangline("submit", *what, "--wait", "--json", "--data", data)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"] == {"completed": 1}
    os.kill(json.loads((data / "up.json").read_text())["pid"], signal.SIGTERM)
    assert job.wait(timeout=120) == 0, (tmp_path / "out").read_text()
    wait_for(lambda: processes_with(str(tmp_path)) == {})
