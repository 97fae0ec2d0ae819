"""A Ray cluster of two machines, an engine, PostgreSQL, and `gangline up --cluster` over them."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.requirements import need_command, need_module
from support.service.cli_process import COMMAND, UpProcess, clean_environment, gangline, processes_with, wait_for
from support.store.postgres import Cluster

HEAD = "127.0.0.2"
OTHER = "127.0.0.3"

Start = Callable[..., UpProcess]


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


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Generator[Mapping[str, str]]:
    """The environment of Slurm's commands over a real controller. Its machines exist only in its configuration: jobs
    are read, placed and changed, and none begins.
    """
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
        yield environment
    finally:
        controller.terminate()
        controller.wait()


class RayMachines:
    """The cluster in `support/service/ray_cluster.py`; the head has room for two nodes, another for one."""

    def __init__(self, log: Path, *options: object) -> None:
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    Path(__file__).parents[1] / "support" / "service" / "ray_cluster.py",
                    *map(str, options),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ray runs its workers at niceness 15: beside other work of this machine they would starve.
                env=clean_environment(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0"),
            )
        self.address: str = self._answer()

    def ask(self, what: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def add(self, host: str = OTHER) -> None:
        self.ask("add", host=host, cpus=1)

    def is_empty(self) -> bool:
        """Whether nothing runs in it, and nothing is held."""
        return self.ask("free") and {state for state, _ in self.ask("actors")} <= {"DEAD"}

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Service:
    """What runs, as its users see it."""

    def __init__(self, up: UpProcess) -> None:
        self.up = up
        self.ready = up.ready()
        assert "server_url" in self.ready, up.outcome()

    def ask(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.ready['control_token']}"}
        request = urllib.request.Request(f"{self.ready['server_url']}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def hosts(self) -> dict[str, str]:
        """node id -> address of its machine, of those that are heard."""
        return {node_id: one["url"].split("/")[2].split(":")[0] for node_id, one in self.nodes().items()}

    def wait_for_nodes(self, num: int) -> dict[str, str]:
        wait_for(lambda: len(self.hosts()) == num)
        return self.hosts()

    def submit(self, command: str, num_sessions: int, task_id: str = "t") -> None:
        task = {
            "task_id": task_id,
            "num_samples": num_sessions,
            "instruction": "wait",
            "runtime": {"backend": "process"},
            "agent": {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True},
        }
        done = gangline("submit", "-", "--data", self.up.data, stdin=json.dumps(task))
        assert done.returncode == 0, done.stderr

    def nodes(self) -> dict[str, dict[str, Any]]:
        """node id -> what the server knows of it, of those that are heard."""
        return {one["node_id"]: one for one in self.ask("/v1/status")["nodes"] if one["age_s"] < 10}

    def drain(self, node_id: str) -> None:
        key = {"GANGLINE_TOKEN": self.ready["control_token"]}
        done = gangline("drain", "--node", self.nodes()[node_id]["url"], env=key)
        assert done.returncode == 0, done.stderr

    def sessions(self, task_id: str = "t") -> list[dict[str, Any]]:
        return self.ask(f"/v1/tasks/{task_id}")["sessions"]

    def wait_for_end(self) -> list[dict[str, Any]]:
        wait_for(lambda: {one["state"] for one in self.sessions()} == {"ended"})
        return self.sessions()

    def ends(self) -> Counter[str]:
        """session id -> how often it ended."""
        headers = {"Authorization": f"Bearer {self.ready['control_token']}"}
        request = urllib.request.Request(f"{self.ready['server_url']}/v1/events?after=0", headers=headers)
        found: Counter[str] = Counter()
        with urllib.request.urlopen(request, timeout=60) as events:
            for line in events:
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    found[event["session_id"]] += event["kind"] == "session.ended"
                    if event["kind"] == "task.ended":
                        return +found
        return +found

    def process_of(self, node_id: str) -> int | None:
        """Of `gangline node`."""
        found = [pid for pid, line in processes_with(str(self.up.data)).items() if f" --id {node_id} " in line]
        return found[0] if found else None


@pytest.fixture(scope="module")
def ray_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayMachines]:
    """Two; a test that takes one away puts it back. Gone before another module starts its own cluster."""
    need_module("ray", "pip install 'gangline[cluster]'")
    machines = RayMachines(tmp_path_factory.mktemp("ray") / "ray.log")
    machines.add()
    yield machines
    machines.close()


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "script.json").write_text(json.dumps({"default": {"text": "as you wish"}}))
    what = ("--scripted", folder / "script.json", "--tokenizer", "tiny", "--port", "0", "--json")
    with (folder / "log").open("w") as errors:
        engine = subprocess.Popen(
            [*COMMAND, "engine", *map(str, what)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=clean_environment(),
        )
    assert engine.stdout is not None
    yield json.loads(engine.stdout.readline())["engine_url"]
    engine.terminate()
    engine.communicate(timeout=60)


@pytest.fixture
def start(ray_machines: RayMachines, postgres: Cluster, engine_url: str, tmp_path: Path) -> Generator[Start]:
    """Start an `up` on the cluster with options; all are ended afterwards."""
    started: list[UpProcess] = []

    def go(*options: object) -> UpProcess:
        where = ("--cluster", "--ray-address", ray_machines.address, "--database", postgres.new_database())
        started.append(UpProcess(tmp_path / f"up{len(started)}", *where, "--engine", engine_url, *options))
        return started[-1]

    yield go
    for one in started:
        one.close()
