"""The jobs of examples/swe_gym, deploy/slurm and docs/guides/cluster.md, by Slurm's own `sbatch --test-only` over a
real controller.

A machine that never reported has no GPUs: what a job asks of GPUs is read and checked by Slurm, and then left out, so
that the rest of the job is placed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "swe_gym" / "slurm").glob("*.sbatch"))
JOBS = [*EXAMPLES, ROOT / "deploy" / "slurm" / "nodes.sbatch"]
Sbatch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def sbatch(slurm: Mapping[str, str]) -> Sbatch:
    def ask(job: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [str(shutil.which("sbatch")), "--test-only", *options, str(job)]
        return subprocess.run(command, capture_output=True, text=True, env=slurm, timeout=60, check=False)

    return ask


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.parts[-3]}-{job.stem}")
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
    job.write_text(EXAMPLES[-1].read_text().replace("#SBATCH --gres=gpu:8", f"#SBATCH {wrong}"))
    assert "to start at" not in sbatch(job).stderr
