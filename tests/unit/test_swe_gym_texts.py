"""The commands and jobs of examples/swe_gym: bash reads them, and Gangline's commands have the options that they name.

Slurm's own reading of the jobs is in tests/cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.cli.commands import load_command
from gangline.train.trainers.verl.experiment import read_verl_experiment

EXAMPLE = Path(__file__).parents[2] / "examples" / "swe_gym"
SCRIPTS = sorted([*EXAMPLE.rglob("*.sh"), *EXAMPLE.rglob("*.sbatch")])
SLIMES_OWN = ("train_async.py", "tools/convert_hf_to_torch_dist.py")
README = (EXAMPLE / "README.md").read_text()


def texts() -> Iterator[str]:
    yield from (path.read_text() for path in SCRIPTS)
    yield from re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def calls() -> Iterator[list[str]]:
    """Words of each call of `gangline`, up to what bash would do next."""
    for text in texts():
        for line in text.replace("\\\n", " ").splitlines():
            if line.lstrip().startswith("#"):
                continue
            words = shlex.split(line, comments=True)
            for start in (index for index, word in enumerate(words) if word == "gangline"):
                rest = words[start + 1 :]
                ends = [index for index, word in enumerate(rest) if word in ("|", "&", ";", "<", ">", "&&")]
                yield rest[: min(ends, default=len(rest))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_it(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_call_is_read_by_its_command() -> None:
    """By the command's own parser: options, their types, and the arguments that it needs."""
    named: set[str] = set()
    for name, *rest in calls():
        command: Any = load_command(name)
        while hasattr(command, "commands"):
            name, *rest = f"{name} {rest[0]}", *rest[1:]
            command = command.commands[name.split()[-1]]
        named.add(name)
        # What only bash can fill in is left out: `"${engines[@]}"`, which is options.
        command.make_context(name, [word for word in rest if "[@]" not in word], resilient_parsing=False).close()
    assert {"tasks from", "train validate", "train run", "server", "node", "eval", "vet"} <= named


def test_the_engines_of_a_job_are_options_of_the_node() -> None:
    lines = re.findall(r"^\s*engines=\(.*$", (EXAMPLE / "slurm" / "nodes.sbatch").read_text(), re.MULTILINE)
    options = set(re.findall(r"--[a-z-]+", "".join(lines)))
    known = {name for parameter in load_command("node").params for name in parameter.opts}
    assert options == {"--engines-later", "--engine"}
    assert options <= known


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_variable_that_nobody_sets_ends_it(path: Path) -> None:
    text = path.read_text()
    if path.name != "slime_arguments.sh":  # it is read by a script that does
        assert "\nset -euo pipefail\n" in text


def test_files_that_are_named_are_there() -> None:
    for name in re.findall(r"`([\w./]+\.(?:sh|sbatch|py|yaml|json))`", README):
        assert (EXAMPLE / name).is_file() or name in SLIMES_OWN, name


# -- the jobs, by bash, on a Slurm that is played -------------------------------------------------------------------

PLAYED = {
    "scontrol": "printf '%s\\n' head other",
    "srun": 'while [[ "$1" == --* ]]; do shift; done; SLURM_LOCALID=${SLURM_LOCALID:-0} "$@"',
    # A server and a node end when both were called and the job waits for the first of them.
    "gangline": 'echo "gangline $*" >> "$SWE_GYM_DATA/calls"; [ "$1" = train ] && exit; '
    'until [ "$(wc -l < "$SWE_GYM_DATA/calls")" -ge 2 ] && [ -e "$SWE_GYM_DATA/server.url" ]; do /bin/sleep 0.1; done; '
    "/bin/sleep 0.3",
    "vllm": 'echo "vllm $CUDA_VISIBLE_DEVICES $*" >> "$SWE_GYM_DATA/calls"; exit 1',
    "curl": '[ -n "$ANSWERS" ]',
    "sleep": "true",
    "hostname": "echo gpu1",
}


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., tuple[int, list[str], str]]:
    """Runs a job: (exit code, calls of programs, what it wrote to stderr)."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "data").mkdir()
    for name, body in PLAYED.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "machine[1-2]", "SLURM_JOB_ID": "7", "GANGLINE_TOKEN": "secret", "MODEL": "/m"}
    variables |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SWE_GYM_DATA": str(tmp_path / "data")}

    def run(job: str, *arguments: object, **changes: str) -> tuple[int, list[str], str]:
        command = ["bash", EXAMPLE / "slurm" / f"{job}.sbatch", *map(str, arguments)]
        kept = {name: value for name, value in (variables | changes).items() if value}
        done = subprocess.run(command, capture_output=True, text=True, env=kept, timeout=60, check=False)
        calls = tmp_path / "data" / "calls"
        return done.returncode, sorted(calls.read_text().splitlines()) if calls.exists() else [], done.stderr

    return run


def test_nodes_wait_for_a_trainers_engines_or_take_those_of_the_file(slurm: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    server = f"gangline server --host 0.0.0.0 --port 8700 --public-url http://head:8700 --data {data}/server"
    node = "gangline node --server http://head:8700 --host 0.0.0.0 --data /tmp/gangline-7 --runtimes apptainer"
    assert slurm("nodes")[:2] == (0, [f"{node} --run-slots 8 --engines-later", server])
    (data / "calls").unlink()
    (data / "engines").write_text("http://gpu1:8000\nhttp://gpu1:8001\n")
    engines = "--engine=http://gpu1:8000 --engine=http://gpu1:8001"
    assert slurm("nodes")[:2] == (0, [f"{node} --run-slots 8 {engines}", server])
    assert not (data / "server.url").exists()


def test_engines_that_do_not_start_end_their_job(slurm: Any, tmp_path: Path) -> None:
    code, calls, _ = slurm("engines")
    assert code != 0
    assert calls[0].startswith("vllm 0 serve /m --host 0.0.0.0 --port 8000 --max-model-len 50000")
    assert not (tmp_path / "data" / "engines").exists()


def test_engines_that_answer_are_written_down_until_they_end(slurm: Any, tmp_path: Path) -> None:
    (tmp_path / "bin" / "vllm").write_text(
        '#!/bin/bash\nuntil [ -s "$SWE_GYM_DATA/engines" ]; do /bin/sleep 0.05; done\n'
    )
    (tmp_path / "bin" / "rm").write_text('#!/bin/bash\nmv "$2" "$SWE_GYM_DATA/removed"\n')
    (tmp_path / "bin" / "rm").chmod(0o755)
    assert slurm("engines", ANSWERS="yes")[0] == 0
    assert (tmp_path / "data" / "removed").read_text().splitlines() == [f"http://gpu1:{8000 + n}" for n in range(8)]


def test_the_trainer_of_slime_calls_back_from_its_machine(slurm: Any, tmp_path: Path) -> None:
    (tmp_path / "data" / "server.url").write_text("http://head:8700\n")
    (tmp_path / "example").mkdir()
    script = tmp_path / "example" / "slime.sh"
    script.write_text('#!/bin/bash\necho "$SWE_GYM_SERVER $SWE_GYM_CALLBACK" >> "$SWE_GYM_DATA/calls"\n')
    script.chmod(0o755)
    code, calls, stderr = slurm("trainer", tmp_path / "example", "slime")
    assert (code, calls) == (0, ["http://head:8700 http://gpu1:8650"]), stderr


def test_the_trainer_of_verl_uses_the_running_service(slurm: Any, tmp_path: Path) -> None:
    (tmp_path / "data" / "server.url").write_text("http://head:8700\n")
    shutil.copytree(EXAMPLE, tmp_path / "example")
    code, calls, stderr = slurm("trainer", tmp_path / "example", "verl")
    assert (code, len(calls)) == (0, 1), stderr
    file = tmp_path / "example" / "verl-slurm.yaml"
    file.write_text(file.read_text().replace("python: .venv-verl", f"python: {sys.executable}"))
    found = read_verl_experiment(file)
    assert found.service.url == "http://head:8700"
    assert found.settings["+actor_rollout_ref.rollout.custom.gangline.host"] == "0.0.0.0"
    assert found.settings["actor_rollout_ref.actor.optim.lr"] == 1e-6


def test_a_job_says_what_it_lacks(slurm: Any) -> None:
    assert "control token" in slurm("nodes", GANGLINE_TOKEN="")[2]
    assert "folder or name of the model" in slurm("engines", MODEL="")[2]
    assert "folder of the example" in slurm("trainer")[2]
