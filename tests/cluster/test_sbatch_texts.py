"""The jobs of examples/swe_gym and of docs/guides/cluster.md, by Slurm's own `sbatch --test-only` over a real
controller.

The controller's machines exist only in its configuration, and a machine that never reported has no GPUs: what a job
asks of GPUs is read and checked by Slurm, and then left out, so that the rest of the job is placed.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from support.requirements import need_command
from support.service.cli_process import wait_for

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "examples" / "swe_gym" / "slurm").glob("*.sbatch"))
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/pid
ProctrackType=proctrack/linuxproc
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
NodeName=cpu[1-8] CPUs=64 RealMemory=256000 State=CLOUD
NodeName=gpu1 CPUs=96 RealMemory=512000 Gres=gpu:8 State=CLOUD
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
Sbatch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def sbatch(tmp_path_factory: pytest.TempPathFactory) -> Generator[Sbatch]:
    need_command("slurmctld", "apt-get install slurmctld")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
    file = folder / "slurm.conf"
    file.write_text(CONFIGURATION.format(host=host, port=port, user=user, folder=folder))
    environment = os.environ | {"SLURM_CONF": str(file)}
    log = folder / "log"
    with log.open("w") as out:
        controller = subprocess.Popen(["slurmctld", "-D", "-c"], stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_for(lambda: "Running as primary controller" in log.read_text() or controller.poll() is not None)
        assert controller.poll() is None, log.read_text()

        def ask(job: Path, *options: str) -> subprocess.CompletedProcess[str]:
            command = [str(shutil.which("sbatch")), "--test-only", *options, str(job)]
            return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)

        yield ask
    finally:
        controller.terminate()
        controller.wait()


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_slurm_places_the_job(sbatch: Sbatch, job: Path) -> None:
    read = sbatch(job)
    assert re.search("to start at|Requested node configuration is not available", read.stderr), read.stderr
    placed = sbatch(job, "--gres=none")
    assert (placed.returncode, "to start at" in placed.stderr) == (0, True), placed.stderr


def test_slurm_places_the_job_of_the_guide(sbatch: Sbatch, tmp_path: Path) -> None:
    found = re.search(r"^```bash\n(.*?)^```", (ROOT / "docs/guides/cluster.md").read_text(), re.DOTALL | re.MULTILINE)
    assert found
    (tmp_path / "job.sh").write_text(found[1])
    placed = sbatch(tmp_path / "job.sh")
    assert "to start at" in placed.stderr, placed.stderr


@pytest.mark.parametrize(
    "wrong", ["--ntask-per-nodes=1", "--time=1:2:3:4", "--gres=gpus:8", "--mem=0x", "--cpus-per-task=97"]
)
def test_a_mistake_is_found(sbatch: Sbatch, tmp_path: Path, wrong: str) -> None:
    """So that the tests above can fail."""
    job = tmp_path / "job.sh"
    job.write_text(JOBS[-1].read_text().replace("#SBATCH --gres=gpu:8", f"#SBATCH {wrong}"))
    assert "to start at" not in sbatch(job).stderr
